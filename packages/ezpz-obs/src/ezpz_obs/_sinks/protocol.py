"""What takes records besides the run's own file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Sink(Protocol):
    """A place that a run's records go to. All three are called by one thread, never training's.

    A sink may have two members more: ``open_seconds``, how long its `open` may take (10), and
    ``abandon()``, which is called from another thread when it has hung: it should make the call
    that hangs return.
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
