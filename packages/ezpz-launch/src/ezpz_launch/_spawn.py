"""The smallest launcher: ranks of this host, without any MPI.

usage: python -I -S spawn.py -n RANKS COMMAND [ARGUMENT...]

A program beside mpiexec and srun, so that the run loop knows no special case. Each rank has a
process group of its own and finds EZPZ_SPAWN_RANK and EZPZ_SPAWN_SIZE; its lines are written whole.
The exit status is the largest of the ranks' own, 128 + signal where one killed a rank. SIGTERM is
passed on to the ranks.
"""

from __future__ import annotations

import os
import select
import signal
import sys

_CHUNK = 1 << 16
_PATIENCE_MS = 100
"""Milliseconds after which an unfinished line, such as a progress bar, is shown."""


class _Stream:
    """One rank's pipe, and where it goes."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.line = b""

    def take(self, chunk: bytes) -> None:
        """Write the complete lines, and keep the rest for a moment."""
        lines, newline, rest = (self.line + chunk).rpartition(b"\n")
        self.line = rest
        self._write(lines + newline)
        if len(self.line) > _CHUNK:
            self.flush()

    def flush(self) -> None:
        """Write what is there."""
        self._write(self.line)
        self.line = b""

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self.target, data) :]
            except OSError:
                return  # nobody reads: the ranks need not know


def _start(rank: int, size: int, command: list[str]) -> tuple[int, dict[int, _Stream]]:
    pipes = [os.pipe(), os.pipe()]
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            for target, (_, write) in enumerate(pipes, start=1):
                os.dup2(write, target)
            for number in (signal.SIGTERM, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            env = {**os.environ, "EZPZ_SPAWN_RANK": str(rank), "EZPZ_SPAWN_SIZE": str(size)}
            os.execvpe(command[0], command, env)  # noqa: S606  # no shell is what we want
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        finally:
            os._exit(127)
    for _, write in pipes:
        os.close(write)
    return pid, {pipes[0][0]: _Stream(1), pipes[1][0]: _Stream(2)}


def main(words: list[str]) -> int:
    """Start the ranks, copy what they write, and wait for all of them."""
    if len(words) < 3 or words[0] != "-n" or not words[1].isdigit():
        sys.stderr.write(f"{(__doc__ or '').splitlines()[2]}\n")
        return 2
    size = int(words[1])
    pids: list[int] = []

    # Before the first rank is there, so that none is missed.
    def pass_on(number: int, _frame: object) -> None:
        for pid in pids:
            _kill(pid, number)

    signal.signal(signal.SIGTERM, pass_on)
    streams: dict[int, _Stream] = {}
    for rank in range(size):
        pid, pipes = _start(rank, size, words[2:])
        pids.append(pid)
        streams |= pipes
    statuses = _copy(streams, set(pids))
    return max(statuses, default=0)


def _copy(streams: dict[int, _Stream], running: set[int]) -> list[int]:
    """Copy until every pipe is closed, or its ranks are gone and nothing more comes."""
    poll = select.poll()
    for end in streams:
        poll.register(end, select.POLLIN)
    statuses: list[int] = []
    while streams or running:
        ready = poll.poll(_PATIENCE_MS) if streams else []
        for end, _ in ready:
            chunk = os.read(end, _CHUNK)
            streams[end].take(chunk)
            if not chunk:
                streams.pop(end).flush()
                poll.unregister(end)
                os.close(end)
        if not ready:
            for stream in streams.values():
                stream.flush()
        if not streams and running:
            pid, status = os.wait()
        else:
            pid, status = os.waitpid(-1, os.WNOHANG) if running else (0, 0)
        if pid:
            running.discard(pid)
            code = os.waitstatus_to_exitcode(status)
            statuses.append(128 - code if code < 0 else code)
        elif not running and not ready:
            break  # what a rank left in the background holds a pipe open
    return statuses


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(-pid, number)
    except (ProcessLookupError, PermissionError):
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
