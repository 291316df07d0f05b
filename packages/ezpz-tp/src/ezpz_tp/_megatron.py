# ruff: noqa: ARG001 - arguments of Megatron's that choose from groups of which there is one
"""What `ezpz_tp.parallel_state` is made of: Megatron-LM's names over the state in use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ._current import (
    Number,
    current_state,
    get_context_parallel_rank,
    get_context_parallel_world_size,
    get_state,
    getter,
    index_or_alone,
    name_made,
    notes,
    ranks_or_alone,
    size_or_alone,
    tensor_parallel_is_initialized,
)
from ._current import get_expert_parallel_src_rank as get_expert_model_parallel_src_rank
from ._current import get_pipeline_parallel_first_rank as get_pipeline_model_parallel_first_rank
from ._current import get_tensor_parallel_src_rank as get_tensor_model_parallel_src_rank
from ._errors import DegreeError, NotInitializedError, ParallelError
from ._init import as_dtype
from ._ranks import RankLayout
from ._state import ParallelState

__all__ = [
    "RankGenerator", "create_all_gather_groups", "get_amax_reduction_group",
    "get_context_parallel_global_ranks", "get_context_parallel_group", "get_context_parallel_rank",
    "get_context_parallel_world_size", "get_data_and_context_parallel_group",
    "get_data_parallel_group", "get_data_parallel_rank", "get_data_parallel_src_rank",
    "get_data_parallel_world_size", "get_embedding_group", "get_expert_data_parallel_group",
    "get_expert_data_parallel_rank", "get_expert_data_parallel_world_size",
    "get_expert_gtp_weight_remat_group", "get_expert_gtp_weight_remat_rank",
    "get_expert_gtp_weight_remat_world_size", "get_expert_model_parallel_group",
    "get_expert_model_parallel_rank", "get_expert_model_parallel_src_rank",
    "get_expert_model_parallel_world_size", "get_expert_tensor_and_model_parallel_group",
    "get_expert_tensor_model_pipeline_parallel_group", "get_expert_tensor_parallel_group",
    "get_expert_tensor_parallel_rank", "get_expert_tensor_parallel_world_size",
    "get_gtp_weight_remat_group", "get_gtp_weight_remat_rank", "get_gtp_weight_remat_world_size",
    "get_hierarchical_context_parallel_groups", "get_inter_distributed_optimizer_instance_group",
    "get_intra_distributed_optimizer_instance_group", "get_model_parallel_group",
    "get_model_parallel_src_rank", "get_pipeline_model_parallel_first_rank",
    "get_pipeline_model_parallel_group", "get_pipeline_model_parallel_last_rank",
    "get_pipeline_model_parallel_next_rank", "get_pipeline_model_parallel_prev_rank",
    "get_pipeline_model_parallel_rank", "get_pipeline_model_parallel_world_size",
    "get_position_embedding_group", "get_tensor_and_context_parallel_group",
    "get_tensor_and_data_parallel_group", "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank", "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size", "get_virtual_pipeline_model_parallel_rank",
    "get_virtual_pipeline_model_parallel_world_size", "is_initialized", "is_pipeline_first_stage",
    "is_pipeline_last_stage", "is_rank_in_embedding_group", "is_rank_in_position_embedding_group",
    "model_parallel_is_initialized", "set_expert_model_parallel_rank",
    "set_expert_model_parallel_world_size", "set_expert_tensor_parallel_rank",
    "set_expert_tensor_parallel_world_size", "set_pipeline_model_parallel_rank",
    "set_pipeline_model_parallel_world_size", "set_tensor_model_parallel_rank",
    "set_tensor_model_parallel_world_size", "set_virtual_pipeline_model_parallel_rank",
    "set_virtual_pipeline_model_parallel_world_size",
]  # fmt: skip


# Getters and setters that differ in their axes alone are made, not written out.
#
# Before there are groups, sizes are 1 and ranks 0 if this rank is alone in the world, and all else
# is a NotInitializedError. Megatron's arguments ``with_gtp_remat`` and ``partial_*`` change nothing
# here: without weights that are gathered again and without several optimizer instances, what they
# choose from is the same group.
#
# Checkpoint converters set sizes and ranks by hand: they build the model of rank (t, p) in one
# process. Only the getters of `ezpz_tp.parallel_state` and `ezpz_tp.mpu` read these; layers and
# mappings communicate in the groups that there are. They end with the state that was in use when
# they were set; those set without one, when groups are made or destroyed.
#
# Source: NVIDIA/Megatron-LM megatron/core/parallel_state.py, 2026-08-22.

is_initialized = tensor_parallel_is_initialized
model_parallel_is_initialized = tensor_parallel_is_initialized


class GroupGetter(Protocol):
    """A function that returns a group."""

    def __call__(self, check_initialized: bool = True) -> ProcessGroup | None: ...


class SizeSetter(Protocol):
    """A function that sets a size by hand."""

    def __call__(self, world_size: int | None) -> None: ...


class RankSetter(Protocol):
    """A function that sets a rank by hand."""

    def __call__(self, rank: int | None) -> None: ...


def found_group(check_initialized: bool, *axes: str) -> ProcessGroup | None:
    """Return a group; None where there is none and the caller said not to check."""
    state = current_state()
    if not check_initialized and (state is None or not state.has_group(*axes)):
        return None
    return get_state().group(*axes)


def by_hand(name: str) -> int | None:
    value: int | None = notes().get(name)
    return value


def size_of(*axes: str) -> int:
    value = by_hand(f"{' '.join(axes)} size")
    if value is None:
        return size_or_alone(*axes)
    return value


def rank_of(*axes: str) -> int:
    value = by_hand(f"{' '.join(axes)} rank")
    if value is None:
        return index_or_alone(*axes)
    return value


def group_getter(*axes: str) -> GroupGetter:
    def get(check_initialized: bool = True) -> ProcessGroup | None:
        return found_group(check_initialized, *axes)

    group = " x ".join(axes)
    get.__doc__ = f"Return this rank's {group} group; None where it is absent and not checked for."
    return get


size_getter = partial(getter, size_of, "Return the number of ranks in this rank's {} group.")
rank_getter = partial(getter, rank_of, "Return this rank's position in its {} group.")


def size_setter(axis: str) -> SizeSetter:
    def set_(world_size: int | None) -> None:
        notes()[f"{axis} size"] = world_size

    set_.__doc__ = f"Let the getter of the {axis} group's size return this; None undoes it."
    return set_


def rank_setter(axis: str) -> RankSetter:
    def set_(rank: int | None) -> None:
        notes()[f"{axis} rank"] = rank

    set_.__doc__ = f"Let the getter of the rank in the {axis} group return this; None undoes it."
    return set_


get_model_parallel_group: GroupGetter = group_getter("tensor", "pipeline")
get_tensor_model_parallel_group: GroupGetter = group_getter("tensor")
get_pipeline_model_parallel_group: GroupGetter = group_getter("pipeline")
get_context_parallel_group: GroupGetter = group_getter("context")
get_embedding_group: GroupGetter = group_getter("embedding")
get_position_embedding_group: GroupGetter = group_getter("position_embedding")
get_tensor_and_context_parallel_group: GroupGetter = group_getter("tensor", "context")
get_intra_distributed_optimizer_instance_group: GroupGetter = group_getter(
    "tensor", "context", "data", "pipeline"
)
get_tensor_model_parallel_world_size: Number = size_getter("tensor")
get_tensor_model_parallel_rank: Number = rank_getter("tensor")
get_pipeline_model_parallel_world_size: Number = size_getter("pipeline")
get_pipeline_model_parallel_rank: Number = rank_getter("pipeline")
set_tensor_model_parallel_world_size: SizeSetter = size_setter("tensor")
set_tensor_model_parallel_rank: RankSetter = rank_setter("tensor")
set_pipeline_model_parallel_world_size: SizeSetter = size_setter("pipeline")
set_pipeline_model_parallel_rank: RankSetter = rank_setter("pipeline")

# Experts lie on a grid of their own.
get_expert_model_parallel_group: GroupGetter = group_getter("expert")
get_expert_tensor_parallel_group: GroupGetter = group_getter("expert_tensor")
get_expert_tensor_and_model_parallel_group: GroupGetter = group_getter("expert_tensor", "expert")
get_expert_model_parallel_world_size: Number = size_getter("expert")
get_expert_model_parallel_rank: Number = rank_getter("expert")
get_expert_tensor_parallel_world_size: Number = size_getter("expert_tensor")
get_expert_tensor_parallel_rank: Number = rank_getter("expert_tensor")
set_expert_model_parallel_world_size: SizeSetter = size_setter("expert")
set_expert_model_parallel_rank: RankSetter = rank_setter("expert")
set_expert_tensor_parallel_world_size: SizeSetter = size_setter("expert_tensor")
set_expert_tensor_parallel_rank: RankSetter = rank_setter("expert_tensor")
name_made(globals())


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Set the number of model chunks a pipeline rank holds; None is no interleaving."""
    notes()["virtual size"] = world_size


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Return the number of model chunks a pipeline rank holds, or None."""
    return by_hand("virtual size")


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the model chunk that is meant. Deprecated in Megatron, and here: pass ``vp_stage``."""
    warnings.warn(
        "set_virtual_pipeline_model_parallel_rank is deprecated; pass vp_stage to "
        "is_pipeline_first_stage, is_pipeline_last_stage and is_rank_in_embedding_group",
        DeprecationWarning,
        stacklevel=2,
    )
    notes()["virtual rank"] = rank


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Return the model chunk that is meant, or None."""
    return by_hand("virtual rank")


def data_axes(with_context_parallel: bool, partial: bool = False) -> tuple[str, ...]:
    if partial and not with_context_parallel:
        raise ParallelError(
            "partial_data_parallel=True without with_context_parallel=True; an optimizer "
            "instance spans context and data"
        )
    if with_context_parallel:
        return ("context", "data")
    return ("data",)


def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> None:
    """Return None, where ``check_initialized`` is False: there is one optimizer instance."""
    _refuse_group(check_initialized, "across optimizer instances, of which there is one")


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> None:
    """Return None, where ``check_initialized`` is False: the context axis is one ring."""
    _refuse_group(check_initialized, "of a context axis in levels")


def _refuse_group(check_initialized: bool, what: str) -> None:
    if check_initialized:
        raise NotInitializedError(
            f"no group {what}; ezpz_tp makes none: pass check_initialized=False to have None"
        )


def get_gtp_weight_remat_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Return the group that gathers sharded weights again: this rank alone, as none are."""
    if not check_initialized and not tensor_parallel_is_initialized():
        return None
    return get_state().alone()


