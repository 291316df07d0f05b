"""All that a checkpoint holds, by key: tensors in pieces, and the rest as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from ezpz_dist._objects import as_tensor
from ezpz_tp import Piece

from .disk_format import Key
from .pieces import Pieces, Splits, has_pieces, is_in_pieces
from .values import encode

# Keys.

COMMON: Key = ("common",)
"""What rank 0 has for all: the scheduler, ``extra``, the degrees."""


def model_key(name: str) -> Key:
    return "model", name


def optimizer_key(name: str, key: str) -> Key:
    return "optimizer", name, key


def values_key(name: str) -> Key:
    """Return the key of what an optimizer has of a parameter and is no tensor."""
    return "optimizer-values", name


def stage_key(stage: int) -> Key:
    """Return the key of a pipeline stage's options of optimizers and state that is no tensor."""
    return "stage", f"{stage:04d}"


def rank_key(rank: int) -> Key:
    """Return the key of a rank's random streams and position in the data."""
    return "rank", f"{rank:07d}"


def replica_key(rank: int) -> Key:
    """Return the key of a rank's own buffers and extra state, where ranks differ in them."""
    return "replica", f"{rank:07d}"


# What a caller gives to be saved or filled.

Optimizers = Optimizer | Sequence[Optimizer]


class CheckpointArgs(NamedTuple):
    model: nn.Module
    optimizers: Sequence[Optimizer]
    scheduler: Any
    data: Any
    extra: Mapping[str, Any] | None = None
    frozen: bool = True

    @property
    def contents(self) -> tuple[str, ...]:
        contents = ["model" if self.frozen else "trainable"]
        if self.optimizers:
            contents.append("optimizer")
        others = {"scheduler": self.scheduler, "data": self.data, "extra": self.extra}
        contents += [name for name, value in others.items() if value is not None]
        return tuple(contents)


def list_optimizers(optimizer: Optimizers | None) -> list[Optimizer]:
    if optimizer is None:
        return []
    if isinstance(optimizer, Optimizer):
        return [optimizer]
    return list(optimizer)


def collect_states(things: Any) -> Any:
    """Return the state of an object, or of several. A dict is its own, and None none."""
    if things is None:
        return None
    if isinstance(things, Mapping):
        return dict(things)
    if isinstance(things, Sequence):
        return [collect_states(each) for each in things]
    return things.state_dict()


def set_states(things: Any, state: Any) -> None:
    """Give an object, or several, their state back. A dict is filled."""
    if isinstance(things, dict):
        things.clear()
        things.update(state)
    elif isinstance(things, Sequence):
        for each, saved in zip(things, state, strict=True):
            set_states(each, saved)
    else:
        things.load_state_dict(state)


# Pieces.


class Cut(NamedTuple):
    """The state of a model and its optimizers: tensors, in pieces, and other values."""

    tensors: dict[Key, Pieces]
    model_values: dict[str, Any]
    optimizer_values: dict[str, dict[Any, Any]]


def cut_state(
    splits: Splits, model: Mapping[str, Any], optimizers: Mapping[str, Mapping[Any, Any]]
) -> Cut:
    cut = Cut({}, {}, {})
    for name, value in model.items():
        if is_in_pieces(name, value):
            cut.tensors[model_key(name)] = splits.cut_model_tensor(name, value)
        else:
            cut.model_values[name] = value
    for name, entries in optimizers.items():
        for key, value in entries.items():
            if isinstance(key, str) and has_pieces(value):
                cut.tensors[optimizer_key(name, key)] = splits.cut_optimizer_tensor(
                    name, key, value
                )
            else:
                cut.optimizer_values.setdefault(name, {})[key] = value
    return cut


def encode_pieces(what: str, value: Any) -> Pieces:
    """Return an object as one piece of bytes."""
    return wrap_bytes(as_tensor(encode(what, value)))


def wrap_bytes(data: Tensor) -> Pieces:
    """Return bytes as one piece of a tensor."""
    size = data.numel()
    return Pieces((size,), data.dtype, ((Piece((0,), (size,)), data),))
