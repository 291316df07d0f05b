"""Megatron-LM's ``megatron.core.parallel_state``: its names, arguments and return values.

The groups are those of `ezpz_tp`: each rank makes its own and no other, rank sets that are
equal share one, and an axis of degree 1 has a group of this rank alone. Errors are
`ezpz_tp.ParallelError`; `NotInitializedError` is an AssertionError, too, as Megatron's. Sizes
and ranks that are set by hand (``set_*``) are returned by the getters here and in `ezpz_tp.mpu`,
and change nothing else.

Source: NVIDIA/Megatron-LM megatron/core/parallel_state.py, 2026-08-22.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from . import _current, _megatron

# Which also forgets what was set by hand, and the buffers: these are notes of the state.
from ._current import destroy_model_parallel
from ._errors import NotInitializedError, ParallelError
from ._groups import EMBEDDING, live_world
from ._megatron import *  # noqa: F403 - names of this module
from ._megatron import GlobalMemoryBuffer
from ._state import ParallelState

__all__ = [
    "GlobalMemoryBuffer", "destroy_model_parallel", "get_data_parallel_group_gloo",
    "get_expert_data_parallel_group_gloo", "get_global_memory_buffer", "initialize_model_parallel",
]  # fmt: skip
__all__ += _megatron.__all__

# Those that Megatron's getters may ask for, on any ranks: all are made at once, where every
# rank takes part. Most share a group.
_GROUPS: tuple[tuple[str, ...], ...] = (
    ("tensor", "pipeline"), ("context", "data"), ("tensor", "data"), ("tensor", "context"),
    ("tensor", "context", "data"), ("expert",), ("expert_tensor",), ("expert_data",),
    ("expert_tensor", "expert"), ("expert_tensor", "expert", "pipeline"),
)  # fmt: skip


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: list[int] | None = None,
    hybrid_context_parallel: bool = False,
    expert_model_parallel_size: int = 1,
    gtp_remat_size: int = 1,
    expert_gtp_remat_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: int = 30,
    order: str = "tp-cp-ep-dp-pp",
    get_embedding_ranks: Callable[[list[int]], Sequence[int]] | None = None,
    get_position_embedding_ranks: Callable[[list[int]], Sequence[int]] | None = None,
    create_gloo_process_groups: bool = True,
    high_priority_stream_groups: list[str] | None = None,
    sharp_enabled_group: str | None = None,
    rank_offset: int = 0,
    local_world_size: int | None = None,
) -> None:
    """Make this rank's groups, all that Megatron's getters may ask for.

    Collective: every rank calls this, with the same arguments. Once more with equal arguments
    does nothing. Hints (``use_sharp``, ``sharp_enabled_group``, ``high_priority_stream_groups``,
    ``nccl_communicator_config_path``) are not taken, which a warning says.

    Arguments are Megatron-LM's; the axes' ``order`` is that of `ezpz_tp.RankLayout`. Not supported
    are ``hierarchical_context_parallel_sizes``, ``hybrid_context_parallel``, ``rank_offset``, a
    ``local_world_size`` other than the world's, and above 1 ``gtp_remat_size``,
    ``expert_gtp_remat_size`` and ``num_distributed_optimizer_instances``.
    ``create_gloo_process_groups`` makes gloo groups over the data axes, for tensors on the CPU,
    unless the world's backend handles these anyway.

    Raises:
        DegreeError: The degrees do not fit, or groups exist with other arguments.
        ParallelError: An argument is set that is not supported.
    """
    asked = locals()
    if local_world_size is not None and local_world_size != dist.get_world_size():
        raise _unsupported("local_world_size", local_world_size)
    for name, default in _UNSUPPORTED.items():
        if asked[name] not in (None, default):
            raise _unsupported(name, asked[name])
    hints = [name for name in _HINTS if asked[name]]
    if hints:
        warnings.warn(
            f"{', '.join(hints)}: not taken; groups are made with their backend's own settings",
            stacklevel=2,
        )
    if virtual_pipeline_model_parallel_size is not None and pipeline_model_parallel_size < 2:
        raise ParallelError(
            f"virtual_pipeline_model_parallel_size={virtual_pipeline_model_parallel_size} with "
            f"pipeline_model_parallel_size={pipeline_model_parallel_size}; interleaving wants at "
            "least 2 stages"
        )
    timeout = timedelta(minutes=distributed_timeout_minutes)
    backend = pipeline_model_parallel_comm_backend or None
    state = _current.initialize_default(
        tensor=tensor_model_parallel_size,
        context=context_parallel_size,
        pipeline=pipeline_model_parallel_size,
        expert=expert_model_parallel_size,
        expert_tensor=expert_tensor_parallel_size,
        order=order,
        also=_GROUPS,
        embedding={
            "embedding": get_embedding_ranks or EMBEDDING["embedding"],
            "position_embedding": get_position_embedding_ranks or EMBEDDING["position_embedding"],
        },
        backend={} if backend is None else {"pipeline": backend},
        timeout=timeout,
    )
    _set_up(state, virtual_pipeline_model_parallel_size, create_gloo_process_groups, timeout)


def _set_up(state: ParallelState, chunks: int | None, gloo: bool, timeout: timedelta) -> None:
    """Add what `ezpz_tp`'s own groups do not have, once; it all ends with the state."""
    asked = {"virtual_pipeline_model_parallel_size": chunks, "create_gloo_process_groups": gloo}
    before = state.notes.get(_ARGUMENTS)
    if before is not None:
        if before != asked:
            raise _current.other_arguments(before, asked, "destroy_model_parallel")
        return
    if chunks is not None:
        state.notes["virtual size"] = chunks
        state.notes["virtual rank"] = 0
    if gloo and not _handles_cpu():
        assert state.layout is not None
        data: list[tuple[str, ...]] = [("data",), ("context", "data"), ("expert_data",)]
        of_cpu = ParallelState.of_layout(state.layout, data, {}, backend="gloo", timeout=timeout)
        state.attach(of_cpu)
        state.notes[_GLOO] = of_cpu
    state.notes[_ARGUMENTS] = asked


