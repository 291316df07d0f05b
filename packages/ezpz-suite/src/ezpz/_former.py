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

_FOR = {
    "ezpz.History": "setup_tracker Tracker",
    "ezpz.StepTimer": "StopWatch",
    "ezpz.Throughput": "compute_mfu",
    "ezpz.breakpoint": "DistributedPdb ForkedPdb",
    "ezpz.count_flops": "estimate_model_flops try_estimate",
    "ezpz.configure_logs": "get_file_logger silence_noisy_loggers",
    "ezpz.log_dict_as_bulleted_list": "print_config_tree",
    "ezpz_device.get_memory": "get_current_memory_allocated get_current_memory_reserved "
    "get_max_memory_allocated get_max_memory_reserved",
    "ezpz_device.reset_peak_memory": "reset_peak_memory_stats",
    "ezpz_dist.deepspeed_config": "get_deepspeed_config_json",
    "ezpz_launch.main": "run",
    "ezpz_launch.plan": "build_launch_cmd get_pbs_launch_cmd",
    "ezpz_obs.Sink": "TrackerBackend register_backend",
    "ezpz_obs.memory_metrics": "get_memory_metrics",
    "ezpz_obs.plot": "tplot tplot_dict",
    "ezpz_obs.profile": "get_context_manager get_profiling_context get_torch_profiler",
    "ezpz_topo.get_allocation": "get_active_jobid get_jobid get_scheduler "
    "get_nodelist_of_active_job get_pbs_jobid_of_active_job get_pbs_nodelist_from_jobid "
    "get_slurm_jobid_of_active_job",
    "torchinfo.summary": "model_summary summarize_model",
    "the command ezpz-launch launches": "add_to_jobslog",
    "ezpz_save_env and ezpz_load_env of utils.sh": "savejobenv loadjobenv",
}
OURS = {former: ours for ours, names in _FOR.items() for former in names.split()}
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
