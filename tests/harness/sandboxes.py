"""What sandboxes have in common: a folder of their own, and nothing that outlives the ``with``."""

import contextlib
import os
import signal
import tempfile
import time
from pathlib import Path

STOP_TIMEOUT = 10.0
"""Seconds for an orderly end, before SIGKILL; and in which what was killed must be gone."""


class SandboxError(Exception):
    """The sandbox did not start, or a command in it did not do what it should."""


class Sandbox:
    """What `_start` starts is there from ``with`` to its end, when `_stop` takes it away."""

    kind = ""  # how the folder's name begins

    def __init__(self):
        self.directory = Path()  # removed at the end
        self.environment = {}  # for commands in the sandbox: ours without any launcher's variables

    def __enter__(self):
        # Directly below /tmp: a socket's path has at most 107 bytes. The name is
        # unique, also where a killed sandbox had our process id.
        prefix = f"{self.kind}-{os.getpid()}-"
        self.directory = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind, value, trace):
        self._stop()


def end(find, whose):
    """Kill processes until none is found any more."""
    deadline = time.monotonic() + STOP_TIMEOUT
    while left := find():
        if time.monotonic() > deadline:
            raise SandboxError(f"processes {left} of {whose} survive SIGKILL")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def search_path():
    """Return ``PATH`` with the directories of daemons, which an ordinary user's may lack."""
    directories = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join([*directories, "/usr/local/sbin", "/usr/sbin", "/sbin"])
