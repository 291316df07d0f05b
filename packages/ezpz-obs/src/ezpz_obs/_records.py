"""The lines of a run's file: what a metric is called, and how a line is written and read.

JSON has no NaN and no infinity, and its numbers of more than 64 bits are floats to most
readers. They are written as strings, which no metric is: ``"NaN"``, ``"Infinity"``,
``"-Infinity"``, and integers as their digits.
"""

from __future__ import annotations

import math
import re
import sys
import zlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import orjson

from ._errors import HistoryError
from ._text import to_plain, to_text

SCHEMA: Final = 1  # the number in each header: what a reader must know to read the file
FILE_NAME: Final = "metrics.jsonl"
RESERVED: Final = frozenset({"step", "time", "replay", "event", "ezpz_obs"})
"""Names of the file's own: no metric may have one."""

HEADER: Final = b'{"ezpz_obs":'  # how the three kinds of lines begin
RECORD: Final = b'{"step":'
EVENT: Final = b'{"event":'
LONGEST_LINE: Final = 64 << 20  # bytes: no History writes more, and it is not read into memory

PLAIN: Final = frozenset({int, float, bool})  # the types that JSON takes as they are
_STRING: Final = frozenset({str})
_WORDS: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

STATISTICS: Final = ("mean", "std", "min", "max", "min_rank", "max_rank")
"""What follows a metric's name with ``cross_rank``: ``loss/mean``, ..."""


def is_plain(metrics: Mapping[str, Any]) -> bool:
    """Return whether all values are plain numbers, and all names may be written as they are."""
    return (
        PLAIN.issuperset(map(type, metrics.values()))
        and _STRING.issuperset(map(type, metrics))
        and RESERVED.isdisjoint(metrics)
        and "" not in metrics
    )


def flatten(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics under flat names, ``{"train": {"loss": 1}}`` as ``{"train/loss": 1}``.

    The values are plain numbers, or tensors that lie on a device.
    """
    flat: dict[str, Any] = {}
    for name, value in _iterate_leaves(metrics, ""):
        if name in RESERVED:
            raise ValueError(
                f"a metric called {name!r}; expected another name: History writes one of its own"
            )
        if name in flat:
            raise ValueError(f"two metrics called {name!r}; expected each name once")
        if type(value) in PLAIN or is_on_device(value):
            flat[name] = value
        else:
            flat[name] = to_number(name, value)
    return flat


def _iterate_leaves(metrics: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in metrics.items():
        if not isinstance(key, str):
            raise TypeError(
                f"a metric called {to_text(key, repr)}; expected its name to be a string"
            )
        if not key:
            raise ValueError(f"a metric of {prefix or 'the step'!r} has no name; expected one")
        if isinstance(value, Mapping):
            yield from _iterate_leaves(value, f"{prefix}{key}/")
        else:
            # A subclass of str is none to the encoder.
            yield f"{prefix}{key}", value


def to_number(name: str, value: Any) -> float | int:
    """Return one number, of anything that holds one: 0-d arrays and tensors, numpy's scalars."""
    if isinstance(value, str | bytes):
        raise TypeError(f"metric {name!r} is {to_text(value, repr):.60}; expected a number")
    masked_arrays = sys.modules.get("numpy.ma")
    if masked_arrays is not None and masked_arrays.is_masked(value):
        return math.nan  # its `item` is a number that is none
    item = getattr(value, "item", None)  # numpy's float64 is a float to Python, not to the encoder
    if callable(item):
        try:
            value = item()
        except (ValueError, RuntimeError) as error:  # numpy's and torch's, of several elements
            raise TypeError(f"metric {name!r} is not one number: {error}") from error
    for kind in (bool, int, float):  # a boolean is an integer, too
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"metric {name!r} is a {type(value).__name__}; expected a number")


def is_on_device(value: Any) -> bool:
    """Return whether a value is a tensor that is not in the host's memory."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return False
    return bool(value.device.type not in ("cpu", "meta"))


def as_float(value: float) -> float:
    """Return a number as a double; an integer beyond 1.8e308 as an infinity."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def check_statistic_names(metrics: Collection[str]) -> None:
    """Refuse a metric that is called as a statistic of another."""
    for name in metrics:
        metric, _, statistic = name.rpartition("/")
        if statistic in STATISTICS and metric in metrics:
            raise ValueError(
                f"a metric called {name!r} beside {metric!r}; expected another name: "
                f"cross_rank=True writes the {statistic} of {metric!r} under that one"
            )


def encode_numbers(record: Mapping[str, Any]) -> bytes | None:
    """Return a record as a line; None where a value, or a name, has to be looked at closely."""
    try:
        line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # integers beyond 64 bits, names that are no Unicode
        return None
    # What JSON has no number for is null, or a metric is called so.
    if b"null" in line:
        return None
    return line


def encode(line: Mapping[str, Any]) -> bytes:
    """Return any line: what JSON does not have is a string."""
    return orjson.dumps(to_plain(line), option=orjson.OPT_APPEND_NEWLINE)


def decode(line: bytes) -> dict[str, Any]:
    """Return what a line without its newline holds; numbers of records are numbers again.

    Raises:
        HistoryError: It is no line that a History wrote.
    """
    if not line.startswith((HEADER, RECORD, EVENT)):
        raise HistoryError(f"{line[:60]!r}; expected a line that a History wrote")
    try:
        found: dict[str, Any] = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise HistoryError(f"no JSON: {error}: {line[:60]!r}") from None
    if line.startswith(RECORD):
        if b':"' in line or b': "' in line:  # quicker than at every value
            for name, value in found.items():
                if type(value) is str:
                    found[name] = _read_number(value)
        if not is_record(found):
            raise HistoryError(f"{line[:60]!r}; expected an integer step, a time and numbers")
    return found


def is_record(found: Any) -> bool:
    """Return whether an object has a step, a time, and nothing but numbers."""
    return (
        PLAIN.issuperset(map(type, found.values()))
        and type(found.get("step")) is int
        and "time" in found
    )


def _read_number(text: str) -> float | int:
    if text in _WORDS:
        return _WORDS[text]
    try:
        return int(text)
    except ValueError:
        raise HistoryError(f"a value {text[:60]!r}; expected a number") from None


_PLAIN_NAME = re.compile(r"[a-z0-9_]{1,40}")
_OTHER_LETTERS = re.compile(r"[^a-z0-9_]+")


def to_file_name(kind: str, name: str) -> str:
    """Return a name for a file that every file system takes, another one for each metric."""
    if _PLAIN_NAME.fullmatch(name):
        return f"{kind}-{name}"
    slug = _OTHER_LETTERS.sub("-", name[:200].lower()).strip("-")[:40]
    digest = f"{zlib.crc32(name.encode(errors='backslashreplace')):08x}"
    return "-".join(part for part in (kind, slug, digest) if part)
