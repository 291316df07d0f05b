"""A model's tensors by the names that the model itself gave them, whatever wraps it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

_INSIDE = {
    DistributedDataParallel: "module",
    FullyShardedDataParallel: "_fsdp_wrapped_module",
    CheckpointWrapper: "_checkpoint_wrapped_module",
}


def plain_name(model: nn.Module, name: str) -> str:
    """Return a parameter's name without the parts that wrappers added.

    >>> plain_name(nn.Sequential(nn.Linear(2, 2)), "0.weight")
    '0.weight'
    """
    kept, module = [], model
    for part in name.split("."):
        if part != _added_by(module):
            kept.append(part)
        child = getattr(module, part, None)
        if isinstance(child, nn.Module):
            module = child
    return ".".join(kept)


def _added_by(module: nn.Module) -> str | None:
    """Return the name under which a wrapper holds its module; None: it is none."""
    if type(module).__name__ == "OptimizedModule":  # torch.compile's; importing it takes seconds
        return "_orig_mod"
    return next((inside for kind, inside in _INSIDE.items() if isinstance(module, kind)), None)


@contextmanager
def quietly() -> Iterator[None]:
    """Keep back torch's warnings that FSDP1 is deprecated: whoever uses it was told by torch."""
    with warnings.catch_warnings():
        for text in ("Please use DTensor instead", "FSDP.state_dict_type"):
            warnings.filterwarnings("ignore", text, FutureWarning)
        yield


def refuse_deepspeed(model: nn.Module) -> None:
    """Refuse what holds its state elsewhere.

    Raises:
        ValueError: It is DeepSpeed's: parameters that ZeRO-3 has taken apart look empty.
    """
    engine = any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__)
    if engine or any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} is DeepSpeed's, which holds the state in parts of its own; "
            "expected engine.save_checkpoint() and engine.load_checkpoint()"
        )


def is_fsdp1(model: nn.Module) -> bool:
    """Return whether FSDP1 holds parameters: optimizer and model then see other tensors."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def parameters_by_name(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters by the names that the model's state dict has them under.

    One that the model has twice goes by its first name. Hooks may rename.
    """
    renamed = {id(value): key for key, value in reversed(model.state_dict(keep_vars=True).items())}
    return {
        plain_name(model, renamed.get(id(parameter), name)): parameter
        for name, parameter in model.named_parameters()
    }
