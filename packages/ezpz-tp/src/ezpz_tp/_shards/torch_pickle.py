"""The pickle in a file of `torch.save`: tensors are described, not loaded, and no code is run.

It is read with globals of our own: nothing is imported or called because a file says so.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self

import torch

from .safetensors import integers

STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "UntypedStorage": torch.uint8,  # of dtypes that are younger than typed storages, as fp8
}
"""The storages that a file names, and what they hold."""

_PLAIN = {
    ("collections", "OrderedDict"): OrderedDict,
    ("argparse", "Namespace"): SimpleNamespace,  # Megatron-LM's arguments
    ("torch", "Size"): tuple,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("builtins", "slice"): slice,
    ("__builtin__", "set"): set,
}
"""The globals that stand for themselves, or for what holds the same facts."""


class Foreign:
    """What a global stands for that is not one of a state dict's: it keeps nothing, does nothing.

    Files hold more than weights: the random state of numpy, or enumerations of the program that
    wrote them.
    """

    qualname = ""

    def __new__(cls, *_: object, **__: object) -> Self:
        """Take any arguments."""
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None: ...

    def __setitem__(self, key: object, value: object) -> None: ...

    def append(self, value: object) -> None:
        """Take what a list takes."""

    def extend(self, values: object) -> None:
        """Take what a list takes."""

    def add(self, value: object) -> None:
        """Take what a set takes."""

    def __repr__(self) -> str:
        return f"<{self.qualname}>"


@dataclass(frozen=True, slots=True)
class Storage:
    """What tensors in a file are views of."""

    dtype: torch.dtype
    key: str
    numel: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: where its elements are, in elements of its dtype."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: str

    @property
    def numel(self) -> int:
        """Return the number of its elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """Return the element after its last, in its storage."""
        if 0 in self.shape:
            return self.offset
        steps = zip(self.shape, self.stride, strict=True)
        return self.offset + 1 + sum((size - 1) * step for size, step in steps)

    @property
    def is_contiguous(self) -> bool:
        """Return whether its elements lie one after the other, in order."""
        wanted = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != wanted:
                return False
            wanted *= size
        return True


def unpickled(pickled: bytes) -> Any:
    """Return what was pickled, with what stands for tensors and for what is not known.

    Raises:
        ValueError: It is damaged.
    """
    try:
        return _Unpickler(io.BytesIO(pickled)).load()
    except _DAMAGE as error:
        raise ValueError(str(error)) from error


_DAMAGE = (
    pickle.UnpicklingError,
    ValueError,
    TypeError,
    EOFError,
    LookupError,
    AttributeError,
    OverflowError,
)
"""What a pickle that is not whole raises."""


class _Unpickler(pickle.Unpickler):
    """Unpickles with globals of our own: a file cannot have anything else imported or called."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a global."""
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if (module, name) in _REBUILD:
            made = _REBUILD[module, name]
            # A function of its own: a file can set attributes of it.
            return lambda *given: made(*given)  # noqa: PLW0108
        if module in {"torch", "torch.storage"} and name in STORAGES:
            return STORAGES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return type(name, (Foreign,), {"qualname": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Storage:
        """Return what stands for a storage."""
        kind, dtype, key, _, numel = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(
                f"a reference to {kind!r} of {dtype!r}; expected a storage"
            )
        return Storage(dtype, key, numel)


def _tensor(
    storage: Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object
) -> StoredTensor:
    return _stored(storage.dtype, storage, offset, size, stride)


def _stored(
    dtype: torch.dtype, storage: Storage, offset: int, *places: tuple[int, ...]
) -> StoredTensor:
    """Return a tensor in a file; what is not a tensor's is damage."""
    size, stride = places
    if len(integers(size)) != len(integers(stride)) or integers((offset,))[0] > storage.numel:
        raise ValueError(f"a tensor of size {size} and strides {stride}, from {offset} on")
    return StoredTensor(dtype, tuple(size), tuple(stride), offset, str(storage.key))


def _tensor_of_dtype(
    storage: Storage,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    hooks: object,
    dtype: torch.dtype,
    *_: object,
) -> StoredTensor:
    del requires_grad, hooks
    return _stored(dtype, storage, offset, size, stride)


def _parameter(tensor: StoredTensor, *_: object) -> StoredTensor:
    return tensor


def _with_attributes(
    make: Callable[..., Any], kind: type[Foreign], made: tuple[Any, ...], state: object
) -> Any:
    """Return what a tensor with attributes of Python is, or a parameter; not of another class."""
    del state
    plain = kind.qualname in {"torch.Tensor", "torch.nn.parameter.Parameter"}
    return make(*made) if plain else kind()


_REBUILD: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_dtype,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _with_attributes,
}
