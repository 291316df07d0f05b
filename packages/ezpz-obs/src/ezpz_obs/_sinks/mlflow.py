"""The sink "mlflow": a run at ``MLFLOW_TRACKING_URI``, else in the folder ``RUN/mlruns``."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ezpz_obs._errors import SinkError
from ezpz_obs._records import as_float
from ezpz_obs._text import iterate_leaves

from .common import SET_UP, check_installed, config_from_header, find_project, run_key

_TAG = "ezpz_obs.run"
_BATCH = 500  # metrics a request; MLflow takes 1,000
_MOST_PARAMETERS = 100  # a request: MLflow's limit
_MOST_PENDING = 16  # requests that its own threads may be behind
_LONGEST_NAME = 250
_LONGEST_VALUE = 500
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
    if project_name is not None:
        os.environ["MLFLOW_EXPERIMENT_NAME"] = project_name
    if tracking_uri is not None:
        os.environ["MLFLOW_TRACKING_URI"] = tracking_uri
    SET_UP.add("mlflow")


class MlflowSink:
    """The experiment is ``MLFLOW_EXPERIMENT_NAME``, else the script's name."""

    name = "mlflow"

    def __init__(self) -> None:
        # MLflow's own time-outs take minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._make_metric = Metric
        self._make_parameter = Param
        self._make_client = MlflowClient
        self._client: Any = None
        self._run = ""
        self._metrics: list[Any] = []
        self._pending: deque[Any] = deque()

    def open(self, header: Mapping[str, Any], folder: Path | None) -> None:
        self._client = self._make_client(tracking_uri=_find_server(folder))
        experiment = find_project(header, "MLFLOW_EXPERIMENT_NAME")
        found = self._client.get_experiment_by_name(experiment)
        if found is None:
            number = self._client.create_experiment(experiment)
        else:
            number = found.experiment_id
        key = run_key(header, folder)
        runs = self._client.search_runs([number], f"tags.`{_TAG}` = '{key}'", max_results=1)
        if runs:
            self._run = runs[0].info.run_id
            self._client.set_terminated(self._run, "RUNNING")
            return
        name = str(header.get("run", key))
        run = self._client.create_run(number, tags={_TAG: key}, run_name=name)
        self._run = run.info.run_id
        parameters = [
            self._make_parameter(to_mlflow_name(name), str(value)[:_LONGEST_VALUE])
            for name, value in iterate_leaves(config_from_header(header))
        ]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self._run, params=parameters[first : first + _MOST_PARAMETERS])

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        milliseconds = int(metrics["time"] * 1000)
        for name, value in metrics.items():
            if name != "time":
                self._metrics.append(
                    self._make_metric(to_mlflow_name(name), as_float(value), milliseconds, step)
                )
        while len(self._metrics) >= _BATCH:
            self._send()

    def close(self) -> None:
        if not self._run:
            return
        while self._metrics:
            self._send()
        while self._pending:
            self._pending.popleft().wait()
        self._client.set_terminated(self._run)

    def _send(self) -> None:
        batch = self._metrics[:_BATCH]
        del self._metrics[:_BATCH]
        self._pending.append(self._client.log_batch(self._run, metrics=batch, synchronous=False))
        if len(self._pending) > _MOST_PENDING:
            self._pending.popleft().wait()  # raises what went wrong


def _find_server(folder: Path | None) -> str:
    server = os.environ.get("MLFLOW_TRACKING_URI")
    if server:
        return server
    if folder is None:
        raise SinkError(
            'sink "mlflow" of a run without a folder; expected History(outdir=...) or '
            "MLFLOW_TRACKING_URI"
        )
    # Plain files need no database; MLflow 3 requires this to allow them.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    return (folder / "mlruns").absolute().as_uri()


@cache
def to_mlflow_name(name: str) -> str:
    """Return a name that MLflow takes; two names never become one."""
    allowed = _NOT_IN_NAMES.sub("_", name)
    parts = allowed.split("/")
    if allowed == name and len(name) <= _LONGEST_NAME and not {"", ".", ".."} & set(parts):
        return name
    digest = blake2b(name.encode(errors="replace"), digest_size=3).hexdigest()
    clean = "/".join(part for part in parts if part not in ("", ".", ".."))
    return f"{clean[: _LONGEST_NAME - 7]}_{digest}"
