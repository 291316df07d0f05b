"""A process that outlives ezpz-launch if it is killed, to end what it started on this host."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from .node import obey
from .node_ranks import NodeRanks
from .proc import is_running
from .signals import signal_group

_TERMINATED = 1.0
"""Seconds that a launcher has to end its ranks by itself (srun does, on SIGTERM)."""


class Guardian:
    """Watches over one launch.

    Args:
        launch_id: What every process of the launch has in its environment.
        launcher: Process id of the launcher, the leader of its session.
        scratch: A file or folder of the launch, which is removed with it; empty for none.
    """

    def __init__(self, launch_id: str, launcher: int, scratch: str = "") -> None:
        read, self._write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._write)
                if not _is_dismissed(read, launch_id):
                    _end(launcher)
                    _remove(scratch)
            finally:
                os._exit(0)
        os.close(read)

    def tell(self, order: str) -> None:
        """Pass on what `node.obey` understands."""
        try:
            os.write(self._write, f"{order}\n".encode())
        except OSError:
            return  # somebody killed it; the launch itself goes on

    def dismiss(self) -> None:
        """End it: there is nothing left to guard."""
        self.tell("farewell")
        os.close(self._write)
        # It needs no waiting for: where it is not gone yet, our own end reaps it.
        os.waitpid(self._pid, os.WNOHANG)


def _is_dismissed(read: int, launch_id: str) -> bool:
    """Take orders until there is nobody to give any; then kill the ranks of this host."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    for number in (*ending, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # Nothing of ours may stay open through it: a reader would wait for its end.
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    os.dup2(0, 2)
    os.dup2(read, 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    ranks = NodeRanks(launch_id)
    with open(3, "rb") as orders:
        for line in orders:
            if obey(ranks, line.decode("ascii").split()) is None:
                return True
    ranks.kill()
    return False


def _remove(scratch: str) -> None:
    if os.path.isdir(scratch):
        import shutil  # noqa: PLC0415  # only torchrun has a folder

        shutil.rmtree(scratch, ignore_errors=True)
    elif scratch:
        with suppress(OSError):
            os.unlink(scratch)


def _end(launcher: int) -> None:
    """End a launcher, that of other hosts' ranks too: by SIGTERM, then all of it by SIGKILL."""
    signal_group(launcher, signal.SIGTERM)
    until = time.monotonic() + _TERMINATED
    while time.monotonic() < until and is_running(launcher):
        time.sleep(0.02)
    signal_group(launcher, signal.SIGKILL)
