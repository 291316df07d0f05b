"""The sink "wandb": a W&B run that starts within seconds or not at all."""

from __future__ import annotations

import configparser
import logging
import netrc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from ezpz_obs._context import find_place, to_text
from ezpz_obs._errors import SinkError
from ezpz_topo import redact

from . import libraries

if TYPE_CHECKING:
    from wandb import Run

Mode = Literal["online", "offline", "disabled", "shared"]
_NO = frozenset({"", "0", "false", "no", "off", "f", "n"})


def find_mode(env: Mapping[str, str]) -> Mode:
    """Return how W&B is to run: without credentials offline, never asking for them."""
    # ``WANDB_DISABLED`` and ``WANDB_MODE`` are heeded as W&B does.
    said = env.get("WANDB_MODE", "").strip().lower()
    if env.get("WANDB_DISABLED", "").strip().lower() not in _NO or said == "disabled":
        return "disabled"
    if said in ("offline", "dryrun") or not find_credentials(env):
        return "offline"
    return "shared" if said == "shared" else "online"


def find_credentials(env: Mapping[str, str]) -> str | None:
    """Return where credentials for W&B's server are: a variable's name or a file; None: nowhere."""
    for variable in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        if env.get(variable, "").strip():
            return variable
    found = _find_in_netrc(env)
    return str(found[0]) if found else None


def find_server(env: Mapping[str, str]) -> str:
    """Return the address of W&B's server: ``WANDB_BASE_URL``, or what ``wandb login`` kept."""
    if url := env.get("WANDB_BASE_URL", "").strip():
        return url.rstrip("/")
    config = env.get("WANDB_CONFIG_DIR") or os.path.join(_home(env), ".config", "wandb")
    for path in (Path("wandb", "settings"), Path(config, "settings")):
        parser = configparser.ConfigParser()
        try:
            parser.read(path)
            url = parser.get("default", "base_url", fallback="")
        except (OSError, UnicodeDecodeError, configparser.Error):
            continue  # W&B says so itself when it starts
        if url:
            return url.rstrip("/")
    return "https://api.wandb.ai"


def _home(env: Mapping[str, str]) -> str:
    return env.get("HOME") or os.path.expanduser("~")


def _find_in_netrc(env: Mapping[str, str]) -> tuple[Path, str] | None:
    """Return the file with a key for W&B's server, and the key."""
    named = env.get("NETRC")
    paths = [Path(named)] if named else [Path(_home(env), name) for name in (".netrc", "_netrc")]
    path = next(filter(Path.is_file, paths), None)
    try:
        known = netrc.netrc(str(path)) if path else None
        found = known and known.authenticators(urlsplit(find_server(env)).netloc)
    except (OSError, UnicodeDecodeError, netrc.NetrcParseError):
        return None
    return (path, found[2]) if path and found and found[2] else None


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

    Without credentials (``WANDB_API_KEY``, ``~/.netrc``) it is offline, and asks for
    none. A server that does not answer makes it offline too, with one warning. The
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
    if find_place().rank != 0 or find_mode(os.environ) == "disabled":
        return None
    libraries.check_installed("wandb")
    if outdir is not None:
        Path(outdir).mkdir(parents=True, exist_ok=True)
        options.setdefault("dir", str(outdir))
    if config is not None:
        options["config"] = redact(dict(config))
    project = libraries.project_of({"argv": sys.argv, "project": project_name}, "WANDB_PROJECT")
    libraries.give_home(None if outdir is None else Path(outdir), HOMES)
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
        libraries.check_installed("wandb")
    except SinkError:
        return False
    return find_mode(os.environ) in ("online", "shared") and bool(find_credentials(os.environ))


def start_run(warn: Callable[[str], None], settings: Mapping[str, Any], **options: Any) -> Any:
    """Start a run, online if the server answers, else offline; None where disabled or hung."""
    seconds = libraries.library_seconds()
    until = time.monotonic() + seconds
    mode = options.pop("mode", None) or find_mode(os.environ)
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
            server = find_server(os.environ)
            warn(f"{server} does not answer within {seconds:.0f} s; going on without W&B")
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
    """Call in a thread, and return whether it ended in time, and what came of it."""
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
    """Ask the server something small; return what is wrong, None where it may well work."""
    # W&B itself does so too, but waits for as long as the server likes.
    import requests

    server, key = find_server(os.environ), os.environ.get("WANDB_API_KEY", "").strip()
    if not key and (found := _find_in_netrc(os.environ)):
        key = found[1]
    if not key:
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
        return (
            f"{server} refuses the API key of {find_credentials(os.environ)} ({answer.status_code})"
        )
    return None


def _first_line(error: object) -> str:
    return to_text(error).partition("\n")[0] or type(error).__name__


def _end_with_main() -> None:
    """End W&B's service some seconds after the main thread, if it still waits for its server."""
    # Hooks of the interpreter's end wait for that service without a limit. A hook of ours could
    # come before or after; a daemon thread sees the main thread end in any case.
    threading.main_thread().join()
    time.sleep(_EXIT_SECONDS)
    for pid, parent, name in _processes():
        if parent == os.getpid() and "wandb-core" in name:
            os.kill(pid, signal.SIGKILL)


def _processes() -> Iterator[tuple[int, int, str]]:
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


_AXIS = "step"


class WandbSink:
    # W&B counts its own steps, and drops what goes back; so the run's step is a metric of that
    # name, and the axis of all others.

    name = "wandb"

    def __init__(self, warn: Callable[[str], None], folder: Path | None) -> None:
        libraries.give_home(folder, HOMES)
        import wandb

        self._wandb = wandb
        self._warn = warn
        self._run: Any = None

    def open(self, header: Mapping[str, Any], folder: Path | None) -> None:
        key = libraries.run_key(header, folder)
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
            project=libraries.project_of(header, "WANDB_PROJECT"),
            id=key, name=os.environ.get("WANDB_NAME") or name, resume="allow",
            config=libraries.plain_config(header), **options,
        )  # fmt: skip
        if self._run is None:
            self.place = "disabled by WANDB_DISABLED or WANDB_MODE"
            return
        self._define_axis()
        self.place = self._run.url or f"offline, in {Path(self._run.dir).parent}"

    def _define_axis(self) -> None:
        self._run.define_metric(_AXIS, hidden=True)
        self._run.define_metric("*", step_metric=_AXIS)

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        for record in records if self._run is not None else ():
            at = {_AXIS: record["step"], "_timestamp": record["time"]}
            self._run.log(libraries.common_metrics(record) | at)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class LiveWandbSink(WandbSink):
    """Logs to the run that this process has, and leaves it open: it is the user's."""

    def __init__(self) -> None:
        self._run: Any = None
        self._warn = lambda text: logger.warning("sink wandb: %s", text)

    def open(self, header: Mapping[str, Any], folder: Path | None) -> None:  # noqa: ARG002
        import wandb

        self._run = wandb.run
        if self._run is None:
            raise SinkError("the W&B run was finished; expected it to last as long as the History")
        self._run.config.update(libraries.plain_config(header), allow_val_change=True)
        self._define_axis()

    def close(self) -> None:
        """Do nothing: what started the run ends it."""
