"""Run a scheduler's command: no shell, no input, and a time limit for its children too."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ._errors import InvalidVariableError, NoSchedulerError, SchedulerError, shorten

MAX_BYTES = 64 << 20
"""More output than this is refused; exec_host and exec_vnode of 10,000 hosts are about 1 MB."""

TIME_LIMIT = "EZPZ_SCHEDULER_TIMEOUT"  # the variable that gives the seconds to wait for each answer
_DEFAULT_TIME_LIMIT = 10.0
_FIRST_PAUSE = 0.25
_MAX_SHOWN = 160  # characters of a command or a line in an error
_NEVER_TRANSIENT = (126, 127)

_NOT_SET_UP = ("Could not establish a configuration source", "cannot connect to server  (errno")
"""What squeue and qselect say where a client is installed, and knows no server (Slurm 22.05.8,
OpenPBS 23.06): none of its jobs is on this host."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How a scheduler's command ended, and what it printed (bytes that are not UTF-8 as U+FFFD).

    Attributes:
        status: Its exit status; minus the signal that killed it.
        stdout: All of its standard output.
        stderr: All of its standard error.
    """

    status: int
    stdout: str
    stderr: str


def ask(
    argv: Sequence[str], *, env: Mapping[str, str], time_limit: float | None = None,
    attempts: int = 2, good: Container[int] = (0,), place: str = "",
) -> Answer:  # fmt: skip
    """Run a scheduler's command to its end; where it hangs or fails, try again after a pause.

    Args:
        argv: The command and its words; it reads no input.
        env: Its environment, and the PATH on which it is looked for.
        time_limit: Seconds for each attempt; default ``EZPZ_SCHEDULER_TIMEOUT``, else 10.
        attempts: At most this many; 1 for what must not be done twice.
        good: Exit statuses that are answers; any other, after the last attempt, is an error.
        place: A folder that is looked into after PATH (`get_pbs_folder`).

    Raises:
        NoSchedulerError: It is installed, and knows no server.
        SchedulerError: It cannot be started, gave no answer in time (it is killed then, with
            what it started), or ended with a status that is no answer.
    """
    if time_limit is None:
        time_limit = get_time_limit(env)
    command = shorten(" ".join(argv), _MAX_SHOWN)
    path = find(argv[0], env, place) or argv[0]
    answer = None
    attempt = 0
    while attempt < attempts:
        if attempt:
            time.sleep(_FIRST_PAUSE * 2 ** (attempt - 1))
        attempt += 1
        answer = _run((path, *argv[1:]), env, time_limit, place)
        if answer and (answer.status in good or answer.status in _NEVER_TRANSIENT):
            break
    count = f"{attempt} attempts"
    if attempt == 1:
        count = "1 attempt"
    if answer is None:
        raise SchedulerError(
            f"{command} gave no answer in {time_limit:g} s ({count}); expected one; the scheduler "
            f"is down or busy: try again later, or wait longer with {TIME_LIMIT}=60"
        )
    if answer.status not in good:
        raise _status_error(command, answer, count)
    return answer


def _status_error(command: str, answer: Answer, count: str) -> SchedulerError:
    """Return the error of a command that ended with a status that is no answer."""
    last_line = "nothing"
    for line in (answer.stderr.strip() or answer.stdout.strip()).splitlines():
        last_line = shorten(line, _MAX_SHOWN)
    kind = SchedulerError
    for words in _NOT_SET_UP:
        if words in answer.stderr or words in answer.stdout:
            kind = NoSchedulerError
    return kind(
        f"{command} ended with {describe_end(answer.status)} ({count}) and said {last_line}; "
        "expected an answer; run it by hand: the scheduler, or its client on this host, is not well"
    )


def find(command: str, env: Mapping[str, str], place: str = "") -> str | None:
    """Return the path of an executable on ``env``'s PATH, else in ``place``, or None."""
    folders = env.get("PATH", os.defpath).split(os.pathsep)
    if place:
        folders.append(place)
    for folder in folders:
        path = os.path.join(folder, command)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def get_time_limit(env: Mapping[str, str]) -> float:
    text = env.get(TIME_LIMIT, "")
    if not text:
        return _DEFAULT_TIME_LIMIT
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,3})?", text) or not float(text):
        raise InvalidVariableError(
            f"{TIME_LIMIT}={text!r}; expected seconds above 0 and below 10000, such as 30; "
            f"unset it for {_DEFAULT_TIME_LIMIT:g}"
        )
    return float(text)


def describe_end(status: int) -> str:
    """Describe a status of `Answer`."""
    if status < 0:
        return f"signal {-status}"
    return f"exit status {status}"


def _run(
    argv: Sequence[str], env: Mapping[str, str], time_limit: float, place: str
) -> Answer | None:
    """Run the command once; None where it did not end in time, and was killed with its group."""
    deadline = time.monotonic() + time_limit
    process = None
    try:
        with _interrupt_delayed():
            process = _start(argv, env, place)
        out, err = _read(process, deadline)
        status = process.wait(max(deadline - time.monotonic(), 0.0))
        return Answer(status, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process is not None:
            _kill_group(process)


@contextlib.contextmanager
def _interrupt_delayed() -> Iterator[None]:
    """Delay an interrupt to the end: in the middle of Popen it would leave the command."""
    before = signal.getsignal(signal.SIGINT)
    pending: list[int] = []
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda number, _: pending.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pending:
            signal.raise_signal(signal.SIGINT)


def _start(argv: Sequence[str], env: Mapping[str, str], place: str) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            list(argv), env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        hint = "add the command's directory"
        if place:
            hint = f"export PATH=$PATH:{place}"
        path = shorten(env.get("PATH", os.defpath), _MAX_SHOWN)
        raise SchedulerError(
            f"{shorten(argv[0], _MAX_SHOWN)} cannot be started ({reason}); expected the "
            f"scheduler's command on PATH={path}, which a login shell may have reset: {hint}"
        ) from error


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    # Not yet waited for: so its number, which is its group's, is not another's by now.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        # In uninterruptible sleep (a hung file system) not even SIGKILL ends it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _read(process: subprocess.Popen[bytes], deadline: float) -> tuple[bytearray, bytearray]:
    """Return all of stdout and stderr; raise TimeoutExpired where one is open at the deadline."""
    assert process.stdout is not None
    assert process.stderr is not None
    out = bytearray()
    err = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, out)
        selector.register(process.stderr, selectors.EVENT_READ, err)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(process.args, 0)
            for key, _ in selector.select(left):
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fileobj)
                key.data.extend(chunk)
                if len(key.data) > MAX_BYTES:
                    raise SchedulerError(
                        f"{shorten(str(process.args), _MAX_SHOWN)} printed more than "
                        f"{MAX_BYTES >> 20} MiB; expected a scheduler's answer; run it "
                        "by hand and see what it prints"
                    )
    return out, err
