"""A W&B run that starts within seconds or not at all, and ends with the interpreter."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ezpz_obs._context import find_place
from ezpz_obs._errors import SinkError
from ezpz_topo import redact

from .credentials import find_credentials, find_key, find_mode, find_server
from .homes import give_home
from .libraries import check_installed, library_seconds
from .values import project_of

if TYPE_CHECKING:
    from wandb import Run

logger = logging.getLogger("ezpz_obs")

_ANSWER_SECONDS = 4.0
_OFFLINE_SECONDS = 2.0  # kept of what there is for starting offline,
_FREE_SECONDS = 1.0  # and for ending a start that failed
_EXIT_SECONDS = 9.0
HOMES = {"WANDB_CONFIG_DIR": "wandb/config", "WANDB_CACHE_DIR": "wandb/cache",
          "WANDB_DATA_DIR": "wandb/data", "WANDB_DIR": "."}  # fmt: skip


def setup_wandb(
    project_name: str | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    outdir: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Run | None:
    """Start a W&B run on rank 0, within 10 s (``EZPZ_SINK_SECONDS``); other ranks get None.

    Without credentials (``WANDB_API_KEY``, ``~/.netrc``) it is offline, and nobody is asked for
    any. A server that does not answer makes it offline too, with one warning. The
    interpreter's end waits at most 10 s for the server. ``History(sinks=["wandb"])`` logs to
    this run.

    Args:
        project_name: The project; default: ``WANDB_PROJECT``, else the script's name.
        config: What is worth knowing of the run.
        outdir: Where W&B keeps its folder ``wandb``; default: as W&B does (``WANDB_DIR``, ``.``).
        options: More for ``wandb.init``.

    Returns:
        The run; None on other ranks, where ``WANDB_DISABLED`` or ``WANDB_MODE=disabled`` is set,
        and where it did not start (one warning).

    Raises:
        SinkError: wandb is not installed, or ``EZPZ_SINK_SECONDS`` is no time.
        ezpz_topo.TopoError: The rank cannot be known.
    """
    if find_place().rank != 0:
        return None
    check_installed("wandb")
    if outdir is not None:
        Path(outdir).mkdir(parents=True, exist_ok=True)
        options.setdefault("dir", str(outdir))
    if config is not None:
        options["config"] = redact(dict(config))
    project = project_name or os.environ.get("WANDB_PROJECT") or project_of({"argv": sys.argv})
    give_home(None if outdir is None else Path(outdir), HOMES)
    threading.Thread(target=_end_with_main, name="ezpz_obs wandb", daemon=True).start()
    run: Run | None = start_run(
        lambda text: logger.warning("W&B: %s", text), {}, project=project, **options
    )
    return run


def verify_wandb() -> bool:
    """Say whether `setup_wandb` would go online: wanted, installed, and credentials found.

    Asks neither the server nor the user.
    """
    try:
        check_installed("wandb")
    except SinkError:
        return False
    return find_mode() in ("online", "shared") and find_credentials() is not None


def start_run(warn: Callable[[str], None], settings: Mapping[str, Any], **options: Any) -> Any:
    """Start a run: online if that is wanted and the server answers, else offline.

    Returns:
        The run, or None where W&B is disabled, or hangs (warned about).
    """
    seconds = library_seconds()
    until = time.monotonic() + seconds
    mode = options.pop("mode", None) or find_mode()
    if mode == "disabled":
        return None
    if mode != "offline" and (why := _why_not_online()) is not None:
        warn(f"{why}; offline: send it later by `wandb sync`")
        mode = "offline"
    if mode == "offline":
        # Else W&B's reports of its own health wait for its server, at the end.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    if mode != "offline":
        left = until - time.monotonic() - _OFFLINE_SECONDS - _FREE_SECONDS
        done, outcome = _within(left, lambda: _init(wandb, mode, left, settings, options))
        if not done:
            warn(f"{find_server()} does not answer within {seconds:.0f} s; going on without W&B")
            return None
        if not isinstance(outcome, wandb.errors.Error):
            return outcome
        warn(f"{_first_line(outcome)}; offline: send it later by `wandb sync`")
        if wandb.run is None:
            # The service, else, has the run's id in use: of the start that failed.
            _within(_FREE_SECONDS, wandb.teardown)
    left = max(_OFFLINE_SECONDS, until - time.monotonic())
    done, outcome = _within(left, lambda: _init(wandb, "offline", left, settings, options))
    if not done or isinstance(outcome, wandb.errors.Error):
        why = _first_line(outcome) if done else f"no start within {seconds:.0f} s"
        warn(f"{why}; going on without W&B")
        return None
    return outcome


def _init(
    wandb: Any, mode: str, seconds: float, settings: Mapping[str, Any], options: Mapping[str, Any]
) -> Any:
    own = wandb.Settings(init_timeout=max(1.0, seconds - 0.5), **settings)
    try:
        return wandb.init(mode=mode, **{"settings": own, **options})
    except wandb.errors.Error as error:
        return error


def _within(seconds: float, call: Callable[[], Any]) -> tuple[bool, Any]:
    """Call in a thread, and return whether it ended in time, and what came of it.

    Raises:
        Exception: What the call raised.
    """
    outcome: list[Any] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:  # noqa: BLE001  # raised again, in the thread that asked
            raised.append(error)

    thread = threading.Thread(target=run, name="ezpz_obs wandb.init", daemon=True)
    thread.start()
    thread.join(max(0.1, seconds))
    if raised:
        raise raised[0]
    return (True, outcome[0]) if outcome else (False, None)


def _why_not_online() -> str | None:
    """Ask the server something small; return what is wrong, None where it may well work.

    W&B itself does so too, but waits for as long as the server likes.
    """
    import requests

    server, key = find_server(), find_key()
    if key is None:
        return None  # an identity token: W&B knows how
    try:
        answer = requests.post(
            f"{server}/graphql", json={"query": "query Viewer { viewer { id } }"},
            auth=("api", key), timeout=_ANSWER_SECONDS,
        )  # fmt: skip
    except requests.exceptions.SSLError:
        return None  # W&B has certificates of its own
    except (requests.exceptions.RequestException, UnicodeError) as error:
        timed_out = isinstance(error, requests.exceptions.Timeout)
        why = f"within {_ANSWER_SECONDS:.0f} s" if timed_out else f"({type(error).__name__})"
        return f"{server} does not answer {why}"
    if answer.status_code in (401, 403):
        return f"{server} refuses the API key of {find_credentials()} ({answer.status_code})"
    return None


def _first_line(error: object) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _end_with_main() -> None:
    """End W&B's service some seconds after the main thread, if it still waits for its server.

    Hooks of the interpreter's end wait for that service without a limit. A hook of ours could
    come before or after; a daemon thread sees the main thread end in any case.
    """
    threading.main_thread().join()
    time.sleep(_EXIT_SECONDS)
    for pid in _find_services():
        os.kill(pid, signal.SIGKILL)


def _find_services() -> list[int]:
    """Return the processes named wandb-core that this one started."""
    return [
        pid for pid, parent, name in _processes() if parent == os.getpid() and "wandb-core" in name
    ]


def _processes() -> Iterator[tuple[int, int, str]]:
    """Return each process, its parent, and its name."""
    if os.path.isdir("/proc/self"):  # containers often have no ps
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            try:
                text = Path("/proc", pid, "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue  # it has ended
            name, _, rest = text.partition("(")[2].rpartition(")")
            yield int(pid), int(rest.split()[1]), name
        return
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,comm="], capture_output=True, text=True, check=False
    )
    for line in listed.stdout.splitlines():
        pid, parent, name = line.split(None, 2)
        yield int(pid), int(parent), name
