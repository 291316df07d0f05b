"""Run one PyTorch training script, unchanged, from a laptop to a supercomputer.

Importing ``ezpz`` loads nothing: each name is fetched from its package when it is first
used, and kept.
"""

from ._version import __version__ as __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    # The one list of the public names: type checkers read it, and `attach` does.
    from ezpz_device import TORCH_DTYPES_MAP as TORCH_DTYPES_MAP
    from ezpz_device import count_flops as count_flops
    from ezpz_device import get_device_properties as get_device_properties
    from ezpz_device import get_peak_flops as get_peak_flops
    from ezpz_device import get_torch_backend as get_torch_backend
    from ezpz_device import get_torch_device as get_torch_device
    from ezpz_device import get_torch_device_type as get_torch_device_type
    from ezpz_dist import DataLoader as DataLoader
    from ezpz_dist import DataParallelSampler as DataParallelSampler
    from ezpz_dist import SnapshotOnSignal as SnapshotOnSignal
    from ezpz_dist import all_gather_object as all_gather_object
    from ezpz_dist import all_reduce as all_reduce
    from ezpz_dist import barrier as barrier
    from ezpz_dist import breakpoint as breakpoint
    from ezpz_dist import broadcast as broadcast
    from ezpz_dist import cleanup as cleanup
    from ezpz_dist import get_dist_info as get_dist_info
    from ezpz_dist import latest_checkpoint as latest_checkpoint
    from ezpz_dist import load_checkpoint as load_checkpoint
    from ezpz_dist import print_dist_setup as print_dist_setup
    from ezpz_dist import query_environment as query_environment
    from ezpz_dist import save_checkpoint as save_checkpoint
    from ezpz_dist import seed_everything as seed_everything
    from ezpz_dist import setup_torch as setup_torch
    from ezpz_dist import synchronize as synchronize
    from ezpz_dist import timeitlogit as timeitlogit
    from ezpz_dist import wrap_model as wrap_model
    from ezpz_dist import wrap_model_for_ddp as wrap_model_for_ddp
    from ezpz_dist import wrap_model_for_deepspeed as wrap_model_for_deepspeed
    from ezpz_dist import wrap_model_for_fsdp as wrap_model_for_fsdp
    from ezpz_dist import wrap_model_for_fsdp2 as wrap_model_for_fsdp2
    from ezpz_dist import wrap_optimizer_for_zero1 as wrap_optimizer_for_zero1
    from ezpz_obs import History as History
    from ezpz_obs import StepTimer as StepTimer
    from ezpz_obs import Throughput as Throughput
    from ezpz_obs import configure_logs as configure_logs
    from ezpz_obs import get_logger as get_logger
    from ezpz_obs import log_dict_as_bulleted_list as log_dict_as_bulleted_list
    from ezpz_obs import progress as progress
    from ezpz_obs import setup_mlflow as setup_mlflow
    from ezpz_obs import setup_wandb as setup_wandb
    from ezpz_obs import verify_wandb as verify_wandb
    from ezpz_obs import write_report as write_report
    from ezpz_topo import get_cpus_per_node as get_cpus_per_node
    from ezpz_topo import get_gpus_per_node as get_gpus_per_node
    from ezpz_topo import get_hostfile_with_fallback as get_hostfile_with_fallback
    from ezpz_topo import get_hostname as get_hostname
    from ezpz_topo import get_local_rank as get_local_rank
    from ezpz_topo import get_local_world_size as get_local_world_size
    from ezpz_topo import get_machine as get_machine
    from ezpz_topo import get_node_index as get_node_index
    from ezpz_topo import get_nodes_from_hostfile as get_nodes_from_hostfile
    from ezpz_topo import get_num_nodes as get_num_nodes
    from ezpz_topo import get_rank as get_rank
    from ezpz_topo import get_staged_path as get_staged_path
    from ezpz_topo import get_world_size as get_world_size
    from ezpz_topo import get_world_size_in_use as get_world_size_in_use
    from ezpz_topo import get_world_size_total as get_world_size_total
    from ezpz_topo import write_hostfile_from_list_of_hosts as write_hostfile_from_list_of_hosts
    from ezpz_topo import write_localhost_to_hostfile as write_localhost_to_hostfile

    from . import data as data
    from . import doctor as doctor
    from . import models as models
    from . import spmd as spmd
    from . import tp as tp
else:
    import sys

    from ezpz_topo import attach

    _get, __dir__ = attach(__name__)

    def __getattr__(name):
        from importlib import import_module  # noqa: PLC0415 - importing ezpz loads nothing

        try:
            return _get(name)
        except AttributeError:
            _former = import_module(f"{__name__}._former")
            if name in _get("__all__"):
                raise
            if name not in _former.MODULES:
                raise _former.explain(__name__, name) from None
        return import_module(f"{__name__}.{name}")

    class _Former:
        """Finds modules that the earlier ezpz had, of which there are no files: ``ezpz.log``."""

        @staticmethod
        def find_spec(name, *_):
            if not name.startswith(f"{__name__}."):
                return None
            from ._former import find_spec  # noqa: PLC0415 - as above

            return find_spec(name)

    sys.meta_path.append(_Former)
