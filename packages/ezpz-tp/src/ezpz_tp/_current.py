"""The state in use, where none is given, and the getters over it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroup

from ._errors import DegreeError, NotInitializedError
from ._groups import EmbeddingRanks, live_world, member
from ._ranks import ORDER
from ._state import ParallelState

_default: ParallelState | None = None
_notes_without_state: dict[str, Any] = {}
_arguments: dict[str, object] = {}


class _StateInUse(threading.local):
    """The state that `use_state` set in this thread."""

    # A thread's attribute, not a context variable: torch.compile traces the one and not the other.

    state: ParallelState | None = None


_here = _StateInUse()


def initialize_tensor_parallel(
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    context_parallel_size: int = 1,
    tensor_parallel_backend: str | None = None,
    pipeline_parallel_backend: str | None = None,
    context_parallel_backend: str | None = None,
    data_parallel_backend: str | None = None,
    timeout: timedelta | None = None,
    *,
    expert_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    order: str = ORDER,
    also: Iterable[tuple[str, ...]] = (),
    embedding: bool | Mapping[str, EmbeddingRanks] = False,
) -> None:
    """Make this rank's groups and let every layer, mapping and getter use them.

    Collective: every rank calls this, with the same arguments. Once more with equal
    arguments does nothing. See `ParallelState.create` for what is made and what is raised.

    Args:
        tensor_parallel_size: Degree of tensor parallelism.
        pipeline_parallel_size: Degree of pipeline parallelism.
        context_parallel_size: Degree of context parallelism. The rest is data parallel.
        tensor_parallel_backend: Backend of the tensor groups; None is the world's.
        pipeline_parallel_backend: Backend of the pipeline groups.
        context_parallel_backend: Backend of the context groups.
        data_parallel_backend: Backend of the data groups.
        timeout: Of every group; None is the backend's own.
        expert_parallel_size: Degree of expert parallelism.
        expert_tensor_parallel_size: Tensor degree inside an expert; None is the model's.
        order: The axes from the fastest varying to the slowest (`RankLayout`).
        also: Groups that span several axes, for example ``[("tensor", "pipeline")]``.
        embedding: Make the embedding groups too (`ParallelState.create`).

    Raises:
        DegreeError: The groups exist already with other arguments, or the degrees do not fit.
    """
    backends = {
        "tensor": tensor_parallel_backend,
        "pipeline": pipeline_parallel_backend,
        "context": context_parallel_backend,
        "data": data_parallel_backend,
    }
    initialize_default(
        tensor=tensor_parallel_size,
        context=context_parallel_size,
        pipeline=pipeline_parallel_size,
        expert=expert_parallel_size,
        expert_tensor=expert_tensor_parallel_size,
        order=order,
        also=tuple(tuple(axes) for axes in also),
        embedding=embedding,
        backend={axis: backend for axis, backend in backends.items() if backend is not None},
        timeout=timeout,
    )


initialize_model_parallel = initialize_tensor_parallel


def initialize_default(**arguments: Any) -> ParallelState:
    """Make the default state, or find that the one there is of the same arguments; return it."""
    global _default, _arguments
    if _default is not None and _default.is_live:
        if arguments == _arguments:
            return _default
        raise other_arguments(_arguments, arguments, "destroy_tensor_parallel")
    destroy_tensor_parallel()
    _default = ParallelState.create(**arguments)
    _arguments = arguments
    return _default


def other_arguments(
    before: Mapping[str, object], now: Mapping[str, object], remedy: str
) -> DegreeError:
    different = (
        f"{name} was {before.get(name)!r}, now {value!r}"
        for name, value in now.items()
        if before.get(name) != value
    )
    return DegreeError(
        f"parallel groups exist already, with other arguments: {'; '.join(different)}. "
        f"Call {remedy} first"
    )


def destroy_tensor_parallel() -> None:
    """Free every group that was made, and forget the default state.

    Collective: every rank calls this. Without groups it does nothing.
    """
    global _default, _arguments
    state = _default
    _default = None
    _arguments = {}
    _notes_without_state.clear()
    if state is not None:
        state.destroy()


destroy_model_parallel = destroy_tensor_parallel


def tensor_parallel_is_initialized() -> bool:
    """Return whether there are groups to use."""
    state = current_state()
    return state is not None and state.is_live


def current_state() -> ParallelState | None:
    """Return the state in use here: `use_state`'s in this thread, else the default's, or None."""
    here = _here.state
    if here is None:
        return _default
    return here


def get_state() -> ParallelState:
    """Return the state in use here.

    Raises:
        NotInitializedError: There is none, or the world that it was made in was destroyed.
    """
    state = _find_state()
    if state is None:
        raise NotInitializedError(
            "no parallel groups; call initialize_tensor_parallel on every rank first, or give "
            "the group (tp_group=...)"
        )
    return state


def notes() -> dict[str, Any]:
    """Return what others keep for the state in use; it ends with the state."""
    # Without a state it is kept until groups are made or destroyed.
    state = current_state()
    if state is None:
        return _notes_without_state
    return state.notes


def _find_state(axes: tuple[str, ...] = ()) -> ParallelState | None:
    """Return `current_state`, if its world is there; None only where axes are of one rank."""
    state = current_state()
    if state is not None:
        state.check_world()
        return state
    world = None
    if axes:
        world = live_world()
    if world is not None and world.size() > 1:
        raise NotInitializedError(
            f"{' x '.join(axes)} parallel size, rank or ranks asked for in a world of "
            f"{world.size()} ranks without parallel groups; call initialize_tensor_parallel on "
            "every rank first"
        )
    return None


@contextmanager
def use_state(state: ParallelState) -> Iterator[ParallelState]:
    """Let ``state`` be the one in use in this thread for the time of a ``with`` block.

    Autograd may run backward in another thread: what is needed there is kept in forward.
    """
    before = _here.state
    _here.state = state
    try:
        yield state
    finally:
        _here.state = before


def tensor_group(tp_group: ProcessGroup | None = None) -> ProcessGroup | None:
    """Return the group given, or the tensor group of the state in use; None for no one else."""
    return _group_above_one(tp_group, "tensor")


def context_group(group: ProcessGroup | None = None) -> ProcessGroup | None:
    """Return the group whose ranks share a sequence, or None for no one else."""
    return _group_above_one(group, "context")


def _group_above_one(given: ProcessGroup | None, axis: str) -> ProcessGroup | None:
    """Return the group that is given, or an axis's of the state in use; None of one rank."""
    # Of a group, torch.compile guards the type alone: what it learnt of one group's rank and size
    # it takes for another's. A comparison with a string is guarded, so each group, and each state,
    # is traced for itself.
    if given is not None:
        group = member(given, axis)
        if group is None or (torch.compiler.is_compiling() and group.group_name == ""):
            return None
        if group.size() > 1:
            return group
        return None
    state = current_state()
    if state is None or state.key == "":
        return None
    group = state.several[axis]
    if group is not None:
        state.check_world()
    return group


