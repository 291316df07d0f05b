"""The sink "trackio": a run in trackio's own folder, or at its server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .common import config_from_header, find_project, run_key, to_library_numbers


class TrackioSink:
    """The project is ``TRACKIO_PROJECT``, else the script's name."""

    name = "trackio"

    def __init__(self) -> None:
        import trackio

        self._init = trackio.init
        self._run: Any = None

    def open(self, header: Mapping[str, Any], folder: Path | None) -> None:
        self._run = self._init(
            find_project(header, "TRACKIO_PROJECT"),
            name=f"{header.get('run', 'run')}-{run_key(header, folder)[:6]}",
            config=config_from_header(header),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(to_library_numbers(metrics), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
