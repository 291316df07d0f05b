"""Gradients that are partial on a rank, and what they still have to be summed over."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed import ProcessGroup

from ._current import current_state, index_or_alone
from ._errors import NotInitializedError, ParallelError
from ._groups import live_world
from ._mappings import all_reduce_
from ._state import ParallelState

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

    A DTensor's gradient that is laid out otherwise than its parameter (torch's
    ``SequenceParallel`` leaves partial sums) first becomes as the parameter is. This replaces
    ``grad``, by one collective or more for each such parameter.

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
        ParallelError: A tied embedding is on a pipeline's stage without an embedding group. Or
            FSDP2 has dropped the parameters' attributes. Or an expert's parameter would be
            reduced over axes that are not its own. Or a gradient to reduce is sparse. Or a
            DTensor's gradient is a partial sum already, and ``sequence_parallel`` is True.
        NotInitializedError: Parameters are sharded, or axes are named, and there is neither
            ``state`` nor default.
        ValueError: An axis is neither ``data`` nor ``context``, or is named twice.
    """
    parameters = [one for one in list_parameters(model_or_parameters) if one.requires_grad]
    state = state or current_state()
    check_marks(state, parameters)
    _refuse_two_sums(parameters)
    _lay_out_gradients(parameters)
    average = (average_over,) if isinstance(average_over, str) else tuple(average_over)
    total = (sum_over,) if isinstance(sum_over, str) else tuple(sum_over)
    if average or total:
        _reduce(parameters, average, total, state)
    if state is not None and state.size("tensor") > 1:
        partial = [one for one in parameters if getattr(one, "sequence_parallel", False)]
        _sum(partial, [state.group("tensor")])
    tied = [one for one in parameters if is_shared(one) or is_tied(one)]
    if tied:
        group = embedding_group or _embedding_group(state, tied[0])
        if group is not None and group.size() > 1:
            _sum(tied, [group])


def list_parameters(given: Parameters) -> list[Tensor]:
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
    if main is None:
        return parameter.grad
    return main


def laid_out_gradient(parameter: Tensor) -> Tensor | None:
    """Return the gradient, of a DTensor with the placements of the parameter. Collective."""
    found = gradient(parameter)
    placements = getattr(parameter, "placements", None)
    if placements is None or getattr(found, "placements", placements) == placements:
        return found
    dtensor: Any = found
    laid_out: Tensor = dtensor.redistribute(placements=placements)
    return laid_out


def _refuse_two_sums(parameters: list[Tensor]) -> None:
    """Raise for what both DTensor and ``sequence_parallel`` would sum."""
    for one in parameters:
        placements: tuple[Any, ...] = getattr(gradient(one), "placements", ())
        is_partial = any(placement.is_partial() for placement in placements)
        if is_partial and getattr(one, "sequence_parallel", False):
            raise ParallelError(
                f"finalize_grads: sequence_parallel is True of a parameter of shape "
                f"{tuple(one.shape)}, whose gradient is a DTensor with {placements}; expected one "
                "of the two, since it would be summed twice: leave the mark out"
            )


def _lay_out_gradients(parameters: list[Tensor]) -> None:
    """Replace gradients of DTensors that are laid out otherwise than their parameters."""
    for one in parameters:
        grad = gradient(one)
        laid_out = laid_out_gradient(one)
        if laid_out is grad:
            continue
        if getattr(one, "main_grad", None) is None:
            one.grad = laid_out
        else:
            one.main_grad = laid_out  # type: ignore[attr-defined]


def local_part(tensor: Tensor) -> Tensor:
    # Asked like this because importing DTensor takes longer than all of this package.
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    local: Tensor = to_local()
    return local


def check_marks(state: ParallelState | None, parameters: list[Tensor]) -> None:
    """Refuse layers that were given a group where nothing says it, and what FSDP2 has unmarked."""
    world = None
    if state is None:
        world = live_world()
    degree = 1
    if state is not None:
        degree = state.size("tensor")
    if world is not None and world.size() > 1 and any(map(_is_marked, parameters)):
        raise NotInitializedError(
            "parameters say tensor_model_parallel or sequence_parallel, but there are no parallel "
            "groups to sum over; give those of the layers, as in "
            "state=ParallelState.from_groups(tensor=group) or ParallelState.from_mesh(mesh)"
        )
    sharded = 0
    if degree > 1:
        sharded = sum(hasattr(one, "device_mesh") for one in parameters)
    if sharded and not any(map(_is_marked, parameters)):
        raise ParallelError(
            f"the tensor-parallel degree is {degree}, but of {len(parameters)} parameters none "
            f"says tensor_model_parallel or sequence_parallel, and {sharded} are DTensors: "
            "fully_shard makes new parameters, without attributes. Call it within "
            "`with ezpz_tp.keep_attributes(model):`"
        )


