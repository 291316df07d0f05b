"""Every public name of ``ezpz`` and the module it lives in: the one table of the umbrella.

``__init__.pyi`` says the same to editors and type checkers; a test holds the two and
reality equal.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

MODULES: tuple[str, ...] = ("data", "doctor", "models", "tp")
"""Modules of ``ezpz`` that ``import ezpz`` makes reachable: ``ezpz.tp`` and so on."""

HOMES: dict[str, str] = {
    "Alarms": "ezpz_obs",
    "DataLoader": "ezpz_dist",
    "DataParallelSampler": "ezpz_dist",
    "History": "ezpz_obs",
    "SnapshotOnSignal": "ezpz_dist",
    "StepTimer": "ezpz_obs",
    "TORCH_DTYPES_MAP": "ezpz_device",
    "Throughput": "ezpz_obs",
    "all_gather_object": "ezpz_dist",
    "all_reduce": "ezpz_dist",
    "barrier": "ezpz_dist",
    "breakpoint": "ezpz_dist",
    "broadcast": "ezpz_dist",
    "cleanup": "ezpz_dist",
    "configure_logs": "ezpz_obs",
    "describe": "ezpz_dist",
    "get_cpus_per_node": "ezpz_topo",
    "get_device_properties": "ezpz_device",
    "get_dist_info": "ezpz_dist",
    "get_gpus_per_node": "ezpz_topo",
    "get_hostfile_with_fallback": "ezpz_topo",
    "get_hostname": "ezpz_topo",
    "get_local_rank": "ezpz_topo",
    "get_local_world_size": "ezpz_topo",
    "get_logger": "ezpz_obs",
    "get_machine": "ezpz_topo",
    "get_node_index": "ezpz_topo",
    "get_nodes_from_hostfile": "ezpz_topo",
    "get_num_nodes": "ezpz_topo",
    "get_peak_flops": "ezpz_device",
    "get_rank": "ezpz_topo",
    "get_torch_backend": "ezpz_device",
    "get_torch_device": "ezpz_device",
    "get_torch_device_type": "ezpz_device",
    "get_world_size": "ezpz_topo",
    "get_world_size_in_use": "ezpz_topo",
    "get_world_size_total": "ezpz_topo",
    "latest_checkpoint": "ezpz_dist",
    "load_checkpoint": "ezpz_dist",
    "log_dict_as_bulleted_list": "ezpz_obs",
    "print_dist_setup": "ezpz_dist",
    "progress": "ezpz_obs",
    "query_environment": "ezpz_dist",
    "save_checkpoint": "ezpz_dist",
    "seed_everything": "ezpz_dist",
    "setup_torch": "ezpz_dist",
    "setup_wandb": "ezpz_obs",
    "synchronize": "ezpz_dist",
    "timeitlogit": "ezpz_dist",
    "verify_wandb": "ezpz_obs",
    "wrap_model": "ezpz_dist",
    "wrap_model_for_ddp": "ezpz_dist",
    "wrap_model_for_deepspeed": "ezpz_dist",
    "wrap_model_for_fsdp": "ezpz_dist",
    "wrap_model_for_fsdp2": "ezpz_dist",
    "wrap_optimizer_for_zero1": "ezpz_dist",
    "write_hostfile_from_list_of_hosts": "ezpz_topo",
    "write_localhost_to_hostfile": "ezpz_topo",
    "write_report": "ezpz_obs",
}


def unknown(module: str, name: str, known: "Iterable[str]") -> AttributeError:
    """Return the error for a name that a module has not, with the one that was meant."""
    import difflib  # noqa: PLC0415  # only a mistake needs it

    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}")
