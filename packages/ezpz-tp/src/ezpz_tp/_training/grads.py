"""Gradients that are partial on a rank, and what they still have to be summed over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed import ProcessGroup
from torch.overrides import handle_torch_function, has_torch_function

from ezpz_tp._errors import NotInitializedError, ParallelError
from ezpz_tp._groups.default import current_state, index_or_alone
from ezpz_tp._groups.state import ParallelState
from ezpz_tp._groups.world import live_world
from ezpz_tp._regions.collectives import all_reduce_

_BUCKET = 2**28
"""Bytes that are sent at once."""

_Entry = tuple[Tensor, Tensor, bool]
"""A parameter, its gradient or zeros in its place, and whether it had none."""

Parameters = Tensor | nn.Module | Iterable[Tensor | nn.Module]
"""A parameter, a module (all of its parameters), or several of these."""


@torch.no_grad()
def finalize_grads(
    model_or_parameters: Parameters,
    *,
    average_over: str | Iterable[str] = (),
    sum_over: str | Iterable[str] = (),
    state: ParallelState | None = None,
    embedding_group: ProcessGroup | None = None,
) -> None:
    """Sum, in place, the gradients that backward left partial on each rank.

    Call it once a step: after the last backward pass, and before `clip_grad_norm_` and the
    optimizer. Two calls would sum twice. Reductions over data-parallel ranks (DDP, FSDP2) may
    come before or after, or be done here.

    Two kinds of parameters are always summed, each in one collective for each dtype:

    * those with ``sequence_parallel`` True (norms, and biases of row-parallel layers), over the
      tensor-parallel group;
    * tied embeddings, with ``shared_embedding`` or ``shared`` True on every stage that holds a
      copy, over the embedding group.

    All parameters are reduced over the axes that are named, where no DistributedDataParallel or
    FSDP2 does it: of a pipeline, and over the context axis. It depends on the loss which way:

    * ``average_over``: a rank's loss is the mean over its own tokens, and all ranks have equally
      many. What DDP does.
    * ``sum_over``: a rank's loss is a sum over its tokens, divided by the number of tokens on all
      of these ranks. It is right also where padding leaves the ranks unequally many.

    Both may be named (mean over data, sum over context). It is one collective for each 256 MiB
    and dtype over the group of all axes (``also=[("data", "context")]`` when groups are made), or
    without such a group one for each axis.

    What is summed is ``main_grad`` where a parameter has one, else ``grad``; of a DTensor
    (FSDP2) this rank's shard. A rank that has no gradient of such a parameter counts as zero,
    and gets the sum if another rank had one. At tensor-parallel degree 1 nothing is sent for
    the first kind, in a pipeline of one stage nothing for the second.

    Collective: every rank calls this, with the same tagged parameters in the same order.

    Args:
        model_or_parameters: A module, parameters, or several modules (chunks of a pipeline).
        average_over: Axes, ``data`` or ``context`` or both, whose ranks' gradients are averaged.
        sum_over: Axes whose ranks' gradients are summed.
        state: Whose groups; the default's if None.
        embedding_group: Instead of the state's, of first and last stage.

    Raises:
        ParallelError: A tied embedding on a pipeline's stage without an embedding group; or
            FSDP2 has dropped the attributes by which parameters are known; or an expert's
            parameter among those to reduce over axes that are not its own; or a gradient to
            reduce is sparse.
        NotInitializedError: Parameters are sharded, or axes are named, and there is neither
            ``state`` nor default.
        ValueError: An axis is neither ``data`` nor ``context``, or is named twice.
    """
    parameters = [one for one in parameters_of(model_or_parameters) if one.requires_grad]
    if has_torch_function(parameters):  # `check` looks on
        handle_torch_function(
            finalize_grads,
            parameters,
            parameters,
            average_over=average_over,
            sum_over=sum_over,
            state=state,
            embedding_group=embedding_group,
        )
        return
    state = state or current_state()
    check_state(state, parameters)
    average, total = _axes(average_over), _axes(sum_over)
    if average or total:
        _reduce(parameters, average, total, state)
    if state is not None and state.size("tensor") > 1:
        check_attributes(parameters, state.size("tensor"))
        partial = [one for one in parameters if getattr(one, "sequence_parallel", False)]
        _sum(partial, [state.group("tensor")])
    tied = [one for one in parameters if is_shared(one) or is_tied(one)]
    if tied:
        group = embedding_group or _embedding_group(state, tied[0])
        if group is not None and group.size() > 1:
            _sum(tied, [group])


def parameters_of(given: Parameters) -> list[Tensor]:
    """Return the parameters, each once, in the order given."""
    if isinstance(given, nn.Module):
        return list(given.parameters())
    if isinstance(given, Tensor):
        return [given]
    found: dict[int, Tensor] = {}
    for one in given:
        for parameter in one.parameters() if isinstance(one, nn.Module) else (one,):
            found[id(parameter)] = parameter
    return list(found.values())


def gradient(parameter: Tensor) -> Tensor | None:
    """Return Megatron DDP's fp32 ``main_grad`` where there is one, else ``grad``."""
    main: Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, any other tensor as it is."""
    # Asked like this because importing DTensor takes longer than all of this package.
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def check_state(state: ParallelState | None, parameters: list[Tensor]) -> None:
    """Refuse to take layers that were given their group for layers of a rank alone."""
    world = live_world() if state is None else None
    if (
        world is not None
        and world.size() > 1
        and any(
            getattr(one, "tensor_model_parallel", False) or getattr(one, "sequence_parallel", False)
            for one in parameters
        )
    ):
        raise NotInitializedError(
            "parameters say tensor_model_parallel or sequence_parallel, but there are no parallel "
            "groups to sum over; give those of the layers, as in "
            "state=ParallelState.from_groups(tensor=group) or ParallelState.from_mesh(mesh)"
        )


def check_attributes(parameters: list[Tensor], degree: int) -> None:
    """Refuse a tensor-parallel model whose parameters FSDP2 has replaced by unmarked ones."""
    sharded = sum(hasattr(one, "device_mesh") for one in parameters)
    if sharded and not any(
        getattr(one, "tensor_model_parallel", False) or getattr(one, "sequence_parallel", False)
        for one in parameters
    ):
        raise ParallelError(
            f"the tensor-parallel degree is {degree}, but of {len(parameters)} parameters none "
            f"says tensor_model_parallel or sequence_parallel, and {sharded} are DTensors: "
            "fully_shard makes new parameters, without attributes. Call it within "
            "`with ezpz_tp.keep_attributes(model):`"
        )


def is_shared(parameter: Tensor) -> bool:
    """Return whether this is the copy of a tied parameter that is counted elsewhere."""
    return bool(getattr(parameter, "shared", False))


def is_tied(parameter: Tensor) -> bool:
    """Return whether another stage of the pipeline holds this embedding too."""
    return bool(getattr(parameter, "shared_embedding", False))


def _embedding_group(state: ParallelState | None, tied: Tensor) -> ProcessGroup | None:
    if state is None or state.size("pipeline") == 1:
        return None
    if not state.has("embedding"):
        raise ParallelError(
            f"finalize_grads: a tied embedding of shape {tuple(tied.shape)} on stage "
            f"{state.index('pipeline')} of {state.size('pipeline')}, but this rank is in no "
            "embedding group; make the groups with embedding=True, or give embedding_group="
        )
    return state.group("embedding")


def _axes(given: str | Iterable[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _reduce(
    parameters: list[Tensor],
    average: tuple[str, ...],
    total: tuple[str, ...],
    state: ParallelState | None,
) -> None:
    axes = (*average, *total)
    if not set(axes) <= {"data", "context"} or len(set(axes)) < len(axes):
        raise ValueError(
            f"finalize_grads(average_over={average}, sum_over={total}); expected data, context or "
            "both, each once: over other axes parameters differ, or are summed in any case"
        )
    if state is None:
        index_or_alone(*axes)  # raises where there are several ranks
        return
    several = [axis for axis in axes if state.size(axis) > 1]
    if not several:
        return
    if state.size("expert") > 1 or state.size("expert_tensor") != state.size("tensor"):
        for one in parameters:
            if not getattr(one, "allreduce", True):
                raise ParallelError(
                    f"finalize_grads: an expert's parameter of shape {tuple(one.shape)} to reduce "
                    f"over {' x '.join(several)}; expected none: its copies are on the ranks of "
                    "state.group('expert_data'), so reduce it there, and give the others here"
                )
    groups = [state.group(axis) for axis in several]
    if len(several) > 1 and state.has_group(*several):
        groups = [state.group(*several)]
    divisor = state.size(*average) if average else 1
    _sum(parameters, groups, divisor)


def _sum(parameters: list[Tensor], groups: list[ProcessGroup], divisor: int = 1) -> None:
    """Sum the gradients over one group after another, divided before by a number."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[_Entry]] = {}
    for one in parameters:
        found = gradient(one)
        if found is not None and found.layout != torch.strided:
            raise ParallelError(
                f"finalize_grads: the gradient of a parameter of shape {tuple(one.shape)} is "
                f"{found.layout}; expected a dense one: make its embedding with sparse=False"
            )
        part = torch.zeros_like(local_part(one)) if found is None else local_part(found)
        kind = (part.device, part.dtype)
        by_kind.setdefault(kind, []).append((one, part, found is None))
    for entries in by_kind.values():
        for bucket in _buckets(entries):
            _sum_one_bucket(bucket, groups, divisor)


