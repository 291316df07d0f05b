"""Before anything is wrapped: can it be, and do all ranks wrap the same?"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ezpz_device import as_dtype
from ezpz_dist._errors import WrapError

from .replicas import Replicas

_Lines = dict[str, str]


@contextmanager
def agreed(
    call: str,
    wrapped: nn.Module | Mapping[str, torch.Tensor],
    options: Mapping[str, object],
    replicas: Replicas,
) -> Iterator[None]:
    """Refuse on all ranks what one of them refuses inside, or wraps differently.

    torch compares nothing that is quick to compare: it waits until it times out, or goes on
    with tensors of other shapes. Here each rank sends a checksum; who differs is looked for
    only if one does. Collective over the replicas.

    Args:
        call: ``"wrap_model_for_ddp()"``.
        wrapped: What this rank wraps: a model, or tensors by name.
        options: What else it was called with; of objects without a lasting text, the type.
        replicas: The ranks.

    Raises:
        WrapError: Another rank refuses, or the calls or the models differ.
    """
    try:
        yield
    except Exception as error:  # whatever it is, the others wait to hear of it; raised again
        replicas.gather(call, (f"{type(error).__name__}: {error}", ""))
        raise
    lines = {"the call": _of_call(call, options)}
    tensors = _tensors_of(wrapped) if isinstance(wrapped, nn.Module) else wrapped
    lines |= {name: _of_tensor(tensor) for name, tensor in tensors.items()}
    digest = hashlib.sha256(repr(list(lines.items())).encode()).hexdigest()
    found = replicas.gather(call, ("", digest))
    for rank, (problem, _) in zip(replicas.ranks, found, strict=True):
        if problem:
            raise WrapError(f"{call} is refused on {replicas.name([rank])}: {problem}")
    if len({digest for _, digest in found}) > 1:
        raise WrapError(_difference(call, replicas.gather(call, lines), replicas))


def refuse_wrapped(model: nn.Module) -> None:
    """Raise if a model, or a part of it, already trains on all ranks.

    Raises:
        WrapError: It does.
    """
    for name, module in model.named_modules():
        if wrapper := find_wrapper(module):
            where = f"its part {name!r} is" if name else "it is"
            raise WrapError(
                f"{type(model).__name__} is wrapped already: {where} {wrapper}; expected the "
                "bare model; wrap it once"
            )


def find_wrapper(module: nn.Module) -> str | None:
    """Return what a module is wrapped by: ``"DDP"``, ``"FSDP1"``, ...; None if it is bare."""
    if isinstance(module, DistributedDataParallel):
        return "DDP"
    if isinstance(module, DataParallel):
        return "DataParallel"
    # Importing it takes half a second; where it was not imported nothing is made of it.
    if fsdp := sys.modules.get("torch.distributed.fsdp"):
        if isinstance(module, fsdp.FullyShardedDataParallel):
            return "FSDP1"
        if isinstance(module, getattr(fsdp, "FSDPModule", ())):
            return "FSDP2"
    if any(kind.__module__.split(".")[0] == "deepspeed" for kind in type(module).__mro__) and (
        hasattr(module, "zero_optimization_stage")
    ):
        return "DeepSpeed"
    return None


def refuse_unmovable(call: str, replicas: Replicas) -> None:
    """Raise if this rank's device has no collectives.

    Raises:
        WrapError: It is Apple's, from which no backend of torch sends.
    """
    if replicas.world.device.type == "mps":
        raise WrapError(
            f"{call} over {replicas.size} rank(s) on mps, from which gloo cannot send; expected "
            "one process, and wrap_model, which leaves the model as it is there; to run several "
            "ranks compute on the CPU: TORCH_DEVICE=cpu"
        )


def refuse_experts(call: str, model: nn.Module) -> None:
    """Raise if a parameter's copies are on other ranks than those of the rest of the model.

    Raises:
        WrapError: ezpz_tp (or Megatron) says so of one: ``allreduce`` is False.
    """
    for name, parameter in model.named_parameters():
        if not getattr(parameter, "allreduce", True):
            raise WrapError(
                f"{call}: {name} is an expert's: its copies are on the ranks of the expert_data "
                "group, not on these; wrap the model without its experts, and average their "
                'gradients over ezpz_tp.get_state().group("expert_data")'
            )


def as_floating(dtype: str | torch.dtype, what: str = "dtype") -> torch.dtype:
    """Return a type to compute or reduce in.

    Raises:
        ValueError: It is not known, or no floating-point type.
    """
    wanted = as_dtype(dtype)
    if not wanted.is_floating_point:
        raise ValueError(f"{what} {wanted}; expected a floating-point type")
    return wanted


def _of_call(call: str, options: Mapping[str, object]) -> str:
    lasting = (str, int, float, bool, torch.dtype, type(None))
    said = (
        f"{name}={value!r}" if isinstance(value, lasting) else f"{name}=<{type(value).__name__}>"
        for name, value in sorted(options.items())
    )
    return f"{call.removesuffix('()')}({', '.join(said)})"


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = {
        f"parameter {name}": one for name, one in model.named_parameters(remove_duplicate=False)
    }
    return named | {f"buffer {name}": one for name, one in model.named_buffers()}


def _of_tensor(tensor: torch.Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    frozen = ", frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    return f"{kind} {list(tensor.shape)}{frozen}{' on meta' if tensor.is_meta else ''}"


def _difference(call: str, found: list[_Lines], replicas: Replicas) -> str:
    texts = [repr(list(lines.items())) for lines in found]
    # With a tie, the first rank is taken for right: the others would start from its values.
    most = max(Counter(texts).items(), key=lambda item: (item[1], item[0] == texts[0]))[0]
    right = texts.index(most)
    wrong = [index for index, text in enumerate(texts) if text != most]
    odd = found[wrong[0]]
    names = list(dict.fromkeys([*found[right], *odd]))
    differ = [name for name in names if found[right].get(name) != odd.get(name)]
    one = replicas.name([replicas.ranks[right]])
    if not differ:
        what = "the parameters are in another order"
    else:
        there, here = (lines.get(differ[0], "missing") for lines in (odd, found[right]))
        what = f"{differ[0]} is {there} there, and {here} on {one}"
        if len(differ) > 1:
            what += f" (and {len(differ) - 1} more differ)"
    return (
        f"{call}: not the same on all ranks: {replicas.name([replicas.ranks[i] for i in wrong])}: "
        f"{what}; expected the same call, with the same model, on every rank; build it from the "
        "same arguments everywhere"
    )
