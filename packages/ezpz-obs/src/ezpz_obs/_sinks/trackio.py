"""The sink "trackio": a run in trackio's own folder, or where its variables say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .libraries import common_metrics, give_home, plain_config, project_of, run_key


class TrackioSink:
    # The project is ``TRACKIO_PROJECT``, else the script's name. Where the home cannot be written,
    # the folder is ``RUN/trackio``.

    name = "trackio"

    def __init__(self, _: Callable[[str], None], folder: Path | None) -> None:
        give_home(folder, {"TRACKIO_DIR": "trackio", "HF_HOME": "trackio/huggingface"})
        import trackio  # reads its folder when imported

        self._init = trackio.init
        self._run: Any = None

    def open(self, header: Mapping[str, Any], folder: Path | None) -> None:
        project = project_of(header, "TRACKIO_PROJECT")
        name = f"{header.get('run', 'run')}-{run_key(header, folder)[:6]}"
        self._run = self._init(
            project, name=name, config=plain_config(header), resume="allow", embed=False,
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        self.place = f"run {name} of project {project}"

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        for record in records:
            self._run.log(common_metrics(record), step=record["step"])

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
