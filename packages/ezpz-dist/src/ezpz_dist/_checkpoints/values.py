"""Objects as bytes that are read without running code: JSON, and the raw bytes of tensors.

What JSON has is written as such. Everything else is an object with one key that names its type:
``{"<tuple>": [1, 2]}``. The bytes are the length of the JSON text (8 bytes, little-endian), the
text, and the tensors, each at the offset that the text gives.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from ezpz_dist._objects import is_plain, raw_of

DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
ALIGNMENT = 16  # bytes: the largest element's

MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading JSON as something that it is not raises: ``int(Infinity)``, ``[].get``."""


def name_of_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def find_dtype(name: Any) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"{name!r} is no dtype of this torch")
    return DTYPES[name]


def check_sizes(values: Any) -> tuple[int, ...]:
    """Return values as a tuple, having made sure that they are sizes or offsets."""
    for value in values:
        if type(value) is not int or value < 0:
            raise ValueError(f"{value!r} is no size")
    return tuple(values)


def align(at: int) -> int:
    return -(-at // ALIGNMENT) * ALIGNMENT


# Writing.


def encode(what: str, value: Any) -> bytes:
    """Return an object as bytes.

    Enums, paths, dates, times, numpy scalars and namedtuples are written as plain values.

    Args:
        what: Names the object in errors. Empty: what is wrong in a dict is named by its key.
        value: Of numbers, strings, bytes, None, tensors, and tuples, lists, sets and dicts of them.

    Raises:
        TypeError: Something inside is none of these: its place and type.
    """
    encoder = Encoder()
    tree = encoder.encode(what, value)
    text = json.dumps({"tensors": encoder.places, "value": tree}).encode()
    return b"".join([struct.pack("<Q", len(text)), text, *encoder.data])


class Encoder:
    """Collects the tensors of an object while its tree is made."""

    def __init__(self) -> None:
        self.places: list[tuple[str, tuple[int, ...], int]] = []
        self.data: list[bytes | bytearray] = []
        self._size = 0

    def encode(self, path: str, value: Any) -> Any:
        """Return the JSON value that represents an object."""
        value = simplify(value)
        kind = type(value)
        tree: Any
        if value is None or kind in (bool, int, str):
            tree = value
        elif kind is float:
            tree = value if math.isfinite(value) else {"<float>": str(value)}
        elif kind is list:
            tree = self._items(path, value)
        elif kind in SEQUENCES:
            tree = {SEQUENCES[kind]: self._items(path, value)}
        elif kind in MAPPINGS:
            tree = self._mapping(path, value)
        elif kind in ATOMS:
            tag, write = ATOMS[kind]
            tree = {tag: write(value)}
        elif isinstance(value, Tensor):
            tree = self._tensor(path, value)
        else:
            raise TypeError(
                f"{path}, of type {kind.__module__}.{kind.__qualname__}, cannot be saved so that "
                "it can be read without running code; expected numbers, strings, tensors, None, "
                "and tuples, lists, sets and dicts of them"
            )
        return tree

    def _items(self, path: str, values: Any) -> list[Any]:
        return [self.encode(f"{path}[{number}]", each) for number, each in enumerate(values)]

    def _mapping(self, path: str, values: Mapping[Any, Any]) -> Any:
        items = [(simplify(key), each) for key, each in values.items()]
        if type(values) is dict and all(is_json_key(key) for key, _ in items):
            return {key: self.encode(join_path(path, key), each) for key, each in items}
        pairs = []
        for key, each in items:
            encoded = self.encode(f"a key of {path or 'all'}", key)
            pairs.append([encoded, self.encode(join_path(path, key), each)])
        return {MAPPINGS[type(values)]: pairs}

    def _tensor(self, path: str, tensor: Tensor) -> Any:
        if tensor.is_meta:
            raise TypeError(f"{path} is on the meta device, without values; expected to_empty()")
        if tensor.layout is torch.sparse_coo:
            tensor = tensor.coalesce()
            parts = [tensor.indices(), tensor.values()]
            return {"<sparse>": [list(tensor.shape), *self._items(path, parts)]}
        if not is_plain(tensor):
            raise TypeError(
                f"{path} is a {type(tensor).__name__} of layout {tensor.layout}, quantized "
                f"{tensor.is_quantized}; expected a dense tensor, or a sparse one (COO)"
            )
        raw = raw_of(tensor)
        at = align(self._size)
        self.data.append(bytes(at - self._size))
        self.data.append(raw)
        self._size = at + len(raw)
        self.places.append((name_of_dtype(tensor.dtype), tuple(tensor.shape), at))
        return {"<tensor>": len(self.places) - 1}


def join_path(path: str, key: Any) -> str:
    return f"{path}[{key!r}]" if path else str(key)


def is_json_key(key: Any) -> bool:
    return type(key) is str and not key.startswith("<")


def simplify(value: Any) -> Any:
    """Return a common type's plain equivalent; any other value as it is."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, Enum):
        value = simplify(value.value)
    elif numpy is not None and isinstance(value, numpy.generic):
        number = value.item()
        value = number if isinstance(number, numpy.generic) else simplify(number)
    elif isinstance(value, PurePath):
        value = str(value)
    elif isinstance(value, dt.date | dt.time):
        value = value.isoformat()
    elif isinstance(value, dt.timedelta):
        value = value.total_seconds()
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        value = tuple(value)
    return value


SEQUENCES: dict[type, str] = {tuple: "<tuple>", set: "<set>"}
SEQUENCES[torch.Size] = "<Size>"
MAPPINGS: dict[type, str] = {dict: "<dict>", OrderedDict: "<OrderedDict>", Counter: "<Counter>"}
ATOMS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    bytes: ("<bytes>", lambda value: base64.b64encode(value).decode()),
    complex: ("<complex>", lambda value: [str(value.real), str(value.imag)]),
    torch.dtype: ("<dtype>", name_of_dtype),
}


# Reading.


def decode(what: str, data: bytes | bytearray) -> Any:
    """Return an object from its bytes. Runs no code that is in them.

    Raises:
        ValueError: The bytes are not what `encode` writes.
    """
    try:
        (length,) = struct.unpack_from("<Q", data)
        start = struct.calcsize("<Q") + length
        whole = json.loads(bytes(data[struct.calcsize("<Q") : start]))
        tensors = [read_tensor(data, start, *place) for place in whole["tensors"]]
        return decode_tree(whole["value"], tensors)
    except (*MALFORMED, struct.error, RuntimeError, MemoryError) as error:
        raise ValueError(f"{what} is damaged ({type(error).__name__}: {error})") from error


def read_tensor(data: bytes | bytearray, start: int, dtype: str, shape: Any, at: int) -> Tensor:
    found = torch.empty(check_sizes(shape), dtype=find_dtype(dtype))
    begin = start + check_sizes([at])[0]
    raw = bytearray(data[begin : begin + found.nbytes])
    if len(raw) != found.nbytes:
        raise ValueError(f"a tensor of {found.nbytes} bytes ends after {len(raw)}")
    if raw:
        found = torch.frombuffer(raw, dtype=found.dtype).view(found.shape)
    return found


def decode_tree(tree: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(tree, list):
        return [decode_tree(each, tensors) for each in tree]
    if not isinstance(tree, dict):
        return tree
    tag = next(iter(tree), "")
    if not tag.startswith("<"):
        return {key: decode_tree(each, tensors) for key, each in tree.items()}
    content = tree[tag]
    if tag == "<tensor>":
        return tensors[content]
    return READERS[tag](decode_tree(content, tensors))


def read_sparse(content: Any) -> Tensor:
    shape, indices, values = content
    size = check_sizes(shape)
    return torch.sparse_coo_tensor(indices, values, size, check_invariants=True, is_coalesced=True)


READERS: dict[str, Callable[[Any], Any]] = {
    "<float>": float,
    "<tuple>": tuple,
    "<set>": set,
    "<Size>": torch.Size,
    "<dict>": dict,
    "<OrderedDict>": OrderedDict,
    "<Counter>": lambda pairs: Counter(dict(pairs)),
    "<bytes>": lambda text: base64.b64decode(text, validate=True),
    "<complex>": lambda parts: complex(float(parts[0]), float(parts[1])),
    "<dtype>": find_dtype,
    "<sparse>": read_sparse,
}
