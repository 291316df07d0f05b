"""Where full tensors come from: files of any format, read a piece at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ezpz_tp._errors import DegreeError

from .spec import Shard


@dataclass(frozen=True, slots=True)
class Entry:
    """A full tensor that a source can give: its name, dtype and shape, and how it is split."""

    name: str
    dtype: torch.dtype
    shard: Shard

    @property
    def nbytes(self) -> int:
        """Return how many bytes the full tensor has."""
        return math.prod(self.shard.full_shape) * self.dtype.itemsize

    def check(self, degree: int) -> None:
        """Raise `DegreeError`, with the name, unless the tensor can be split by a degree."""
        try:
            self.shard.local_shape(0, degree)
        except DegreeError as error:
            raise DegreeError(f"{self.name!r}: {error}") from error


@dataclass(frozen=True, slots=True)
class Held:
    """A full tensor, and the pipeline stages that hold it: more than one where it is tied."""

    entry: Entry
    stages: tuple[int, ...]


class Source(Protocol):
    """Full tensors, of which any stretch can be read.

    An optimizer's tensors are entries too, named as `optimizer_name` does.

    Attributes:
        entries: What there is, by name, in the model's order.
        metadata: What else the files say. Of it ``param_groups`` (of the optimizer, by names),
            ``values`` (of states, that are no tensors) and ``extra`` are passed on.
    """

    @property
    def entries(self) -> Mapping[str, Entry]: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill ``out`` with a stretch of a full tensor along the dim that is split (or dim 0).

        Args:
            name: A name in ``entries``.
            start: Where in the full tensor the stretch begins.
            out: A CPU tensor of the entry's dtype, of any strides, of the full shape but for its
                length along that dim.
        """
        ...


@dataclass(frozen=True, slots=True)
class Options:
    """What a reader has to be told because its files do not say it.

    Args:
        plan: Patterns of names, and how the tensors they match are split.
        vocab_size: The vocabulary without padding.
    """

    plan: Mapping[str, Any] | None = None
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """A format of files: whether a path is of it, and how to open it."""

    name: str
    recognizes: Callable[[Path], bool]
    open: Callable[[Path, Options], Source]


OPTIMIZER = "optimizer/"


def optimizer_name(parameter: str, key: str) -> str:
    """Return the name in files of an optimizer's tensor: ``optimizer/<parameter>/<key>``."""
    return f"{OPTIMIZER}{parameter}/{key}"


def parameter_of(name: str) -> tuple[str, str | None]:
    """Return a tensor's parameter, and which of the optimizer's tensors of it this is, or None.

    >>> parameter_of("optimizer/head.weight/exp_avg")
    ('head.weight', 'exp_avg')
    >>> parameter_of("head.weight")
    ('head.weight', None)
    """
    if not name.startswith(OPTIMIZER):
        return name, None
    parameter, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
    return parameter, key