def index_or_alone(*axes: str) -> int:
    """Return this rank's position along axes; 0 before there are groups, if it is alone."""
    state = _find_state(axes)
    if state is None:
        return 0
    return state.index(*axes)


def size_or_alone(*axes: str) -> int:
    """Return the degree of axes; 1 before there are groups, if this rank is alone."""
    state = _find_state(axes)
    if state is None:
        return 1
    return state.size(*axes)


def ranks_or_alone(*axes: str) -> tuple[int, ...]:
    """Return the global ranks along axes; rank 0 before there are groups, if it is alone."""
    state = _find_state(axes)
    if state is None:
        return (0,)
    return state.ranks(*axes)


# The module-level getters over the state in use. Those that differ in their axis alone are made,
# not written out.

Number = Callable[[], int]


def name_made(module: dict[str, Any]) -> None:
    """Give what was made the names that it has in a module: for pickle and tracebacks."""
    for name, made in module.items():
        if "<locals>" in getattr(made, "__qualname__", ""):
            made.__module__ = module["__name__"]
            made.__name__ = name
            made.__qualname__ = name


def getter(ask: Callable[..., Any], doc: str, *axes: str) -> Callable[[], Any]:
    """Return a function that asks about axes; their names stand in its docstring for ``{}``."""

    def get() -> Any:
        return ask(*axes)

    get.__doc__ = doc.format(" x ".join(axes))
    return get


