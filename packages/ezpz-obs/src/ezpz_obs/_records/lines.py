"""One line of a run's file: how numbers are written so that they come back as they were.

JSON has no NaN and no infinity, and its numbers of more than 64 bits are floats to most
readers. They are written as strings, which no metric is: ``"NaN"``, ``"Infinity"``,
``"-Infinity"``, and integers as their digits.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import orjson

from ezpz_obs._errors import HistoryError

from .numbers import PLAIN, RESERVED

SCHEMA = 1
"""The number in each header: what a reader must know to read the file."""

HEADER, RECORD, EVENT = b'{"ezpz_obs":', b'{"step":', b'{"event":'
"""How the three kinds of line begin."""

_CRC = b',"crc":"'
_CRC_LENGTH = len(_CRC) + 8 + len(b'"}')
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_STRING = frozenset({str})
LONGEST_LINE = 64 << 20
"""Bytes: what is longer was not written by a History, and is not read into memory."""
_LONGEST_INTEGER = 4000  # digits; Python's own limit is 4,300


def encode_record(record: Mapping[str, Any]) -> bytes | None:
    """Return a record of plain numbers as a line, or None where it has to be looked at closely.

    The quick way: most records are floats that JSON has. Names of the file's own are the
    caller's to refuse.
    """
    try:
        line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # integers beyond 64 bits, names that are no strings
        return None
    # What JSON has no number for, or a metric whose name says so: either way looked at.
    return None if b"null" in line else line


def encode_anything(line: Mapping[str, Any]) -> bytes:
    """Return a header, an event or a record as a line, whatever numbers are in it."""
    return orjson.dumps(_plain(line), option=orjson.OPT_APPEND_NEWLINE)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, int) and not isinstance(value, bool):
        return value if -(1 << 63) <= value < 1 << 64 else _digits(value)
    if isinstance(value, Mapping):
        return {_text(str(key)): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    # A configuration may hold paths, dtypes and anything else: what they say will do.
    return (
        value
        if value is None or isinstance(value, bool)
        else _text(value if isinstance(value, str) else str(value))
    )


def _text(value: str) -> str:
    # Names of files in another encoding hold surrogates, which UTF-8 has not.
    return value.encode(errors="backslashreplace").decode()


def _digits(value: int) -> str:
    if value.bit_length() > 1 + math.log2(10) * _LONGEST_INTEGER:
        raise ValueError(
            f"an integer of {value.bit_length():,} bits; "
            f"expected at most {_LONGEST_INTEGER:,} digits"
        )
    return str(value)


def seal(line: bytes) -> bytes:
    """Add the checksum to a line: 1 µs for 250 bytes."""
    body = line[:-2]  # the brace and the newline
    return b'%b%b%08x"}\n' % (body, _CRC, zlib.crc32(body))


def is_intact(line: bytes) -> bool:
    """Say whether a line without its newline has no checksum, or the right one."""
    if not line.endswith(b'"}') or line[-_CRC_LENGTH : -_CRC_LENGTH + len(_CRC)] != _CRC:
        return True
    return line[-10:-2] == b"%08x" % zlib.crc32(line[:-_CRC_LENGTH])


def decode(line: bytes) -> dict[str, Any]:
    """Return what a line says, of whatever kind; numbers of records are numbers again.

    Raises:
        HistoryError: It is no JSON object, or its checksum is another.
    """
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise HistoryError(f"no JSON: {error}: {line[:60]!r}") from None
    if not isinstance(found, dict):
        raise HistoryError(f"{line[:60]!r}; expected a JSON object")
    if not is_intact(line):
        raise HistoryError(f"the checksum is another: {line[:60]!r}; expected it as it was written")
    if "crc" in found:
        del found["crc"]
    # Strings are rare: looking for one in the bytes is quicker than at every value.
    if line.startswith(RECORD) and (b':"' in line or b': "' in line):
        for name, value in found.items():
            if type(value) is str:
                found[name] = _number(value)
    return found


def _number(text: str) -> float | int:
    if text in _WORDS:
        return _WORDS[text]
    try:
        return int(text)
    except ValueError:
        raise HistoryError(f"a value {text[:60]!r}; expected a number") from None


def is_quick(metrics: Mapping[str, Any]) -> bool:
    """Say whether all values are plain numbers, and all names strings and not the file's own."""
    return (
        PLAIN.issuperset(map(type, metrics.values()))
        and RESERVED.isdisjoint(metrics)
        and "" not in metrics
        and _STRING.issuperset(map(type, metrics))
    )
