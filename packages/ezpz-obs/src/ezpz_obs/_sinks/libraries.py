"""The sinks that are a library's: what each needs, and where it is."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

from ezpz_obs._errors import SinkError

from .protocol import Sink

LIBRARY_SINKS: Final = {
    "mlflow": ("mlflow", "mlflow_run", "MlflowSink"),
    "tensorboard": ("tensorboard", "tensorboard_events", "TensorboardSink"),
    "trackio": ("trackio", "trackio_run", "TrackioSink"),
    "wandb": ("wandb", "wandb_run", "WandbSink"),
}
"""Name to the import that it needs (its extra has the sink's name), our module, and the class."""


def make_library_sink(name: str, warn: Callable[[str], None], folder: Path | None) -> Sink:
    """Return the sink itself, which talks to its library in this process; imported here."""
    _, module, kind = LIBRARY_SINKS[name]
    make = getattr(importlib.import_module(f"{__package__}.{module}"), kind)
    return cast("Sink", make(warn, folder))


def library_seconds() -> float:
    """Return the seconds that a library has to start, and to end: ``EZPZ_SINK_SECONDS``, else 10.

    Raises:
        SinkError: That is no number above 3.
    """
    text = os.environ.get("EZPZ_SINK_SECONDS", "10")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 3 < seconds <= 86_400:
        raise SinkError(f"EZPZ_SINK_SECONDS={text!r}; expected seconds above 3, to 86400")
    return seconds


def check_installed(name: str) -> None:
    """Raise where what a sink needs is not there.

    Raises:
        SinkError: It is not.
    """
    needed = LIBRARY_SINKS[name][0]
    if needed in sys.modules and sys.modules[needed] is not None:
        return
    try:
        spec = importlib.util.find_spec(needed)
    except ValueError:
        spec = None
    # Without an origin it is a mere folder of that name: W&B makes one, ./wandb.
    if spec is None or spec.origin is None:
        raise SinkError(
            f"the sink {name!r} needs {needed}, which is not installed here; expected: "
            f'pip install "ezpz-obs[{name}]"'
        )
