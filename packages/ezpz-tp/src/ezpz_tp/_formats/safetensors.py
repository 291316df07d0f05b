"""The safetensors file format, read and written a piece of a tensor at a time.

Eight bytes of length, little-endian; as many of JSON, which gives each tensor's dtype, shape and
place; then the tensors (https://github.com/huggingface/safetensors, README, "Format"). The
library of that name writes whole files at once, and reads them through a memory map.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ezpz_tp._errors import ParallelError

from . import Stored, ToWrite, strides_of, write, written

_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "BOOL": "bool",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
# Some are newer than the oldest torch that is supported.
DTYPES = {name: getattr(torch, dtype) for name, dtype in _NAMES.items() if hasattr(torch, dtype)}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST = 100_000_000  # bytes of JSON; the library reads no more


def open_safetensors(path: Path) -> tuple[Mapping[str, Stored], Mapping[str, str]]:
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST):
                raise ParallelError(
                    f"{path}: has {size} bytes; expected 8 and a header of {length}: it is "
                    "truncated, or no safetensors file"
                )
            text = file.read(length)
    except FileNotFoundError as error:
        raise ParallelError(f"{path}: there is no such file") from error
    try:
        header = json.loads(text)
        metadata = dict(header.pop("__metadata__", {}))
        found = {name: _stored(path, name, said, 8 + length) for name, said in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ParallelError(f"{path}: its header is not that of safetensors: {error}") from error
    expected = 8 + length
    for name, stored in sorted(found.items(), key=lambda item: (item[1].at, item[1].nbytes)):
        if stored.at != expected:
            raise ParallelError(
                f"{path}: tensor {name!r} is said to begin at byte {stored.at}; expected "
                f"{expected}, where the one before it ends: the header is damaged"
            )
        expected += stored.nbytes
    if size != expected:
        cut = [f"{name!r} {one.shape}" for name, one in found.items() if one.at + one.nbytes > size]
        raise ParallelError(
            f"{path}: has {size} bytes; expected {expected}, as its header says"
            + (f". It is truncated, within or before tensor {cut[0]}" if cut else "")
        )
    return found, metadata


def _stored(path: Path, name: str, said: Any, begin: int) -> Stored:
    start, stop = integers(said["data_offsets"])
    if said["dtype"] not in DTYPES:
        raise ValueError(f"dtype {said['dtype']!r} is none of {', '.join(DTYPES)}")
    shape = integers(said["shape"])
    stored = Stored(path, DTYPES[said["dtype"]], shape, strides_of(shape), begin + start)
    if stop - start != stored.nbytes:
        raise ParallelError(
            f"{path}: tensor {name!r} of {stored.dtype} and shape {shape} is said to have "
            f"{stop - start} bytes; expected {stored.nbytes}"
        )
    return stored


def integers(values: Iterable[Any]) -> tuple[int, ...]:
    """Return whole numbers of a file, having made sure that they are."""
    found = tuple(values)
    if not all(type(value) is int and value >= 0 for value in found):
        raise ValueError(f"found {values!r}, expected whole numbers, at least 0")
    return found


def write_safetensors(
    path: Path, tensors: ToWrite, metadata: Mapping[str, str] | None = None
) -> None:
    # The widest first, as the library does: then each is aligned to its width.
    ordered = sorted(tensors.items(), key=lambda item: -item[1][0].itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    stop = 0
    for name, (dtype, shape, _) in ordered:
        if (kind := _DTYPE_NAMES.get(dtype)) is None:
            raise ParallelError(
                f"tensor {name!r} has {dtype}, which the safetensors format does not know; "
                f"expected one of {', '.join(map(str, _DTYPE_NAMES))}"
            )
        start, stop = stop, stop + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with written(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, (*_, values) in ordered:
            for part in values:
                write(file, part)