_group = partial(
    getter, lambda axis: get_state().group(axis), "Return this rank's {}-parallel group."
)
_rank = partial(
    getter, index_or_alone, "Return this rank's position in its {}-parallel group, from 0."
)
_world_size = partial(
    getter, size_or_alone, "Return the number of ranks in this rank's {}-parallel group."
)
_ranks = partial(
    getter,
    lambda axis: list(ranks_or_alone(axis)),
    "Return the global ranks of this rank's {}-parallel group, in order.",
)
_src_rank = partial(
    getter,
    lambda axis: ranks_or_alone(axis)[0],
    "Return the global rank of the first rank in this rank's {}-parallel group.",
)

get_tensor_parallel_group: Callable[[], ProcessGroup] = _group("tensor")
get_tensor_parallel_rank: Number = _rank("tensor")
get_tensor_parallel_world_size: Number = _world_size("tensor")
get_tensor_parallel_ranks: Callable[[], list[int]] = _ranks("tensor")
get_tensor_parallel_src_rank: Number = _src_rank("tensor")
get_data_parallel_group: Callable[[], ProcessGroup] = _group("data")
get_data_parallel_rank: Number = _rank("data")
get_data_parallel_world_size: Number = _world_size("data")
get_data_parallel_ranks: Callable[[], list[int]] = _ranks("data")
get_data_parallel_src_rank: Number = _src_rank("data")
get_pipeline_parallel_group: Callable[[], ProcessGroup] = _group("pipeline")
get_pipeline_parallel_rank: Number = _rank("pipeline")
get_pipeline_parallel_world_size: Number = _world_size("pipeline")
get_pipeline_parallel_ranks: Callable[[], list[int]] = _ranks("pipeline")
get_pipeline_parallel_src_rank: Number = _src_rank("pipeline")
get_pipeline_parallel_first_rank: Number = _src_rank("pipeline")
get_context_parallel_group: Callable[[], ProcessGroup] = _group("context")
get_context_parallel_rank: Number = _rank("context")
get_context_parallel_world_size: Number = _world_size("context")
get_context_parallel_ranks: Callable[[], list[int]] = _ranks("context")
get_context_parallel_src_rank: Number = _src_rank("context")
get_expert_parallel_group: Callable[[], ProcessGroup] = _group("expert")
get_expert_parallel_rank: Number = _rank("expert")
get_expert_parallel_world_size: Number = _world_size("expert")
get_expert_parallel_ranks: Callable[[], list[int]] = _ranks("expert")
get_expert_parallel_src_rank: Number = _src_rank("expert")
name_made(globals())


def is_pipeline_first_stage() -> bool:
    """Return whether this rank is on the first pipeline stage."""
    return index_or_alone("pipeline") == 0


def is_pipeline_last_stage() -> bool:
    """Return whether this rank is on the last pipeline stage."""
    return index_or_alone("pipeline") == size_or_alone("pipeline") - 1


def get_pipeline_parallel_last_rank() -> int:
    """Return the global rank of the last stage of this rank's pipeline."""
    return ranks_or_alone("pipeline")[-1]


def get_pipeline_parallel_next_rank() -> int:
    """Return the global rank of the next stage of this rank's pipeline; the last's is the first."""
    return _neighbor(1)


def get_pipeline_parallel_prev_rank() -> int:
    """Return the global rank of the stage before; the first's is the last."""
    return _neighbor(-1)


def _neighbor(step: int) -> int:
    ranks = ranks_or_alone("pipeline")
    return ranks[(index_or_alone("pipeline") + step) % len(ranks)]
