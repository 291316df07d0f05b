"""The norm of a gradient, whole, wherever its parts are."""

from __future__ import annotations

import math
import sys
from typing import Any

from ._errors import ObsError


def gradient_norm(parameters: Any, norm_type: float = 2.0) -> Any:
    """Return the norm of the gradients of all the parameters together.

    Call it after the backward pass, once the gradients have been averaged (DDP and FSDP2 do so
    themselves), and before they are clipped or set to None. Nothing waits for the device: the
    result may go into a record as it is.

    Of DTensors (FSDP2 and torch's own tensor parallelism) the whole counts: one collective of one
    number for each mesh dim that shards. With ezpz_tp this is ``ezpz_tp.get_grad_norm``, which
    counts what its layers shard over the tensor and pipeline groups.

    Collective where gradients are sharded: every rank calls this, with all of its parameters.

    Args:
        parameters: A module, or parameters; those without a gradient do not count.
        norm_type: The p of the p-norm, above 0; ``inf`` for the largest absolute value.

    Returns:
        A 0-dim tensor on the gradients' device, fp32 (fp64 if a gradient is).

    Raises:
        ObsError: The parameters are sharded by FSDP1, DeepSpeed or Megatron's layers without
            ezpz_tp, which give only a local norm. Or none of them has a gradient.
        ValueError: ``norm_type`` is not above 0.
    """
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"norm_type {norm_type}; expected a number above 0, or inf")
    if hasattr(parameters, "parameters"):
        parameters = parameters.parameters()
    several = [parameters] if hasattr(parameters, "grad") else list(parameters)
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise ObsError("gradient_norm() of no torch parameters: torch is not imported")
    whole = _norm_of_ezpz_tp(several, order)
    if whole is not None:
        return whole
    _refuse_hidden_shards(torch, several)
    grads = [one.grad for one in several if one.grad is not None]
    if not grads:
        raise ObsError(
            f"none of {len(several)} parameters has a gradient; call gradient_norm() after "
            "backward() and before zero_grad() (with DeepSpeed's ZeRO ask "
            "engine.get_global_grad_norm())"
        )
    with torch.no_grad():
        return _norm(torch, grads, order)


def _norm_of_ezpz_tp(parameters: list[Any], order: float) -> Any:
    # A lookup in the dict; getattr of what is not there costs ten times that.
    is_parallel = any(vars(one).get("tensor_model_parallel", False) for one in parameters)
    tp: Any = sys.modules.get("ezpz_tp")
    if tp is not None and (is_parallel or tp.current_state() is not None):
        return tp.get_grad_norm(parameters, order)
    if is_parallel:
        raise ObsError(
            "parameters with tensor_model_parallel=True: their gradients are parts, and a norm of "
            "this rank's would be wrong; use ezpz_tp.get_grad_norm, or what Megatron returns from "
            "its optimizer's step"
        )
    return None


def _refuse_hidden_shards(torch: Any, parameters: list[Any]) -> None:
    """Raise for parameters whose gradients do not show that they are parts."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    for one in parameters:
        if hasattr(one, "ds_id"):
            raise ObsError(
                "parameters of DeepSpeed's ZeRO stage 3: their gradients are kept in parts; "
                "use engine.get_global_grad_norm()"
            )
        if getattr(one, "_fsdp_flattened", False) or getattr(one, "_is_flat_param", False):
            raise ObsError(
                "parameters of FullyShardedDataParallel (FSDP1): their gradients are parts, and a "
                "norm of this rank's would be wrong; use what model.clip_grad_norm_() returns, or "
                "FSDP2 (fully_shard)"
            )


def _norm(torch: Any, grads: list[Any], order: float) -> Any:
    """Return the norm of plain gradients, and of DTensors with the ranks that have the rest."""
    by_groups: dict[tuple[Any, ...], list[Any]] = {}
    known: dict[Any, tuple[Any, ...]] = {}
    plain, strided = torch.Tensor, torch.strided
    for grad in grads:
        if type(grad) is plain and grad.layout is strided:
            by_groups.setdefault((), []).append(grad)
        else:
            local, groups = _local(grad, known)
            by_groups.setdefault(groups, []).append(local)
    dtypes = {local.dtype for locals_ in by_groups.values() for local in locals_}
    dtype = torch.float64 if dtypes & {torch.float64, torch.complex128} else torch.float32
    norms = []
    for groups, locals_ in by_groups.items():
        norm = _local_norm(torch, locals_, order).to(grads[0].device, dtype)
        for group in groups:
            norm = _norm_over(torch, norm, group, order)
        norms.append(norm)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), order)


def _local(grad: Any, known: dict[Any, tuple[Any, ...]]) -> tuple[Any, tuple[Any, ...]]:
    """Return what this rank has of a gradient, and the groups that share the rest."""
    mesh = getattr(grad, "device_mesh", None)
    if mesh is not None:
        if any(placement.is_partial() for placement in grad.placements):
            whole = sys.modules["torch.distributed.tensor"].Replicate()
            placements = [whole if each.is_partial() else each for each in grad.placements]
            grad = grad.redistribute(placements=placements)
        # In general all have the same, and asking a mesh is slow.
        key = (mesh, tuple(grad.placements))
        if key not in known:
            known[key] = tuple(
                mesh.get_group(dim)
                for dim, placement in enumerate(grad.placements)
                if not placement.is_replicate() and mesh.size(dim) > 1
            )
        return grad.to_local(), known[key]
    return (grad.coalesce().values() if grad.is_sparse else grad), ()


def _local_norm(torch: Any, grads: list[Any], order: float) -> Any:
    """Return this rank's norm, by a few kernels for all rather than one for each."""
    halves = (torch.bfloat16, torch.float16)
    wide = [grad for grad in grads if grad.dtype not in halves and grad.numel()]
    narrow = [grad for grad in grads if grad.dtype in halves and grad.numel()]
    if narrow:  # torch rounds their norms to half precision; a norm of norms is the same
        norms = torch._foreach_norm(narrow, order, dtype=torch.float32)  # noqa: SLF001
        wide.append(torch.stack(norms))
    return torch.nn.utils.get_total_norm(wide, order)


def _norm_over(torch: Any, norm: Any, group: Any, order: float) -> Any:
    dist = torch.distributed
    if order == math.inf:
        # Backends differ in what the larger of a number and NaN is.
        is_nan = torch.isnan(norm)
        pair = torch.stack([torch.where(is_nan, 0.0, norm), is_nan.to(norm.dtype)])
        dist.all_reduce(pair, dist.ReduceOp.MAX, group=group)
        return torch.where(pair[1] > 0, math.nan, pair[0])
    total = norm**order
    dist.all_reduce(total, group=group)
    return total ** (1 / order)
