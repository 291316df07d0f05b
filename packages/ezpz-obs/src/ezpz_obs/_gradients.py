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

    Of DTensors (FSDP2 and torch's own tensor parallelism) the whole counts. With ezpz_tp this is
    ``ezpz_tp.get_grad_norm``, which counts what its layers shard over the tensor and pipeline
    groups.

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
    by_mesh: dict[Any, list[Any]] = {}
    for grad in grads:
        values = grad.coalesce().values() if grad.is_sparse else grad
        by_mesh.setdefault(getattr(grad, "device_mesh", None), []).append(values)
    dtypes = {grad.dtype for grad in grads}
    dtype = torch.float64 if dtypes & {torch.float64, torch.complex128} else torch.float32
    norms = []
    for mesh, some in by_mesh.items():
        norm = _norm_of_kind(torch, some, order)
        if mesh is not None:
            norm = norm.full_tensor()
            if order == math.inf:  # backends differ in what the larger of a number and NaN is
                sums = _norm_of_kind(torch, some, 1.0).full_tensor()
                norm = torch.where(sums.isnan(), sums, norm)
        norms.append(norm.to(grads[0].device, dtype))
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), order)


def _norm_of_kind(torch: Any, grads: list[Any], order: float) -> Any:
    halves = (torch.bfloat16, torch.float16)
    wide = [grad for grad in grads if grad.dtype not in halves and grad.numel()]
    narrow = [grad for grad in grads if grad.dtype in halves and grad.numel()]
    if narrow:  # torch rounds their norms to half precision; a norm of norms is the same
        norms = torch._foreach_norm(narrow, order, dtype=torch.float32)  # noqa: SLF001
        wide.append(torch.stack(norms))
    return torch.nn.utils.get_total_norm(wide, order)
