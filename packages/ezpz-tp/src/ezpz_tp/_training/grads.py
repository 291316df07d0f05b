"""Gradients that are partial on a rank, and what they still have to be summed over."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed import ProcessGroup

from ezpz_tp._errors import NotInitializedError, ParallelError
from ezpz_tp._groups.default import current_state
from ezpz_tp._groups.state import ParallelState
from ezpz_tp._groups.world import live_world
from ezpz_tp._regions.collectives import all_reduce_

Parameters = Tensor | nn.Module | Iterable[Tensor | nn.Module]
"""A parameter, a module (all of its parameters), or several of these."""


@torch.no_grad()
def finalize_grads(
    model_or_parameters: Parameters,
    *,
    state: ParallelState | None = None,
    embedding_group: ProcessGroup | None = None,
) -> None:
    """Sum, in place, the gradients that backward left partial on each rank.

    Call it once a step: after the last backward pass, and before `clip_grad_norm_` and the
    optimizer. Two calls would sum twice. Reductions over data-parallel ranks (DDP, FSDP2) may
    come before or after.

    Two kinds of parameters are summed, each in one collective for each dtype:

    * those with ``sequence_parallel`` True (norms, and biases of row-parallel layers), over the
      tensor-parallel group;
    * tied embeddings, with ``shared_embedding`` or ``shared`` True on every stage that holds a
      copy, over the embedding group.

    What is summed is ``main_grad`` where a parameter has one, else ``grad``; of a DTensor
    (FSDP2) this rank's shard. A rank that has no gradient of such a parameter counts as zero,
    and gets the sum if another rank had one. At tensor-parallel degree 1 nothing is sent for
    the first kind, in a pipeline of one stage nothing for the second.

    Collective: every rank calls this, with the same tagged parameters in the same order.

    Args:
        model_or_parameters: A module, parameters, or several modules (chunks of a pipeline).
        state: Whose groups; the default's if None.
        embedding_group: Instead of the state's, of first and last stage.

    Raises:
        ParallelError: A tied embedding on a pipeline's stage without an embedding group; or
            FSDP2 has dropped the attributes by which parameters are known.
        NotInitializedError: Parameters are sharded, and there is neither ``state`` nor default.
    """
    parameters = [one for one in parameters_of(model_or_parameters) if one.requires_grad]
    state = state or current_state()
    check_state(state, parameters)
    if state is not None and state.size("tensor") > 1:
        check_attributes(parameters, state.size("tensor"))
        partial = [one for one in parameters if getattr(one, "sequence_parallel", False)]
        _sum(partial, state.group("tensor"))
    tied = [one for one in parameters if is_shared(one) or is_tied(one)]
    if tied:
        group = embedding_group or _embedding_group(state, tied[0])
        if group is not None and group.size() > 1:
            _sum(tied, group)


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


def _sum(parameters: list[Tensor], group: ProcessGroup) -> None:
    by_kind: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor, bool]]] = {}
    for one in parameters:
        found = gradient(one)
        part = torch.zeros_like(local_part(one)) if found is None else local_part(found)
        kind = (part.device, part.dtype)
        by_kind.setdefault(kind, []).append((one, part, found is None))
    for entries in by_kind.values():
        _sum_one_kind(entries, group)


def _sum_one_kind(entries: list[tuple[Tensor, Tensor, bool]], group: ProcessGroup) -> None:
    parts = [part for _, part, _ in entries]
    # Says behind the gradients how many ranks have each of them.
    owners = parts[0].new_ones(len(parts))
    missing = [index for index, (_, _, is_missing) in enumerate(entries) if is_missing]
    for index in missing:
        owners[index] = 0
    together = [*parts, owners]
    flat = all_reduce_(_flatten_dense_tensors(together), group)
    *sums, owners = _unflatten_dense_tensors(flat, together)
    torch._foreach_copy_(parts, sums)
    for index in missing:
        parameter, part, _ = entries[index]
        if owners[index]:
            parameter.grad = torch.zeros_like(parameter)
            local_part(parameter.grad).copy_(part)
