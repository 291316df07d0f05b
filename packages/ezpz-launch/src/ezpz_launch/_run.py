"""Start the launcher, watch its ranks, pass signals on, and find out how it ended."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from ._errors import LaunchError
from ._status import Status, make_status_file

SETTLE = 1.0
"""Seconds that the other ranks have to end by themselves after the first failure.

Ranks that stop together (all check-pointed and exit 75, say) end at nearly the same time.
"""

GRACE = 10.0
"""Seconds from SIGTERM to SIGKILL."""

_POLL = 0.1
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)


def run(
    argv: Sequence[str],
    *,
    nproc: int,
    environment: Mapping[str, str],
    status_directory: str,
    grace: float = GRACE,
) -> int:
    """Run one launch to its end and return its exit status.

    The launcher gets a session of its own and no standard input (mpiexec would swallow
    ours); its output is ours, unbuffered and unchanged. SIGINT, SIGTERM, SIGHUP, SIGQUIT,
    SIGUSR1 and SIGUSR2 are passed on. When a rank fails, the others are given a moment to end,
    then SIGTERM, then after the grace SIGKILL.

    Args:
        argv: The launcher's command line.
        nproc: How many ranks it starts.
        environment: The environment of the launcher and its ranks, complete.
        status_directory: Where the ranks' reports can be written meanwhile.
        grace: Seconds from SIGTERM to SIGKILL.

    Returns:
        0 if every rank ended so; the exit status of the first rank that failed
        (128 + signal where one killed it); 130 after Ctrl-C; 128 + signal where we were
        told to end; else the launcher's own.

    Raises:
        LaunchError: The launcher cannot be started, or the directory not be written.
    """
    try:
        status = Status(make_status_file(status_directory))
    except OSError as error:
        raise LaunchError(
            f"cannot make a file in {status_directory} ({error.strerror}); expected a directory "
            "to write the ranks' reports to; set TMPDIR to one"
        ) from error
    try:
        with _signals() as arrived:
            process = _start(argv, {**environment, "EZPZ_STATUS_FILE": status.path})
            told, announced = _watch(process, status, arrived, grace)
        status.update()
        _kill_ranks(status)
    finally:
        os.unlink(status.path)
    return _verdict(process.returncode, status, nproc, told, announced)


def _start(argv: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            argv, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        raise LaunchError(f"{argv[0]} cannot be started: {error.strerror}") from error


@contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """Collect the signals to pass on; the sleeping loop is woken by each, and by SIGCHLD."""
    arrived: list[signal.Signals] = []

    def note(number: int, _frame: FrameType | None) -> None:
        arrived.append(signal.Signals(number))

    # What we were started to ignore (nohup) stays ignored, by the ranks too.
    heard = [s for s in _PASSED_ON if signal.getsignal(s) is not signal.SIG_IGN]
    previous = {s: signal.signal(s, note) for s in heard}
    previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        yield arrived
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _watch(
    process: subprocess.Popen[bytes],
    status: Status,
    arrived: list[signal.Signals],
    grace: float,
) -> tuple[signal.Signals | None, bool]:
    """Wait for the launcher's end.

    Returns:
        The signal that told us to end, if one did; and whether the first failure has been
        said already, because the others had to be ended.
    """
    told: signal.Signals | None = None
    announced = False
    terminate_at = kill_at = float("inf")
    wake_read, wake_write = _pipe()
    previous_fd = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    try:
        while process.poll() is None:
            if select.select([wake_read], [], [], _POLL)[0]:
                os.read(wake_read, 4096)
            status.update()
            now = time.monotonic()
            while arrived:
                number = arrived.pop(0)
                if number in _ENDING:
                    # A second Ctrl-C means: now.
                    kill_at = now if told else now + grace
                    told = told or number
                # Hydra would not pass these on, but die of them and leave its ranks.
                process.send_signal(
                    signal.SIGTERM if number in (signal.SIGHUP, signal.SIGQUIT) else number
                )
            if status.first_failure and told is None and kill_at == float("inf"):
                terminate_at, kill_at = now + SETTLE, now + SETTLE + grace
            if now >= terminate_at:
                terminate_at, announced = float("inf"), True
                _say(f"{_failure(status)}; ending the other ranks")
                process.terminate()
            if now >= kill_at:
                _kill_ranks(status)
                process.kill()
    finally:
        signal.set_wakeup_fd(previous_fd)
        os.close(wake_read)
        os.close(wake_write)
    return told, announced


def _pipe() -> tuple[int, int]:
    """Return a non-blocking pipe, closed in children (os.pipe2 is not on macOS)."""
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    return ends


def _kill_ranks(status: Status) -> None:
    """SIGKILL the process groups of ranks that started and have not ended."""
    for pid in status.pids.values():
        try:
            # Only a group that the launcher made for this rank: never our own.
            if os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _verdict(
    returncode: int, status: Status, nproc: int, told: signal.Signals | None, announced: bool
) -> int:
    if told is not None:
        _say(f"ended by {told.name}")
        return 128 + told
    if status.first_failure is not None:
        if not announced:
            _say(_failure(status))
        return status.first_failure[1]
    own = 128 - returncode if returncode < 0 else returncode
    if own == 0:
        return 0
    if len(status.ended) == nproc:
        # Hydra can return 141 under load after ranks that end at once (seen 4 times in 726).
        _say(f"every rank ended with 0; the launcher itself with {own}, which is not passed on")
        return 0
    lost = ", ".join(str(rank) for rank in sorted(status.pids)) or "none had started"
    _say(f"the launcher ended with {own}; ranks that did not report their end: {lost}")
    return own


def _failure(status: Status) -> str:
    assert status.first_failure is not None
    rank, code = status.first_failure
    host = os.uname().nodename
    if code > 128 and code - 128 in {s.value for s in signal.Signals}:
        how = f"was killed by {signal.Signals(code - 128).name} (exit status {code})"
    else:
        how = f"exited with status {code}"
    return f"rank {rank} on {host} {how}, first of all ranks"


def _say(message: str) -> None:
    print(f"ezpz-launch: {message}", file=sys.stderr, flush=True)
