"""What a module is wrapped by already."""

from __future__ import annotations

import sys
from collections.abc import Callable
from weakref import WeakKeyDictionary, ref

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from ezpz_dist._errors import WrapError

_inside: WeakKeyDictionary[nn.Module, tuple[str, Callable[[], object]]] = WeakKeyDictionary()
"""Modules around which there is a wrapper of ours: its name, and what tells whether it lives."""


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


def remember_inside(model: nn.Module, name: str, wrapper: nn.Module | None = None) -> None:
    """Have `refuse_wrapped` know of a wrapper from the model inside it, which shows no trace.

    Args:
        model: What was wrapped.
        name: By what.
        wrapper: Once it is gone the model is bare again; None: it never is.
    """
    lives = (lambda: True) if wrapper is None else ref(wrapper)
    for module in model.modules():
        _inside[module] = name, lives


def refuse_wrapped(model: nn.Module) -> None:
    """Raise if a model, a part of it, or what it is a part of already trains on all ranks.

    Raises:
        TypeError: It is no module.
        WrapError: It does. (Of a DDP that a script made itself, its ``.module`` does not tell.)
            Or it is lazy: its parameters have no shape yet.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{model!r} to wrap; expected a torch.nn.Module")
    for name, module in model.named_modules():
        where = f"its part {name!r} is" if name else "it is"
        around, lives = _inside.get(module, ("", lambda: None))
        if wrapper := find_wrapper(module):
            found = f"{where} {wrapper}"
        elif lives() is not None:
            found = f"{where} inside of {around}"
        else:
            continue
        raise WrapError(
            f"{type(model).__name__} is wrapped already: {found}; expected the bare model; wrap "
            "it once"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise WrapError(
                f"{name} of {type(model).__name__} has no shape yet: it is lazy; expected one that "
                "has; run a batch through the model before, on every rank"
            )
