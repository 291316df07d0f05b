"""The sink "wandb": a W&B run of the sink's own, or the one that `setup_wandb` started."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ezpz_obs._errors import SinkError

from .homes import give_home
from .values import as_common, metrics_of, plain_config, project_of, run_key
from .wandb_start import HOMES, start_run

_AXIS = "step"


class WandbSink:
    """Logs to a W&B run in ``RUN/wandb``, resumed after a restart.

    W&B counts its own steps, and drops what goes back; so the run's step is a metric of that
    name, and the axis of all others.
    """

    name = "wandb"

    def __init__(self, warn: Callable[[str], None], folder: Path | None) -> None:
        give_home(folder, HOMES)
        import wandb

        self._wandb = wandb
        self._warn = warn
        self._run: Any = None
        self.place = ""

    def open(self, header: Mapping[str, Any], folder: Path | None) -> None:
        """Start the run, or go on with it.

        Raises:
            SinkError: It did not start.
        """
        key = run_key(header, folder)
        name = str(header.get("run", key))
        options: dict[str, Any] = {}
        if folder is not None and not os.environ.get("WANDB_DIR"):
            options["dir"] = str(folder)
        if "replayed" not in header:
            key = os.environ.get("WANDB_RUN_ID") or key
        settings: dict[str, Any] = {"console": "off", "silent": True}
        if hasattr(self._wandb.Settings, "model_fields"):
            # The process whose memory and processors are worth a curve is training's.
            settings["x_stats_pid"] = os.getppid()
        self._run = start_run(
            self._warn, settings,
            project=os.environ.get("WANDB_PROJECT") or project_of(header),
            id=key, name=os.environ.get("WANDB_NAME") or name, resume="allow",
            config=plain_config(header), **options,
        )  # fmt: skip
        if self._run is None:
            self.place = "disabled by WANDB_DISABLED or WANDB_MODE"
            return
        _define_axis(self._run)
        self.place = self._run.url or f"offline, in {Path(self._run.dir).parent}"

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Log records."""
        if self._run is not None:
            _log(self._run, records)

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()


class LiveWandbSink:
    """Logs to the run that this process has, and leaves it open: it is the user's."""

    name = "wandb"

    def __init__(self) -> None:
        self._run: Any = None

    def open(self, header: Mapping[str, Any], folder: Path | None) -> None:  # noqa: ARG002
        """Take the run.

        Raises:
            SinkError: It was finished meanwhile.
        """
        import wandb

        self._run = wandb.run
        if self._run is None:
            raise SinkError("the W&B run was finished; expected it to last as long as the History")
        self._run.config.update(plain_config(header), allow_val_change=True)
        _define_axis(self._run)

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Log records."""
        _log(self._run, records)

    def close(self) -> None:
        """Do nothing: what started the run ends it."""


def _define_axis(run: Any) -> None:
    run.define_metric(_AXIS, hidden=True)
    run.define_metric("*", step_metric=_AXIS)


def _log(run: Any, records: Sequence[Mapping[str, Any]]) -> None:
    for record in records:
        line = {name: as_common(value) for name, value in metrics_of(record)}
        run.log({**line, _AXIS: record["step"], "_timestamp": record["time"]})
