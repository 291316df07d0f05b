"""The sink "wandb": a W&B run that starts within seconds or not at all."""

from __future__ import annotations

import configparser
import copy
import logging
import netrc
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from ezpz_obs._context import find_rank_info
from ezpz_obs._errors import SinkError
from ezpz_obs._text import describe_error_in_full
from ezpz_topo import redact

from .common import (
    check_installed,
    config_from_header,
    find_project,
    run_key,
    to_library_numbers,
)

if TYPE_CHECKING:
    import wandb
    from wandb import Run

Mode = Literal["online", "offline", "disabled", "shared"]
_NO = frozenset({"", "0", "false", "no", "off", "f", "n"})


def find_mode(env: Mapping[str, str]) -> Mode:
    """Return how W&B is to run: without credentials offline, never asking for them."""
    requested = env.get("WANDB_MODE", "").strip().lower()
    is_disabled = env.get("WANDB_DISABLED", "").strip().lower() not in _NO
    if is_disabled or requested == "disabled":
        return "disabled"
    if requested in ("offline", "dryrun") or not find_credentials(env):
        return "offline"
    if requested == "shared":
        return "shared"
    return "online"


def find_credentials(env: Mapping[str, str]) -> str | None:
    """Return where credentials for W&B's server are: a variable's name or a file; None: nowhere."""
    for variable in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        if env.get(variable, "").strip():
            return variable
    return _find_netrc_entry(env)


def find_server(env: Mapping[str, str]) -> str:
    """Return the address of W&B's server: ``WANDB_BASE_URL``, or the one of ``wandb login``."""
    url = env.get("WANDB_BASE_URL", "").strip()
    if url:
        return url.rstrip("/")
    config = env.get("WANDB_CONFIG_DIR") or os.path.join(_find_home(env), ".config", "wandb")
    for path in (Path("wandb", "settings"), Path(config, "settings")):
        parser = configparser.ConfigParser()
        try:
            parser.read(path)
            url = parser.get("default", "base_url", fallback="")
        except (OSError, UnicodeDecodeError, configparser.Error):
            continue  # W&B reports it itself when it starts
        if url:
            return url.rstrip("/")
    return "https://api.wandb.ai"


def _find_home(env: Mapping[str, str]) -> str:
    return env.get("HOME") or os.path.expanduser("~")


def _find_netrc_entry(env: Mapping[str, str]) -> str | None:
    """Return the netrc file with a key for W&B's server, if there is one."""
    if env.get("NETRC"):
        paths = [Path(env["NETRC"])]
    else:
        paths = [Path(_find_home(env), name) for name in (".netrc", "_netrc")]
    path = next(filter(Path.is_file, paths), None)
    if path is None:
        return None
    try:
        found = netrc.netrc(str(path)).authenticators(urlsplit(find_server(env)).netloc)
    except (OSError, UnicodeDecodeError, netrc.NetrcParseError):
        return None
    if not found or not found[2]:
        return None
    return str(path)


logger = logging.getLogger("ezpz_obs")
INIT_SECONDS = 7.0  # that W&B may wait for its server at the start
_FINISH_SECONDS = 7.0  # that W&B may take to upload at the end


