"""The sink "mlflow": a run at ``MLFLOW_TRACKING_URI``, else in the folder ``RUN/mlruns``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ezpz_obs._errors import SinkError
from ezpz_obs._file import as_float

from . import SET_UP
from .libraries import check_installed, metrics_of, plain_config, project_of, run_key

_TAG = "ezpz_obs.run"
_MOST = 1000  # metrics a request, MLflow's own limit
_LONGEST_NAME, _LONGEST_VALUE = 250, 500
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")


def setup_mlflow(project_name: str | None = None, *, tracking_uri: str | None = None) -> None:
    """Have each `History` that this process makes from now on, and that names no sinks, use MLflow.

    It is used beside W&B's live run and the sinks of ``EZPZ_SINKS``.

    Args:
        project_name: The experiment; default: ``MLFLOW_EXPERIMENT_NAME``, else the script's name.
        tracking_uri: The server; default: ``MLFLOW_TRACKING_URI``, else the run's folder.

    Raises:
        SinkError: mlflow is not installed.
    """
    check_installed("mlflow")
    told = {"MLFLOW_EXPERIMENT_NAME": project_name, "MLFLOW_TRACKING_URI": tracking_uri}
    os.environ.update({name: value for name, value in told.items() if value is not None})
    SET_UP.add("mlflow")


class MlflowSink:
    # The experiment is ``MLFLOW_EXPERIMENT_NAME``, else the script's name.

    name = "mlflow"

    def __init__(self, *_: Any) -> None:
        # Server or file, one that does not answer is said so by MLflow after minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._param, self._make = Metric, Param, MlflowClient
        self._client: Any = None
        self._run = ""

    def open(self, header: Mapping[str, Any], folder: Path | None) -> None:
        where = os.environ.get("MLFLOW_TRACKING_URI")
        if not where:
            if folder is None:
                raise SinkError(
                    'sink "mlflow" of a run without a folder; expected History(outdir=...) or '
                    "MLFLOW_TRACKING_URI"
                )
            where = (folder / "mlruns").absolute().as_uri()
            # Plain files need no database; MLflow 3 wants to be told that they are meant.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = client = self._make(tracking_uri=where)
        experiment = project_of(header, "MLFLOW_EXPERIMENT_NAME")
        found = client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else client.create_experiment(experiment)
        key = run_key(header, folder)
        runs = client.search_runs([number], f"tags.`{_TAG}` = '{key}'", max_results=1)
        if runs:
            self._run = runs[0].info.run_id
            client.set_terminated(self._run, "RUNNING")
        else:
            run = client.create_run(number, tags={_TAG: key}, run_name=str(header.get("run", key)))
            self._run = run.info.run_id
            parameters = [
                self._param(_shown(name), str(value)[:_LONGEST_VALUE])
                for name, value in dict(_flat(plain_config(header))).items()
            ]
            for first in range(0, len(parameters), 100):  # MLflow's limit
                client.log_batch(self._run, params=parameters[first : first + 100])
        self.place = f"run {self._run} of {experiment} at {where}"

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        metrics = [
            self._metric(_shown(name), as_float(value), int(record["time"] * 1000), record["step"])
            for record in records
            for name, value in metrics_of(record)
        ]
        for first in range(0, len(metrics), _MOST):
            self._client.log_batch(self._run, metrics=metrics[first : first + _MOST])

    def close(self) -> None:
        if self._run:
            self._client.set_terminated(self._run)


@cache
def _shown(name: str) -> str:
    """Return a name that MLflow takes; two names never become one."""
    shown = _NOT_IN_NAMES.sub("_", name)
    parts = shown.split("/")
    if shown == name and len(shown) <= _LONGEST_NAME and not {"", ".", ".."} & set(parts):
        return name
    mark = blake2b(name.encode(errors="replace"), digest_size=3).hexdigest()
    clean = "/".join(part for part in parts if part not in ("", ".", ".."))
    return f"{clean[: _LONGEST_NAME - 7]}_{mark}"


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
