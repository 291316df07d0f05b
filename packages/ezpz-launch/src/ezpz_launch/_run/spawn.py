"""Program: the smallest launcher, without any MPI: start ranks as processes of this host.

usage: python -I -S spawn.py RANKS COMMAND [ARG...]

Each rank has a process group of its own, to which signals are passed on, and finds its place in
EZPZ_SPAWN_RANK and EZPZ_SPAWN_SIZE. The exit status is the largest of the ranks'.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # C: the enums of signal cost 5 ms
import os
import sys

PASSED_ON = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip


def main(words: list[str]) -> int:
    """Start the ranks, pass signals on to them, and return the exit status to end with."""
    if len(words) < 2 or not words[0].isdigit():
        os.write(
            2,
            os.fsencode(
                f"ezpz-launch: spawn.py: got {words}; expected RANKS COMMAND; see its head\n"
            ),
        )
        return 2
    size = int(words[0])
    ignored = [each for each in PASSED_ON if signal.getsignal(each) == signal.SIG_IGN]
    # A signal that arrives before every rank is there waits until they are.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    pids = [start_rank(rank, size, words[1:], ignored) for rank in range(size)]

    def pass_on(number: int, _frame: object) -> None:
        for pid in pids:
            try:
                os.kill(-pid, number)
            except (ProcessLookupError, PermissionError):
                continue

    for number in PASSED_ON:
        if number not in ignored:
            signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    return max(wait_for(pid) for pid in pids)


def start_rank(rank: int, size: int, command: list[str], ignored_signals: list[int]) -> int:
    """Fork a rank; return its process id."""
    pid = os.fork()
    if pid:
        # Here, too: a signal may be passed on before the child has done it.
        try:
            os.setpgid(pid, pid)
        except (PermissionError, ProcessLookupError):  # it has executed its command, or has ended
            return pid
        return pid
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):  # Python's own
            if number not in ignored_signals:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        os.environ["EZPZ_SPAWN_RANK"] = str(rank)
        os.environ["EZPZ_SPAWN_SIZE"] = str(size)
        os.execvp(command[0], command)  # noqa: S606 - no shell is wanted
    except OSError as error:
        say(f"rank {rank}: {command[0]}: {error.strerror}")
    finally:
        os._exit(127)


def wait_for(pid: int) -> int:
    """Wait for a rank's end; return its exit status, 128 + signal if it was killed."""
    _, ended = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(ended)
    return code if code >= 0 else 128 - code


def say(message: str) -> None:
    os.write(2, os.fsencode(f"ezpz-launch: {message}\n"))


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