def _is_marked(parameter: Tensor) -> bool:
    return any(getattr(parameter, n, False) for n in ("tensor_model_parallel", "sequence_parallel"))


def is_shared(parameter: Tensor) -> bool:
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
    if _has_expert_groups(state):
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
    divisor = 1
    if average:
        divisor = state.size(*average)
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
            bucket = []
            size = entry[1].nbytes
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


# The norm of a gradient whose parts are spread over ranks, and clipping by it.

_Groups = tuple[ProcessGroup, ...]


def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    state: ParallelState | None = None,
) -> Tensor:
    """Scale the gradients, in place, so that the norm of the whole model's is at most a bound.

    What ``torch.nn.utils.clip_grad_norm_`` does for a model on one device. Call it after
    `finalize_grads`. Nothing waits for the device, unless ``error_if_nonfinite``. Gradients of
    DTensors get the placements of their parameters, as there.

    Collective: every rank of the tensor and pipeline groups (and of the groups that FSDP2
    shards over) calls this, with all of its parameters.

    Args:
        parameters: This rank's; a module stands for all of its own.
        max_norm: The largest norm to leave.
        norm_type, error_if_nonfinite, state: See `get_grad_norm`.

    Returns:
        The norm before clipping, see `get_grad_norm`.

    Raises:
        RuntimeError: The norm is infinite or not a number, and ``error_if_nonfinite``.
        ParallelError: See `get_grad_norm`.
    """
    parameters = list_parameters(parameters)
    with torch.no_grad():
        _lay_out_gradients(parameters)
    total = get_grad_norm(parameters, norm_type, error_if_nonfinite=error_if_nonfinite, state=state)
    # No condition on the host: that would wait for the device.
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    with torch.no_grad():
        grads = []
        for one in parameters:
            grad = gradient(one)
            if grad is not None:
                grads.append(local_part(grad))
        for same in _by_device_and_dtype(grads):
            torch._foreach_mul_(same, factor.to(same[0].device))
    return total


@torch.no_grad()
def get_grad_norm(
    parameters: Parameters,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    state: ParallelState | None = None,
) -> Tensor:
    """Return the norm of the whole model's gradient, equal to the unsharded model's.

    Parameters with ``tensor_model_parallel`` True count on every tensor-parallel rank, others
    (which are replicated) on the first one only, and those with ``shared`` True not at all. Of
    a DTensor (FSDP2) the shard counts, summed over the mesh's dims that shard it; of an
    expert's parameter (``allreduce`` False) the sum over the expert groups. Each sum is a
    collective of one number: one over the group of tensor x pipeline if the state has it
    (``also=[("tensor", "pipeline")]``), else one over each.

    Collective: as `clip_grad_norm_`.

    Args:
        parameters: This rank's; a module stands for all of its own.
        norm_type: The p of the p-norm, above 0; ``inf`` for the largest absolute value.
        error_if_nonfinite: Raise where the norm is infinite or not a number. Waits for the device.
        state: Whose groups; the default's if None.

    Returns:
        0-dim, on the parameters' device, fp32 (fp64 if a parameter is fp64). The same bits on
        every rank.

    Raises:
        RuntimeError: The norm is infinite or not a number, and ``error_if_nonfinite``.
        ParallelError: FSDP2 has dropped the attributes that say what is sharded.
        NotInitializedError: Parameters are sharded, and there is neither ``state`` nor default.
        ValueError: ``norm_type`` is not above 0.
    """
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"norm_type {norm_type}; expected a number above 0, or inf")
    parameters = list_parameters(parameters)
    state = state or current_state()
    check_marks(state, parameters)
    wide = any(one.dtype == torch.float64 for one in parameters)
    dtype = torch.float32
    if wide:
        dtype = torch.float64
    device = parameters[0].device if parameters else torch.device("cpu")
    first_tensor_rank = state is None or state.index("tensor") == 0
    norms = []
    for (is_expert, groups), grads in _counted_gradients(parameters, state).items():
        norm = _norm(grads, order, dtype, device)
        for group in groups:
            norm = _norm_over(norm, group, order)
        # Every tensor-parallel rank knows the experts' norm now; it counts once.
        norms.append(norm if first_tensor_rank or not is_expert else torch.zeros_like(norm))
    if not norms:
        norms.append(torch.zeros((), dtype=dtype, device=device))
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), order)
    for group in _model_groups(state):
        total = _norm_over(total, group, order)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the gradient's norm of order {norm_type} is {total.item()}, so it cannot be clipped; "
            "skip this step, or give error_if_nonfinite=False to scale by it anyway"
        )
    return total