_ARGUMENTS = "megatron arguments"
_GLOO = "gloo groups"
_BUFFER = "memory buffer"

_UNSUPPORTED = {
    "hierarchical_context_parallel_sizes": None, "hybrid_context_parallel": False,
    "gtp_remat_size": 1, "expert_gtp_remat_size": 1, "num_distributed_optimizer_instances": 1,
    "rank_offset": 0,
}  # fmt: skip
_HINTS = (
    "use_sharp", "sharp_enabled_group", "nccl_communicator_config_path",
    "high_priority_stream_groups",
)  # fmt: skip


def _unsupported(name: str, value: object) -> ParallelError:
    return ParallelError(
        f"{name}={value!r} is not supported by ezpz_tp; leave it at {_UNSUPPORTED.get(name)!r}"
    )


def _handles_cpu() -> bool:
    world = live_world()
    backends = ""
    if world is not None:
        backends = dist.get_backend_config(world)
    return any(word in backends for word in ("gloo", "mpi", "fake"))


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup:
    """Return the data-parallel group (or that over context and data) for tensors on the CPU."""
    return _gloo_state().group(*_megatron.data_axes(with_context_parallel, partial_data_parallel))


def get_expert_data_parallel_group_gloo(
    partial_expert_data_parallel: bool = False,  # noqa: ARG001 - one instance: the same group
) -> ProcessGroup:
    """Return the group of the ranks that hold copies of this rank's experts, for the CPU."""
    return _gloo_state().group("expert_data")


def _gloo_state() -> ParallelState:
    state = _current.get_state()
    made: ParallelState | None = state.notes.get(_GLOO)
    if made is not None:
        return made
    wanted: bool = state.notes.get(_ARGUMENTS, {}).get("create_gloo_process_groups", True)
    if not wanted or not _handles_cpu():
        raise NotInitializedError(
            "no gloo groups; call parallel_state.initialize_model_parallel("
            "create_gloo_process_groups=True)"
        )
    return state


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """Return the buffers that code of one process shares, made when first asked for.

    They end with the groups.

    Raises:
        NotInitializedError: There are no groups yet.
    """
    buffer: GlobalMemoryBuffer = _current.get_state().notes.setdefault(
        _BUFFER, GlobalMemoryBuffer()
    )
    return buffer