def _buckets(entries: list[_Entry]) -> Iterator[list[_Entry]]:
    """Cut up what is sent together: there is a second copy of it meanwhile."""
    bucket: list[_Entry] = []
    size = 0
    for entry in entries:
        size += entry[1].nbytes
        if bucket and size > _BUCKET:
            yield bucket
            bucket, size = [], entry[1].nbytes
        bucket.append(entry)
    yield bucket


def _sum_one_bucket(entries: list[_Entry], groups: list[ProcessGroup], divisor: int) -> None:
    parts = [part for _, part, _ in entries]
    # Says behind the gradients how many ranks have each of them.
    owners = parts[0].new_ones(len(parts))
    missing = [index for index, (_, _, is_missing) in enumerate(entries) if is_missing]
    for index in missing:
        owners[index] = 0
    together = [*parts, owners]
    flat = _flatten_dense_tensors(together)
    if divisor > 1:
        flat /= divisor  # before the sum, which might be too large for 16 bits
    for group in groups:
        all_reduce_(flat, group)
    *sums, owners = _unflatten_dense_tensors(flat, together)
    torch._foreach_copy_(parts, sums)
    for index in missing:
        parameter, part, _ = entries[index]
        if owners[index]:
            parameter.grad = torch.zeros_like(parameter)
            local_part(parameter.grad).copy_(part)
