"""What a sink is, which of them are a library's, and what these have in common."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from ezpz_obs._context import to_text
from ezpz_obs._errors import HistoryError, SinkError
from ezpz_obs._file import FILE_NAME, HEADER, as_float, decode


@runtime_checkable
class Sink(Protocol):
    """A place that a run's records go to. All three are called by one thread, never training's.

    A sink may have two more members. ``open_seconds`` is how long `open` may take (10).
    ``abandon()`` is called from another thread when the sink hangs, and should make that call
    return.
    """

    name: str
    """What warnings call it."""

    def open(self, header: Mapping[str, Any], folder: Path | None) -> None:
        """Make ready.

        Args:
            header: The first line of this attempt in the run's file.
            folder: The run's folder; None where it has none.
        """

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Take records, in order: ``{"step": 3, "time": 1732.5, "loss": 0.25}``.

        One that was made again after a restart has ``"replay": True``.
        """

    def close(self) -> None:
        """Send what was kept back, and end."""


def give_home(folder: Path | None, variables: Mapping[str, str]) -> None:
    """Set variables that name folders of a library's own, where they are not set."""
    # For a process of ours only. Some machines' compute nodes have no home that can be written.
    with suppress(OSError), tempfile.TemporaryFile(dir=os.path.expanduser("~")):
        return
    base = Path(tempfile.mkdtemp(prefix="ezpz-obs-")) if folder is None else folder
    for variable, name in variables.items():
        os.environ.setdefault(variable, str((base / name).absolute()))


_NOT_METRICS = frozenset({"step", "time", "replay"})


def metrics_of(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return (item for item in record.items() if item[0] not in _NOT_METRICS)


def common_metrics(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers as libraries draw them: no booleans, no integers beyond 64 bits."""
    return {  # a plus makes an integer of a boolean
        name: +value if isinstance(value, float) or abs(value) < 1 << 63 else as_float(value)
        for name, value in metrics_of(record)
    }


def say_error(error: BaseException) -> str:
    text = " ".join(to_text(error).split())
    return f"{type(error).__name__}: {text:.500}" if text else type(error).__name__


def plain_config(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is worth showing beside a run: its configuration, and where it ran."""
    facts = {
        name: header[name]
        for name in ("world_size", "host", "hosts", "machine", "job", "git", "versions", "argv")
        if header.get(name) is not None
    }
    return {**dict(header.get("config") or {}), "ezpz_obs": facts}


def run_key(header: Mapping[str, Any], folder: Path | None) -> str:
    """Return 12 letters and digits that are a run's own, the same at each attempt."""
    # Of the first header in its folder; so a restarted run is known again, wherever its folder was
    # moved meanwhile. A replay is a run of its own.
    first = header
    with suppress(OSError, HistoryError):  # without one that can be read: this attempt's
        if folder is not None:
            with open(folder / FILE_NAME, "rb") as file:
                line = file.readline()
            first = decode(line) if line.startswith(HEADER) else header
    parts = (first.get("run"), first.get("time"), first.get("host"), header.get("replayed"))
    return blake2b(repr(parts).encode(), digest_size=6).hexdigest()


def project_of(header: Mapping[str, Any], variable: str) -> str:
    """Return what runs are grouped under: as told, by the variable, else the script's name."""
    if told := header.get("project") or os.environ.get(variable):
        return str(told)
    argv = header.get("argv") or [""]
    stem = Path(str(argv[0])).stem
    return stem if stem and not stem.startswith("-") else "ezpz"


LIBRARY_SINKS: Final = ("mlflow", "tensorboard", "trackio", "wandb")
"""The sink, its library, its extra and its module here have one name, and the class begins so."""


def library_seconds() -> float:
    """Return the seconds that a library has to start, and to end (``EZPZ_SINK_SECONDS``)."""
    text = os.environ.get("EZPZ_SINK_SECONDS", "10")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 3 < seconds <= 86_400:
        raise SinkError(f"EZPZ_SINK_SECONDS={text!r}; expected seconds above 3, to 86400")
    return seconds


def check_installed(name: str) -> None:
    if sys.modules.get(name) is not None:
        return
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:
        spec = None
    # Without an origin it is a mere folder of that name: W&B makes one, ./wandb.
    if spec is None or spec.origin is None:
        raise SinkError(
            f"the sink {name!r} needs {name}, which is not installed here; expected: "
            f'pip install "ezpz-obs[{name}]"'
        )