def setup_wandb(
    project_name: str | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    outdir: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Run | None:
    """Start a W&B run on rank 0, within 10 s; other ranks get None.

    Without credentials (``WANDB_API_KEY``, ``~/.netrc``) it is offline, without
    a prompt. A server that does not answer makes it offline too, with one warning. The
    interpreter's end waits at most 10 s for the server (with W&B 0.31 or later).
    ``History(sinks=["wandb"])`` logs to this run.

    Args:
        project_name: The project; default: ``WANDB_PROJECT``, else the script's name.
        config: The run's configuration.
        outdir: Where W&B keeps its folder ``wandb``; default: as W&B does (``WANDB_DIR``, ``.``).
        options: More for ``wandb.init``.

    Returns:
        The run; None on other ranks, where ``WANDB_DISABLED`` or ``WANDB_MODE=disabled`` is set,
        and where it did not start (one warning).

    Raises:
        SinkError: wandb is not installed.
        ezpz_topo.TopoError: The rank cannot be known.
    """
    if find_rank_info().rank != 0 or find_mode(os.environ) == "disabled":
        return None
    check_installed("wandb")
    if outdir is not None:
        Path(outdir).mkdir(parents=True, exist_ok=True)
        options.setdefault("dir", str(outdir))
    if config is not None:
        options["config"] = redact(dict(config))
    project = find_project({"argv": sys.argv, "project": project_name}, "WANDB_PROJECT")
    run: Run | None = start_run(project=project, **options)
    return run


def verify_wandb() -> bool:
    """Return whether `setup_wandb` would go online: wanted, installed, and credentials found.

    The server is not contacted, and the user not prompted.
    """
    try:
        check_installed("wandb")
    except SinkError:
        return False
    return find_mode(os.environ) in ("online", "shared") and bool(find_credentials(os.environ))


def start_run(**options: Any) -> Any:
    """Start a run, online if the server answers, else offline; None if disabled or not started."""
    mode: Mode = options.pop("mode", None) or find_mode(os.environ)
    if mode == "disabled":
        return None
    # Reports of its own errors would wait for another server, at the end.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    if mode != "offline":
        try:
            return _init(mode, options)
        except wandb.errors.Error as error:
            problem = describe_error_in_full(error)
        # Of a key that the server refuses W&B's error has no word.
        logger.warning(
            "W&B: %s (credentials from %s); offline: send it later by `wandb sync`",
            problem,
            find_credentials(os.environ) or "nowhere",
        )
        if wandb.run is None:  # else it would end the user's
            wandb.teardown()  # the service has the run's id in use
    try:
        return _init("offline", options)
    except wandb.errors.Error as error:
        logger.warning("W&B: %s; going on without W&B", describe_error_in_full(error))
        return None


def _init(mode: Mode, options: Mapping[str, Any]) -> Any:
    import wandb

    settings = options.get("settings")
    if settings is None:
        settings = {"console": "off", "silent": True}
    if isinstance(settings, Mapping):
        settings = wandb.Settings(**settings)
    return wandb.init(mode=mode, **{**options, "settings": _limit_waiting(settings)})


def _limit_waiting(settings: wandb.Settings) -> wandb.Settings:
    """Return a copy of settings that waits for a server for seconds, unless they say how long."""
    limited = copy.copy(settings)
    given = getattr(limited, "model_fields_set", ())  # before W&B 0.19 nothing tells
    limits = {"init_timeout": INIT_SECONDS, "finish_timeout": _FINISH_SECONDS}
    for name, seconds in limits.items():
        # Older libraries have no finish_timeout, and wait at the end without a limit.
        if hasattr(limited, name) and name not in given:
            setattr(limited, name, seconds)
    return limited


_AXIS = "step"


class WandbSink:
    """Logs to this process's live run, else to a new one."""

    # W&B counts its own steps, and drops earlier ones; so the run's step is a metric of that
    # name, and the axis of all others.

    name = "wandb"

    def __init__(self) -> None:
        self._run: Any = None
        self._is_live = False  # the user's, and ended by the user

    def open(self, header: Mapping[str, Any], folder: Path | None) -> None:
        import wandb

        is_replay = "replayed" in header
        self._is_live = wandb.run is not None and not is_replay
        if self._is_live:
            self._run = wandb.run
            self._run.config.update(config_from_header(header), allow_val_change=True)
        else:
            self._run = start_run(**self._options(header, folder, is_replay=is_replay))
        if self._run is not None:
            self._run.define_metric(_AXIS, hidden=True)
            self._run.define_metric("*", step_metric=_AXIS)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._run is None:
            return
        numbers = to_library_numbers(metrics)
        numbers[_AXIS] = step
        numbers["_timestamp"] = metrics["time"]
        self._run.log(numbers)

    def close(self) -> None:
        if self._run is not None and not self._is_live:
            self._run.finish()

    def _options(
        self, header: Mapping[str, Any], folder: Path | None, *, is_replay: bool
    ) -> dict[str, Any]:
        key = run_key(header, folder)
        options: dict[str, Any] = {
            "project": find_project(header, "WANDB_PROJECT"),
            "id": key,
            "name": os.environ.get("WANDB_NAME") or str(header.get("run", key)),
            "resume": "allow",
            "config": config_from_header(header),
        }
        if is_replay:
            options["reinit"] = "create_new"
        elif os.environ.get("WANDB_RUN_ID"):
            options["id"] = os.environ["WANDB_RUN_ID"]
        if folder is not None and not os.environ.get("WANDB_DIR"):
            options["dir"] = str(folder)
        return options
