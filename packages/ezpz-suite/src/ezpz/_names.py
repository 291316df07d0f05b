"""Every public name of ``ezpz`` and the module it lives in: the one table of the umbrella.

``__init__.pyi`` says the same to editors and type checkers; a test holds the two and
reality equal.
"""

HOMES: dict[str, str] = {
    "History": "ezpz_obs",
    "TORCH_DTYPES_MAP": "ezpz_device",
    "all_reduce": "ezpz_dist",
    "barrier": "ezpz_dist",
    "broadcast": "ezpz_dist",
    "cleanup": "ezpz_dist",
    "get_cpus_per_node": "ezpz_topo",
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
    "get_rank": "ezpz_topo",
    "get_torch_backend": "ezpz_device",
    "get_torch_device": "ezpz_device",
    "get_torch_device_type": "ezpz_device",
    "get_world_size": "ezpz_topo",
    "get_world_size_in_use": "ezpz_topo",
    "get_world_size_total": "ezpz_topo",
    "seed_everything": "ezpz_dist",
    "setup_torch": "ezpz_dist",
    "wrap_model": "ezpz_dist",
    "write_hostfile_from_list_of_hosts": "ezpz_topo",
    "write_localhost_to_hostfile": "ezpz_topo",
}