def get_gtp_weight_remat_world_size() -> int:
    """Return 1: weights are not sharded once more."""
    return 1


def get_gtp_weight_remat_rank() -> int:
    """Return 0, this rank's position in `get_gtp_weight_remat_group`."""
    return 0


# Experts' weights are not sharded once more, either.
get_expert_gtp_weight_remat_group = get_gtp_weight_remat_group
get_expert_gtp_weight_remat_world_size = get_gtp_weight_remat_world_size
get_expert_gtp_weight_remat_rank = get_gtp_weight_remat_rank


def get_model_parallel_src_rank() -> int:
    """Return the global rank of the first rank over tensor and pipeline."""
    return ranks_or_alone("tensor", "pipeline")[0]


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int] | None:
    """Return the global ranks of this rank's context-parallel group."""
    if not check_initialized and current_state() is None:
        return None
    return list(get_state().ranks("context"))


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> ProcessGroup | None:
    """Return the group over tensor and data, and context if asked for."""
    return found_group(check_initialized, "tensor", *data_axes(with_context_parallel))


def get_amax_reduction_group(
    with_context_parallel: bool = False, tp_only_amax_red: bool = False
) -> ProcessGroup:
    """Return the group over which FP8 maxima are reduced."""
    axes = []
    if not tp_only_amax_red:
        axes = ["data"]
    context = []
    if with_context_parallel:
        context = ["context"]
    return get_state().group("tensor", *context, *axes)


