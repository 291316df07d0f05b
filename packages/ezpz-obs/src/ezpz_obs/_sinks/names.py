"""The sinks by name, and what each needs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Final

from ezpz_obs._errors import SinkError

from .csv_file import CsvSink
from .helper import Helper
from .libraries import LIBRARY_SINKS, check_installed
from .protocol import Sink

NAMES: Final = ("csv", *LIBRARY_SINKS)


def make_sinks(sinks: Iterable[str | Sink]) -> list[Sink]:
    """Return the sinks that are named, and those given as they are.

    Raises:
        SinkError: A name is unknown, or what it needs is not installed.
    """
    if isinstance(sinks, str):
        raise SinkError(f"sinks={sinks!r}; expected a list: sinks=[{sinks!r}]")
    return [make_sink(sink) for sink in sinks if sink != "jsonl"]  # which History is itself


def make_sink(sink: str | Sink, *, own: bool = False, close_seconds: float | None = None) -> Sink:
    """Return one sink; those of libraries in a process of their own.

    Args:
        sink: A name, or an object, which is returned.
        own: Not the W&B run that this process has already.
        close_seconds: How long closing may take; default: as starting.

    Raises:
        SinkError: As `make_sinks`.
    """
    if not isinstance(sink, str):
        if not isinstance(sink, Sink):
            raise SinkError(
                f"{sink!r:.200} as a sink; expected one of {', '.join(NAMES)}, or an object with "
                "name, open, write and close"
            )
        return sink
    if sink == "csv":
        return CsvSink()
    if sink not in LIBRARY_SINKS:
        raise SinkError(f"a sink {sink!r}; expected one of {', '.join(NAMES)}")
    check_installed(sink)
    if sink == "wandb" and not own and getattr(sys.modules.get("wandb"), "run", None) is not None:
        from .wandb_run import LiveWandbSink

        return LiveWandbSink()
    return Helper(sink, close_seconds=close_seconds)