def _counted_gradients(
    parameters: Iterable[Tensor], state: ParallelState | None
) -> dict[tuple[bool, _Groups], list[Tensor]]:
    """Return the gradients to count here, by what their norm is summed over before the rest."""
    # Also what there is nothing to count of is listed, so that every rank sums the same.
    index = 0
    if state is not None:
        index = state.index("tensor")
    counted: dict[tuple[bool, _Groups], list[Tensor]] = {}
    known: dict[Any, _Groups] = {}
    for one in parameters:
        if is_shared(one):
            continue
        is_expert = not getattr(one, "allreduce", True) and _has_expert_groups(state)
        groups = _shard_groups(one, known)
        place = index
        if state is not None and is_expert:
            groups += _groups_above_one(state, "expert_tensor", "expert")
            place = state.index("expert_tensor")
        grads = counted.setdefault((is_expert, groups), [])
        grad = laid_out_gradient(one)  # by all ranks, also those where it does not count
        is_counted = place == 0 or getattr(one, "tensor_model_parallel", False)
        if is_counted and grad is not None:
            grads.append(local_part(grad))
    return counted


def _shard_groups(parameter: Tensor, known: dict[Any, _Groups]) -> _Groups:
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return ()
    placements: tuple[Any, ...] = parameter.placements  # type: ignore[attr-defined]
    # In general all parameters have the same, and asking a mesh is slow.
    key = (id(mesh), placements)
    if key not in known:
        # Not is_shard: of FSDP2 around torch's tensor parallelism it is False since torch 2.13.
        known[key] = tuple(
            mesh.get_group(dim)
            for dim, one in enumerate(placements)
            if not (one.is_replicate() or one.is_partial()) and mesh.size(dim) > 1
        )
    return known[key]


def _has_expert_groups(state: ParallelState | None) -> bool:
    """Return whether experts are laid out otherwise than the rest."""
    return state is not None and (
        state.size("expert") > 1 or state.size("expert_tensor") != state.size("tensor")
    )


def _groups_above_one(state: ParallelState, *axes: str) -> _Groups:
    return tuple(state.group(axis) for axis in axes if state.size(axis) > 1)


def _model_groups(state: ParallelState | None) -> _Groups:
    if state is None:
        return ()
    groups = _groups_above_one(state, "tensor", "pipeline")
    if len(groups) == 2 and state.has_group("tensor", "pipeline"):
        return (state.group("tensor", "pipeline"),)
    return groups


def _norm(grads: list[Tensor], order: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    if order == math.inf:
        # An empty shard has no largest value.
        grads = [grad for grad in grads if grad.numel()]
    norms = []
    for same in _by_device_and_dtype(grads):
        narrow = same[0].dtype in {torch.bfloat16, torch.float16}
        wide = None
        if narrow:
            wide = torch.float32
        found = torch._foreach_norm(same, order, dtype=wide)  # noqa: SLF001
        norms.append(torch.stack(list(found)).to(device, dtype))
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    together = norms[0] if len(norms) == 1 else torch.cat(norms)
    norm: Tensor = torch.linalg.vector_norm(together, order)
    return norm


def _norm_over(norm: Tensor, group: ProcessGroup, order: float) -> Tensor:
    if order == math.inf:
        # Backends differ in what the larger of a number and NaN is.
        is_nan = torch.isnan(norm)
        pair = torch.stack([torch.where(is_nan, 0.0, norm), is_nan.to(norm.dtype)])
        largest, any_nan = all_reduce_(pair, group, dist.ReduceOp.MAX)
        return torch.where(any_nan > 0, math.nan, largest)
    total: Tensor = all_reduce_(norm**order, group) ** (1 / order)
    return total


def _by_device_and_dtype(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return found.values()