def get_data_parallel_group(
    with_context_parallel: bool = False,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
) -> ProcessGroup:
    """Return this rank's data-parallel group, or that over context and data."""
    return get_state().group(*data_axes(with_context_parallel, partial_data_parallel))


def get_data_and_context_parallel_group(with_context_parallel: bool = True) -> ProcessGroup:
    """Return this rank's group over context and data, or that over data alone."""
    return get_data_parallel_group(with_context_parallel)


def get_data_parallel_world_size(
    with_context_parallel: bool = False,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
) -> int:
    """Return the number of ranks in `get_data_parallel_group`."""
    return size_or_alone(*data_axes(with_context_parallel, partial_data_parallel))


def get_data_parallel_rank(
    with_context_parallel: bool = False,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
) -> int:
    """Return this rank's position in `get_data_parallel_group`."""
    return index_or_alone(*data_axes(with_context_parallel, partial_data_parallel))


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Return the global rank of the first rank of the data-parallel group."""
    return ranks_or_alone(*data_axes(with_context_parallel))[0]


# Megatron's questions about the stages of a pipeline.


def get_pipeline_model_parallel_last_rank() -> int:
    """Return the global rank of the last stage of this rank's pipeline."""
    return _rank_of_stage(size_of("pipeline") - 1)


def get_pipeline_model_parallel_next_rank() -> int:
    """Return the global rank of the next stage; after the last comes the first."""
    return _rank_of_stage(rank_of("pipeline") + 1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """Return the global rank of the stage before; before the first comes the last."""
    return _rank_of_stage(rank_of("pipeline") - 1)


def _rank_of_stage(index: int) -> int:
    ranks = ranks_or_alone("pipeline")
    size = size_of("pipeline")
    if index % size >= len(ranks):
        raise ParallelError(
            f"no rank has stage {index % size}: the pipeline size was set to {size} by hand, and "
            f"the pipeline has the ranks {list(ranks)}; undo it with "
            "set_pipeline_model_parallel_world_size(None)"
        )
    return ranks[index % size]


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank (and, if asked, model chunk ``vp_stage``) is first in the model."""
    if not ignore_virtual and _count_chunks(vp_stage) is not None and vp_stage != 0:
        return False
    return rank_of("pipeline") == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank (and, if asked, model chunk ``vp_stage``) is last in the model."""
    chunks = None
    if not ignore_virtual:
        chunks = _count_chunks(vp_stage)
    if chunks is not None and vp_stage != chunks - 1:
        return False
    return rank_of("pipeline") == size_of("pipeline") - 1


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank (and, if asked, model chunk) holds word embeddings."""
    state = current_state()
    if state is None or not state.has("embedding"):
        return False
    ranks = state.ranks("embedding")
    if not ignore_virtual and state.rank == ranks[0]:
        return is_pipeline_first_stage(False, vp_stage)
    if not ignore_virtual and state.rank == ranks[-1]:
        return is_pipeline_last_stage(False, vp_stage)
    return True


def is_rank_in_position_embedding_group() -> bool:
    """Return whether this rank holds position embeddings."""
    state = current_state()
    return state is not None and state.has("position_embedding")


def _count_chunks(vp_stage: int | None) -> int | None:
    chunks = get_virtual_pipeline_model_parallel_world_size()
    if chunks is not None and vp_stage is None:
        raise ParallelError(
            f"a pipeline rank holds {chunks} model chunks; pass vp_stage to say which is meant"
        )
    return chunks


# Megatron's getters for experts.


def get_expert_data_parallel_group(
    check_initialized: bool = True,
    with_gtp_remat: bool = True,
    partial_expert_data_parallel: bool = False,
) -> ProcessGroup | None:
    """Return the group of the ranks that hold copies of this rank's experts."""
    return found_group(check_initialized, "expert_data")


def get_expert_data_parallel_rank(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """Return this rank's position in `get_expert_data_parallel_group`."""
    return index_or_alone("expert_data")


def get_expert_data_parallel_world_size(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """Return the number of ranks in `get_expert_data_parallel_group`."""
    return size_or_alone("expert_data")


def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True, with_egtp_remat: bool = False
) -> ProcessGroup | None:
    """Return the group over expert tensor, expert and pipeline."""
    return found_group(check_initialized, "expert_tensor", "expert", "pipeline")


# Megatron's ways to make and change groups besides those of the axes.


def create_all_gather_groups(
    for_expert_parallelism: bool = False,
    timeout: timedelta | None = None,
    nccl_comm_cfgs: dict[str, Any] | None = None,
) -> tuple[ProcessGroup, ProcessGroup | None]:
    """Make groups of the ranks over context and data once more, to communicate beside these.

    Collective: every rank calls this. They end with the state in use.

    Args:
        for_expert_parallelism: Of the ranks of ``expert_data``, too.
        timeout: Of these groups; None is the backend's own.
        nccl_comm_cfgs: Without effect.

    Returns:
        The group over context and data, and that of the experts: None where they are not asked
        for or not spread over ranks.
    """
    state = get_state()
    if state.layout is None:
        raise ParallelError(
            "create_all_gather_groups: the state was made of groups, not of degrees; make these "
            "with torch.distributed.new_group"
        )
    wanted: list[tuple[str, ...]] = [("context", "data")]
    if for_expert_parallelism and state.size("expert") > 1:
        wanted.append(("expert_data",))
    made = ParallelState.of_layout(
        state.layout, wanted, {}, backend=None, timeout=timeout, apart=True
    )
    state.attach(made)
    return made.group(*wanted[0]), made.group(*wanted[1]) if wanted[1:] else None


class RankGenerator:
    """The ranks of every group, by Megatron-LM's names of axes: `ezpz_tp.RankLayout`.

    ``order`` is of the axes from the fastest varying to the slowest, joined by ``-``. Of ``ep`` and
    ``cp`` one is 1, as is ``gtp_remat``.

    Raises:
        DegreeError: Both ``ep`` and ``cp`` are above 1, or the order lacks an axis.
        NotImplementedError: ``gtp_remat`` is not 1.
    """

    def __init__(
        self,
        tp: int,
        ep: int,
        dp: int,
        pp: int,
        cp: int,
        order: str,
        rank_offset: int = 0,
        gtp_remat: int = 1,
    ) -> None:
        if gtp_remat != 1:
            raise NotImplementedError(f"RankGenerator: gtp_remat={gtp_remat}; expected 1")
        if ep > 1 and cp > 1:
            raise DegreeError(
                f"RankGenerator: ep={ep} and cp={cp}; expected 1 of one of them, as experts lie on "
                "a grid of their own"
            )
        self.tp: int = tp
        self.ep: int = ep
        self.dp: int = dp
        self.pp: int = pp
        self.cp: int = cp
        self.gtp_remat: int = gtp_remat
        self.rank_offset: int = rank_offset
        self.world_size: int = tp * ep * dp * pp * cp
        sizes = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp, "gtp_remat": 1}
        self.name_to_size: dict[str, int] = sizes
        given = order.lower().split("-")
        self.order: str = "-".join([*given, *(name for name in sizes if name not in given)])
        self.ordered_size: list[int] = [sizes.get(token, 0) for token in self.order.split("-")]
        # One axis of the two is of degree 1: the other has its place in the layout.
        self._axes = {"tp": "tensor", "dp": "data", "pp": "pipeline"}
        self._axes["ep" if ep > 1 else "cp"] = "context"
        tokens = [name for name in given if name in {"tp", "dp", "pp"} or sizes.get(name) != 1]
        self._layout = RankLayout(
            self.world_size,
            tensor=tp,
            context=cp * ep,
            pipeline=pp,
            order="-".join("cp" if name == "ep" else name for name in tokens),
        )

    def get_ranks(self, token: str) -> list[list[int]]:
        """Return the ranks of every group that spans axes, such as ``"tp"`` or ``"tp-dp"``.

        Raises:
            ValueError: There is no such axis.
        """
        wanted = token.split("-")
        for name in wanted:
            if name not in self.name_to_size:
                raise ValueError(f"axis {name!r}; expected one of {', '.join(self.name_to_size)}")
        axes = [self._axes[name] for name in wanted if self.name_to_size[name] > 1]
        return [[rank + self.rank_offset for rank in ranks] for ranks in self._layout.groups(axes)]


# Buffers that are kept and handed out again.


class GlobalMemoryBuffer:
    """Buffers by name, dtype and device, which grow and never shrink.

    The same memory is handed out each time: who asks sees to it that two uses of a name do
    not overlap. Megatron-LM's class of this name (megatron/core/utils.py).
    """

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def get_tensor(
        self,
        tensor_shape: Sequence[int],
        dtype: torch.dtype | str,
        name: str,
        mem_alloc_context: Callable[[], AbstractContextManager[object]] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Return a tensor of uninitialized, reused memory.

        Args:
            tensor_shape: Its shape.
            dtype: Its dtype.
            name: Of the buffer.
            mem_alloc_context: In which new memory is allocated.
            device: Of the buffer; the current accelerator if None, and else the CPU.
        """
        dtype = as_dtype(dtype)
        where = _current_device() if device is None else torch.device(device)
        key = (name, dtype, where)
        length = prod(tensor_shape)
        held = self.buffer.get(key)
        if held is None or held.numel() < length:
            with (mem_alloc_context or nullcontext)():
                held = torch.empty(length, dtype=dtype, device=where)
            self.buffer[key] = held
        return held[:length].view(*tensor_shape)


def _current_device() -> torch.device:
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        return torch.device(kind.type, torch.get_device_module(kind).current_device())
    return torch.device("cpu")
