"""Numbers and runs as libraries want them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ezpz_obs._errors import HistoryError
from ezpz_obs._file import HEADER, decode
from ezpz_obs._run import FILE_NAME

NOT_METRICS = frozenset({"step", "time", "replay"})


def metrics_of(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return a record's metrics by name, without step and time."""
    return (item for item in record.items() if item[0] not in NOT_METRICS)


def as_float(value: float) -> float:
    """Return any number as a float; an integer beyond 1.8e308 is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def as_common(value: Any) -> Any:
    """Return a number as libraries draw it: no booleans, no integers beyond 64 bits."""
    if isinstance(value, bool):
        return int(value)
    return value if isinstance(value, float) or abs(value) < 1 << 63 else as_float(value)


def plain_config(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is worth showing beside a run: its configuration, and where it ran."""
    facts = {
        name: header[name]
        for name in ("world_size", "host", "hosts", "machine", "job", "git", "versions", "argv")
        if header.get(name) is not None
    }
    return {**dict(header.get("config") or {}), "ezpz_obs": facts}


def run_key(header: Mapping[str, Any], folder: Path | None) -> str:
    """Return 12 letters and digits that are a run's own, the same at each attempt.

    Of the first header in its folder; so a restarted run is known again, wherever its
    folder was moved meanwhile. A replay is a run of its own.
    """
    first = _first_header(folder) or header
    parts = (first.get("run"), first.get("time"), first.get("host"), header.get("replayed"))
    return blake2b(repr(parts).encode(), digest_size=6).hexdigest()


def project_of(header: Mapping[str, Any]) -> str:
    """Return what runs are grouped under where nobody said: the script's name."""
    argv = header.get("argv") or [""]
    stem = Path(str(argv[0])).stem
    return stem if stem and not stem.startswith("-") else "ezpz"


def _first_header(folder: Path | None) -> Mapping[str, Any] | None:
    if folder is None:
        return None
    try:
        with open(folder / FILE_NAME, "rb") as file:
            line = file.readline()
        return decode(line) if line.startswith(HEADER) else None
    except (OSError, HistoryError):
        return None  # the caller has this attempt's
