"""What the sinks of libraries have in common."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from ezpz_obs._errors import HistoryError, SinkError
from ezpz_obs._records import FILE_NAME, HEADER, as_float, decode

LIBRARIES: Final = ("mlflow", "tensorboard", "trackio", "wandb")
"""Sinks whose library, extra and name are the same word."""

SET_UP: Final[set[str]] = set()
"""Sinks that a set-up function asked for, beside those of the environment."""


def check_installed(name: str) -> None:
    """Raise a `SinkError` with the command to install a library that is missing."""
    if name not in LIBRARIES or sys.modules.get(name) is not None:
        return
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:
        spec = None
    # Without an origin it is a mere folder of that name: W&B makes one, ./wandb.
    if spec is None or spec.origin is None:
        raise SinkError(
            f"the sink {name!r} needs {name}, which is not installed here; expected: "
            f'pip install "ezpz-obs[{name}]"'
        )


def start_call(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Call a function in a daemon thread, which the end of the interpreter does not wait for."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            result = function(*arguments)
        except BaseException as error:  # noqa: BLE001  # raised again by `result()`
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="ezpz_obs sink", daemon=True).start()
    return future


def to_library_numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as libraries draw them: no time, booleans and integers beyond 64 bits."""
    numbers: dict[str, Any] = {}
    for name, value in metrics.items():
        if name == "time":
            continue
        if isinstance(value, float):
            numbers[name] = value
        elif abs(value) < 1 << 63:
            numbers[name] = int(value)
        else:
            numbers[name] = as_float(value)
    return numbers


def config_from_header(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a run, and facts of where it ran."""
    facts = {}
    for name in ("world_size", "host", "hosts", "machine", "job", "git", "versions", "argv"):
        if header.get(name) is not None:
            facts[name] = header[name]
    return {**(header.get("config") or {}), "ezpz_obs": facts}


def run_key(header: Mapping[str, Any], folder: Path | None) -> str:
    """Return 12 hexadecimal digits that are the same at each attempt of a run."""
    # Of the first header in its folder: so a restarted run is known again.
    first = header
    if folder is not None:
        try:
            with open(folder / FILE_NAME, "rb") as file:
                line = file.readline()
            if line.startswith(HEADER):
                first = decode(line)
        except (OSError, HistoryError):
            pass  # none that can be read: it is this attempt's
    identity = (first.get("run"), first.get("time"), first.get("host"), header.get("replayed"))
    return blake2b(repr(identity).encode(), digest_size=6).hexdigest()


def find_project(header: Mapping[str, Any], variable: str) -> str:
    """Return what runs are grouped under: as requested, by the variable, else the script's name."""
    requested = header.get("project") or os.environ.get(variable)
    if requested:
        return str(requested)
    argv = header.get("argv") or [""]
    stem = Path(str(argv[0])).stem
    if not stem or stem.startswith("-"):
        return "ezpz"
    return stem
