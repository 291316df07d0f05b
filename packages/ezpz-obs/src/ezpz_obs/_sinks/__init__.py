"""Where else a run's records go: csv, TensorBoard, W&B, MLflow, trackio, a sink of your own."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from ezpz_obs._errors import SinkError
from ezpz_obs._run import read_run
from ezpz_obs._text import describe_error_in_full, to_text

from .common import SET_UP, check_installed, start_call

logger = logging.getLogger("ezpz_obs")
ENTRY_POINTS: Final = "ezpz_obs.sinks"

# Training waits for a sink at most this long, then continues without it.
OPEN_SECONDS: Final = 60.0  # libraries take long to import from a busy parallel file system
WRITE_SECONDS: Final = 5.0  # one write: the libraries only queue it
CLOSE_SECONDS: Final = 9.0  # of all together: a run ends within 10 s


@runtime_checkable
class Sink(Protocol):
    """A place that a run's records go to."""

    name: str
    """What warnings call it."""

    def open(self, header: Mapping[str, Any], folder: Path | None) -> None:
        """Make ready.

        Args:
            header: The first line of this attempt in the run's file.
            folder: The run's folder; None where it has none.
        """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take one record. It is called between two steps: queue what takes long.

        Args:
            step: The step; a restarted run may repeat some.
            metrics: Numbers by name, and ``time``, in seconds since 1970.
        """

    def close(self) -> None:
        """Send the queued records, and end."""


def find_sinks() -> dict[str, EntryPoint]:
    """Return the sinks that installed packages offer, by name."""
    return {found.name: found for found in entry_points(group=ENTRY_POINTS)}


def make_sinks(sinks: str | Iterable[str | Sink]) -> list[Sink]:
    """Make the sinks that are named; else those of the environment, else W&B's live run."""
    if isinstance(sinks, str):
        sinks = _parse_sink_names(sinks)
    requested = list(sinks) or _default_names()
    return [make_sink(sink) for sink in requested if sink not in ("jsonl", "none")]


def _default_names() -> list[str | Sink]:
    text = os.environ.get("EZPZ_SINKS") or os.environ.get("EZPZ_TRACKER_BACKENDS") or ""
    names = _parse_sink_names(text)
    wandb = sys.modules.get("wandb")
    if not names and getattr(wandb, "run", None) is not None:
        names.append("wandb")
    names.extend(SET_UP.difference(names))
    return names


def _parse_sink_names(text: str) -> list[str | Sink]:
    return [name.strip() for name in text.split(",") if name.strip()]


def make_sink(sink: str | Sink) -> Sink:
    """Return the sink of this name, or the object itself if it is one."""
    if not isinstance(sink, str):
        if isinstance(sink, Sink):
            return sink
        raise SinkError(
            f"{to_text(sink, repr):.200} as a sink; expected a name, or an object with name, "
            "open, write and close"
        )
    known = find_sinks()
    if sink not in known:
        raise SinkError(f"a sink {sink!r}; expected one of {', '.join(sorted(known))}")
    check_installed(sink)
    made: Sink = known[sink].load()()
    return made


class SinkGroup:
    """The sinks of one run. One that raises or blocks is switched off with one warning."""

    def __init__(
        self, sinks: Sequence[Sink], header: Mapping[str, Any], folder: Path | None
    ) -> None:
        self._folder = folder
        self._active: list[Sink] = []
        for sink in sinks:
            call = start_call(sink.open, header, folder)
            if self._wait(sink, "open", call, OPEN_SECONDS):
                self._active.append(sink)

    def write(self, record: Mapping[str, Any]) -> None:
        """Hand one record to every sink that still works."""
        if not self._active:
            return
        metrics = dict(record)
        step = metrics.pop("step")
        metrics.pop("replay", None)
        for sink in tuple(self._active):
            began = time.monotonic()
            try:
                sink.write(step, metrics)
            # Other people's code, which talks to servers: training continues, whatever it raises.
            except (Exception, SystemExit) as error:  # noqa: BLE001
                self._switch_off(sink, f"failed to write: {describe_error_in_full(error)}")
                continue
            seconds = time.monotonic() - began
            if seconds > WRITE_SECONDS:
                self._switch_off(sink, f"blocked training for {seconds:.0f} s")

    def close(self) -> None:
        """Close all sinks at once, and wait for them 9 s together."""
        calls = [(sink, start_call(sink.close)) for sink in self._active]
        deadline = time.monotonic() + CLOSE_SECONDS
        for sink, call in calls:
            self._wait(sink, "close", call, deadline - time.monotonic())
        self._active.clear()

    def _wait(self, sink: Sink, action: str, call: Future[None], seconds: float) -> bool:
        try:
            call.result(max(0.0, seconds))
        except TimeoutError:
            self._switch_off(sink, f"did not {action} in time")
            return False
        # As in `write`.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            self._switch_off(sink, f"failed to {action}: {describe_error_in_full(error)}")
            return False
        return True

    def _switch_off(self, sink: Sink, problem: str) -> None:
        if sink in self._active:
            self._active.remove(sink)
        logger.warning(
            "sink %s %s; training goes on without it, %s",
            sink.name,
            problem,
            self._recovery_hint(sink),
        )

    def _recovery_hint(self, sink: Sink) -> str:
        if self._folder is None:
            return "and the run has no file to replay"
        if sink.name in find_sinks():
            return f"all records are sent later by: ezpz-obs replay {self._folder} --to={sink.name}"
        return f"all records are sent later by: ezpz_obs.replay({str(self._folder)!r}, sink)"


def replay(run: str | os.PathLike[str], sink: str | Sink) -> int:
    """Send a run's records to a sink: one that failed during training, or another.

    Of steps made twice the later ones are sent. "csv" and "tensorboard" write into the run's
    folder, and replace its files; the others begin a new run there.

    Args:
        run: The run's folder, or its file.
        sink: As for `History`.

    Returns:
        The number of records.

    Raises:
        HistoryError: There is no run, or no line of its file is a History's.
        SinkError: The sink is unknown, or not installed. Its own errors are raised as they are.
    """
    found = read_run(run)
    if not found.headers and not found.damaged:
        raise SinkError(f"{found.path} has no header; expected a file that a History wrote")
    header: dict[str, Any] = {"run": found.name}
    if found.headers:
        header |= found.headers[0]
    header["replayed"] = time.time()
    target = make_sink(sink)
    target.open(header, found.path.parent)
    count = 0
    for record in found.records():
        step = record.pop("step")
        record.pop("replay", None)
        target.write(step, record)
        count += 1
    target.close()
    return count
