"""History: a run's metrics, on disk a moment after they were made."""

from __future__ import annotations

import errno
import math
import operator
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from ezpz_topo import get_rank

FILE_NAME = "metrics.jsonl"

_START = b'{"step":'

_NOT_FINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}


class History:
    """Metrics by step: kept in memory, and written as one JSON object a line.

    Each record is one ``write`` to a file opened for appending, so that a process killed
    at any moment loses at most the line it was writing. NaN and the infinities, which
    JSON has no numbers for, are written as the strings ``"NaN"``, ``"Infinity"`` and
    ``"-Infinity"``; `read` turns them back.

    Args:
        outdir: The folder in which rank 0 writes ``metrics.jsonl``; it is made if need be.
            None writes nothing. Other ranks keep their numbers in memory. A file that is
            there already is continued: a last line torn by a crash is cut off, and steps go
            on from its last one.

    Raises:
        OSError: The folder cannot be made or written.
        ezpz_topo.TopoError: The rank cannot be known.

    >>> history = History()
    >>> history.update({"loss": 0.5, "lr": 1e-3})
    'step=0 loss=0.5 lr=0.001'
    """

    def __init__(self, outdir: str | os.PathLike[str] | None = None) -> None:
        self.records: list[dict[str, Any]] = []
        self.path: Path | None = None
        self._fd: int | None = None
        self._next_step = 0
        if outdir is not None and get_rank() == 0:
            self.path = Path(outdir) / FILE_NAME
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(
                self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
            )
            self._next_step = _mend(self._fd, self.path)

    def update(self, metrics: Mapping[str, Any], step: int | None = None) -> str:
        """Record the metrics of one step, write them, and return a one-line summary.

        Args:
            metrics: Name to number: int, float, bool, or anything with ``item()`` that
                gives one (0-d numpy arrays and torch tensors).
            step: The step, any integer; default: one more than the last.

        Raises:
            TypeError: A metric or the step is no number, a name no string, an integer
                larger than 64 bits.
            ValueError: A metric is called ``step`` or ``time``.
        """
        record = self.record(metrics, step)
        return " ".join(f"{key}={_short(value)}" for key, value in record.items() if key != "time")

    def record(self, metrics: Mapping[str, Any], step: int | None = None) -> dict[str, Any]:
        """Record and write as `update` does, but return the record itself."""
        step = self._next_step if step is None else operator.index(step)
        record: dict[str, Any] = {"step": step, "time": time.time()}
        for key, value in metrics.items():
            if not isinstance(key, str):
                raise TypeError(f"a metric called {key!r}; expected its name to be a string")
            if key in ("step", "time"):
                raise ValueError(f"a metric called {key!r}; expected another name: History adds it")
            record[key] = _number(key, value)
        # On every rank, so that what cannot be written fails on all of them.
        line = _encode(record)
        if self._fd is not None:
            _write(self._fd, line)
        self.records.append(record)
        self._next_step = step + 1
        return record

    def close(self) -> None:
        """Close the file; further records stay in memory only. Harmless twice."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @staticmethod
    def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
        """Return the records of a file; a last line torn by a crash is left out.

        Raises:
            ValueError: A line other than the last is no JSON object.
        """
        lines = Path(path).read_bytes().split(b"\n")
        # After the final newline comes an empty piece; without one, a torn line.
        torn = lines.pop()
        records = [
            _decode(line, f"line {number} of", path) for number, line in enumerate(lines, start=1)
        ]
        if torn:
            try:
                records.append(_decode(torn, "the last line of", path))
            except ValueError:
                return records
        return records


def _number(key: str, value: Any) -> int | float:
    if type(value) not in (int, float, bool):
        # numpy's float64 is a float to Python, and not to orjson.
        item = getattr(value, "item", None)
        try:
            value = item() if callable(item) else value
        except (ValueError, RuntimeError) as error:  # numpy's and torch's, of several elements
            raise TypeError(f"metric {key!r} is not one number: {error}") from error
        if not isinstance(value, (int, float)):
            raise TypeError(f"metric {key!r} is a {type(value).__name__}; expected a number")
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise TypeError(f"metric {key!r} is {value}; expected an integer of at most 64 bits")
    number: int | float = value
    return number


def _mend(fd: int, path: Path) -> int:
    """Cut off a last line torn by a crash; return the step after the last one.

    Raises:
        ValueError: What is there was not written by a History.
    """
    size = end = os.fstat(fd).st_size
    tail = b""
    # Back, block by block, until the last whole line is in the tail.
    while end > 0 and tail.count(b"\n") < 2:
        start = max(0, end - (1 << 16))
        tail = os.pread(fd, end - start, start) + tail
        end = start
    whole = tail.rfind(b"\n") + 1
    torn = tail[whole:]
    if torn:
        if not torn.startswith(_START[: len(torn)]):
            raise ValueError(f"{path} ends with {torn[:40]!r}; expected records of a History")
        os.ftruncate(fd, size - len(torn))
    lines = tail[:whole].splitlines()
    if not lines:
        return 0
    step: int = _decode(lines[-1], "the last line of", path).get("step", -1)
    return step + 1


def _write(fd: int, line: bytes) -> None:
    # One write a record, so that no other can come between its parts.
    if os.write(fd, line) != len(line):
        raise OSError(errno.ENOSPC, "a record was written in part; expected room on the disk")


def _encode(record: dict[str, Any]) -> bytes:
    line = {
        key: value
        if not isinstance(value, float) or math.isfinite(value)
        else _NOT_FINITE.get(value, "NaN")
        for key, value in record.items()
    }
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def _decode(line: bytes, which: str, path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{which} {os.fspath(path)} is no JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{which} {os.fspath(path)} is {line[:40]!r}; expected a JSON object")
    return {
        key: float(value) if value in ("NaN", "Infinity", "-Infinity") else value
        for key, value in record.items()
    }


def _short(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"
