"""A run's records, sent to a sink afterwards."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from ezpz_obs._errors import SinkError
from ezpz_obs._run import read_run

from .names import make_sink
from .protocol import Sink

_BATCH = 1000
_CLOSE_SECONDS = 3600.0  # nothing is trained meanwhile: an upload may take its time


def replay(run: str | os.PathLike[str], sink: str | Sink) -> int:
    """Send a run's records to a sink: one that failed during training, or another.

    Of steps made twice the later ones are sent. "csv" and "tensorboard" write into the run's
    folder, and replace what is there; the others begin a new run there.

    Args:
        run: The run's folder, or its file.
        sink: As for `History`.

    Returns:
        The number of records.

    Raises:
        HistoryError: There is no run, or its file is damaged.
        SinkError: The sink is unknown, not installed, or failed.
    """
    found = read_run(run)
    if not found.headers:
        raise SinkError(f"{found.path} has no header; expected a file that a History wrote")
    header = {**found.headers[0], "replayed": time.time()}
    target = make_sink(sink, own=True, close_seconds=_CLOSE_SECONDS)
    sent = 0
    try:
        target.open(header, found.path.parent)
        records: Iterator[Mapping[str, Any]] = found.records()
        while batch := list(islice(records, _BATCH)):
            target.write(batch)
            sent += len(batch)
        target.close()
    except BaseException:
        # ctrl-C too: what was started is not left running.
        abandon = getattr(target, "abandon", None)
        if abandon is not None:
            abandon()
        raise
    return sent
