"""The names of the earlier ezpz (0.26): its modules, and for the other names what is here."""

from __future__ import annotations

from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

MODULES: dict[str, dict[str, str]] = {
    "configs": {"load_ds_config": "ezpz_dist:deepspeed_config"},
    "dist": {},
    "distributed": {},
    "history": {"History": "ezpz_obs:History"},
    "jobs": {"get_allocation": "ezpz_topo:get_allocation"},
    "launch": {"launch": "ezpz_launch:main", "main": "ezpz_launch:main"},
    "log": {
        "configure_logs": "ezpz_obs:configure_logs", "get_logger": "ezpz_obs:get_logger",
        "getLogger": "ezpz_obs:get_logger", "get_rich_logger": "ezpz_obs:get_logger",
    },
    "pbs": {"get_pbs_nodefile": "ezpz_topo:get_hostfile_with_fallback"},
    "profile": {"profile": "ezpz_obs:profile"},
    "slurm": {"expand_nodelist": "ezpz_topo:expand_nodelist"},
    "tplot": {"plot": "ezpz_obs:plot"},
}  # fmt: skip
"""The modules that are found under their old names: of each what it has, and where. Other names are
looked up in `ezpz`, which has all of ``distributed``."""

_JOB, _HOSTS = "ezpz_topo.get_allocation().job_id", "ezpz_topo.get_allocation().hosts"
OURS = {
    "DistributedPdb": "ezpz.breakpoint",
    "ForkedPdb": "ezpz.breakpoint",
    "StopWatch": "ezpz.StepTimer",
    "Tracker": "ezpz.History",
    "TrackerBackend": "ezpz_obs.Sink",
    "TrainConfig": "a dataclass of your own",
    "add_to_jobslog": "ezpz-launch history",
    "build_launch_cmd": "ezpz_launch.plan",
    "compute_mfu": "ezpz.Throughput",
    "estimate_model_flops": "ezpz_obs.transformer_flops",
    "get_active_jobid": _JOB,
    "get_context_manager": "ezpz_obs.profile",
    "get_current_memory_allocated": "ezpz_device.get_memory",
    "get_current_memory_reserved": "ezpz_device.get_memory",
    "get_deepspeed_config_json": "ezpz_dist.deepspeed_config",
    "get_file_logger": "ezpz.configure_logs",
    "get_jobid": _JOB,
    "get_max_memory_allocated": "ezpz_device.get_memory",
    "get_max_memory_reserved": "ezpz_device.get_memory",
    "get_memory_metrics": "ezpz_obs.memory_metrics",
    "get_nodelist_of_active_job": _HOSTS,
    "get_pbs_jobid_of_active_job": _JOB,
    "get_pbs_launch_cmd": "ezpz_launch.plan",
    "get_pbs_nodelist_from_jobid": _HOSTS,
    "get_profiling_context": "ezpz_obs.profile",
    "get_scheduler": "ezpz_topo.get_allocation().scheduler",
    "get_slurm_jobid_of_active_job": _JOB,
    "get_timestamp": "time.strftime",
    "get_torch_profiler": "ezpz_obs.profile",
    "grab_tensor": "tensor.item(), and History takes tensors as they are",
    "init_device_mesh_safe": "torch.distributed.init_device_mesh",
    "loadjobenv": "ezpz_load_env of utils.sh",
    "model_summary": "ezpz.describe",
    "print_config_tree": "ezpz.log_dict_as_bulleted_list",
    "register_backend": "ezpz_obs.Sink",
    "reset_peak_memory_stats": "ezpz_device.reset_peak_memory",
    "run": "ezpz_launch.main",
    "savejobenv": "ezpz_save_env of utils.sh",
    "setup_tracker": "ezpz.History",
    "silence_noisy_loggers": "ezpz.configure_logs",
    "summarize_dict": "what history.update returns",
    "summarize_model": "ezpz.describe",
    "tplot": "ezpz_obs.plot",
    "tplot_dict": "ezpz_obs.plot",
    "try_estimate": "ezpz_obs.transformer_flops",
}
"""What to use for a name that is not here; ``docs/from-ezpz.md`` has more."""


def explain(module: str, name: str) -> AttributeError:
    """Return the error for a name that a module does not have, with ours where it had it once."""
    ours = f"; the earlier ezpz had it, here it is {OURS[name]}" if name in OURS else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{ours}")


def find_spec(name: str) -> ModuleSpec | None:
    loader: object = _Loader
    return ModuleSpec(name, loader) if name.removeprefix("ezpz.") in MODULES else None  # type: ignore[arg-type]


class _Loader:
    @staticmethod
    def create_module(_: ModuleSpec) -> None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        names = MODULES[module.__name__.removeprefix("ezpz.")]

        def get(name: str) -> object:
            if name not in names and name not in import_module("ezpz").__all__:
                raise explain(module.__name__, name)
            home, _, there = names.get(name, f"ezpz:{name}").partition(":")
            value: object = getattr(import_module(home), there)
            setattr(module, name, value)
            return value

        module.__doc__ = f"What is here of the earlier ezpz's ``{module.__name__}``."
        vars(module).update(__getattr__=get, __dir__=lambda: sorted(names), __all__=sorted(names))
