"""The norm of a gradient whose parts are spread over ranks, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ezpz_tp._errors import ParallelError
from ezpz_tp._groups.default import current_state
from ezpz_tp._groups.state import ParallelState
from ezpz_tp._regions.collectives import all_reduce_

from .grads import (
    Parameters,
    check_attributes,
    check_state,
    gradient,
    is_shared,
    local_part,
    parameters_of,
)

_Groups = tuple[ProcessGroup, ...]


def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    state: ParallelState | None = None,
) -> Tensor:
    """Scale the gradients, in place, so that the norm of the whole model's is at most a bound.

    What ``torch.nn.utils.clip_grad_norm_`` does for a model on one device. Call it after
    `finalize_grads`. Nothing waits for the device, unless ``error_if_nonfinite``.

    Collective: every rank of the tensor and pipeline groups (and of the groups that FSDP2
    shards over) calls this, with all of its parameters.

    Args:
        parameters: This rank's; a module stands for all of its own.
        max_norm: The largest norm to leave.
        norm_type: See `get_grad_norm`, as the other arguments.
        error_if_nonfinite: See `get_grad_norm`.
        foreach: False to go through the gradients one by one.
        state: See `get_grad_norm`.

    Returns:
        The norm before clipping, see `get_grad_norm`.

    Raises:
        RuntimeError: The norm is infinite or not a number, and ``error_if_nonfinite``.
        ParallelError: See `get_grad_norm`.
    """
    parameters = parameters_of(parameters)
    total = get_grad_norm(
        parameters,
        norm_type,
        error_if_nonfinite=error_if_nonfinite,
        foreach=foreach,
        state=state,
    )
    # No condition on the host: that would wait for the device.
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    with torch.no_grad():
        grads = [local_part(grad) for one in parameters if (grad := gradient(one)) is not None]
        for same in _by_device_and_dtype(grads):
            here = factor.to(same[0].device)
            if foreach is False:
                for grad in same:
                    grad.mul_(here)
            else:
                torch._foreach_mul_(same, here)
    return total


@torch.no_grad()
def get_grad_norm(
    parameters: Parameters,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
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
        foreach: False to go through the gradients one by one.
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
    parameters = parameters_of(parameters)
    state = state or current_state()
    check_state(state, parameters)
    if state is not None and state.size("tensor") > 1:
        check_attributes(parameters, state.size("tensor"))
    wide = any(one.dtype == torch.float64 for one in parameters)
    dtype = torch.float64 if wide else torch.float32
    device = parameters[0].device if parameters else torch.device("cpu")
    first_tensor_rank = state is None or state.index("tensor") == 0
    norms = []
    for (is_expert, groups), grads in _counted(parameters, state).items():
        norm = _norm(grads, order, foreach, dtype, device)
        for group in groups:
            norm = _norm_over(norm, group, order)
        # Every tensor-parallel rank knows the experts' norm now; it counts once.
        norms.append(norm if first_tensor_rank or not is_expert else torch.zeros_like(norm))
    if not norms:
        norms.append(torch.zeros((), dtype=dtype, device=device))
    total = norms[0] if len(norms) == 1 else _joined(torch.stack(norms), order)
    for group in _model_groups(state):
        total = _norm_over(total, group, order)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the gradient's norm of order {norm_type} is {total.item()}, so it cannot be clipped; "
            "skip this step, or give error_if_nonfinite=False to scale by it anyway"
        )
    return total


def _counted(
    parameters: Iterable[Tensor], state: ParallelState | None
) -> dict[tuple[bool, _Groups], list[Tensor]]:
    """Return the gradients to count here, by what their norm is summed over before the rest.

    Also what there is nothing to count of is listed, so that every rank sums the same.
    """
    index = 0 if state is None else state.index("tensor")
    counted: dict[tuple[bool, _Groups], list[Tensor]] = {}
    known: dict[Any, _Groups] = {}
    for one in parameters:
        if is_shared(one):
            continue
        is_expert = not getattr(one, "allreduce", True) and _has_expert_groups(state)
        groups = _shard_groups(one, known)
        place = index
        if state is not None and is_expert:
            groups += _several(state, "expert_tensor", "expert")
            place = state.index("expert_tensor")
        grads = counted.setdefault((is_expert, groups), [])
        if place == 0 or getattr(one, "tensor_model_parallel", False):
            grad = gradient(one)
            if grad is not None:
                grads.append(local_part(grad))
    return counted


def _shard_groups(parameter: Tensor, known: dict[Any, _Groups]) -> _Groups:
    """Return the groups of the mesh dims that a DTensor is sharded over."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return ()
    placements: tuple[Any, ...] = parameter.placements  # type: ignore[attr-defined]
    # In general all parameters have the same, and asking a mesh is slow.
    key = (id(mesh), placements)
    if key not in known:
        known[key] = tuple(
            mesh.get_group(dim)
            for dim, placement in enumerate(placements)
            if placement.is_shard() and mesh.size(dim) > 1
        )
    return known[key]


def _has_expert_groups(state: ParallelState | None) -> bool:
    """Return whether experts are laid out otherwise than the rest."""
    return state is not None and (
        state.size("expert") > 1 or state.size("expert_tensor") != state.size("tensor")
    )


def _several(state: ParallelState, *axes: str) -> _Groups:
    return tuple(state.group(axis) for axis in axes if state.size(axis) > 1)


def _model_groups(state: ParallelState | None) -> _Groups:
    if state is None:
        return ()
    groups = _several(state, "tensor", "pipeline")
    if len(groups) == 2:
        try:
            return (state.group("tensor", "pipeline"),)
        except ParallelError:
            return groups
    return groups


def _norm(
    grads: list[Tensor],
    order: float,
    foreach: bool | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    if order == math.inf:
        # An empty shard has no largest value.
        grads = [grad for grad in grads if grad.numel()]
    norms = []
    for same in _by_device_and_dtype(grads):
        narrow = same[0].dtype in {torch.bfloat16, torch.float16}
        wide = torch.float32 if narrow else None
        if foreach is False:
            found = [torch.linalg.vector_norm(grad, order, dtype=wide) for grad in same]
        else:
            found = list(torch._foreach_norm(same, order, dtype=wide))  # noqa: SLF001
        norms.append(torch.stack(found).to(device, dtype))
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    return _joined(norms[0] if len(norms) == 1 else torch.cat(norms), order)


def _joined(norms: Tensor, order: float) -> Tensor:
    """Return the norm of all from the norms of parts."""
    joined: Tensor = torch.linalg.vector_norm(norms, order)
    return joined


def _norm_over(norm: Tensor, group: ProcessGroup, order: float) -> Tensor:
    """Return the norm of all from this rank's. Collective."""
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
