"""What sandboxes have in common: a folder of their own, and nothing that outlives the ``with``."""

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from waiting import PATIENCE

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

    def run(self, command, *, env=None, expect=0, timeout=PATIENCE):
        """Run words in the sandbox; any end but ``expect`` (None: any), or none, is an error."""
        started = subprocess.Popen(
            command, env={**self.environment, **(env or {})}, cwd=self.directory, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            # Ctrl-C is for the tests; what they have started is ended by us.
            start_new_session=True,
        )  # fmt: skip
        try:
            stdout, stderr = started.communicate(timeout=timeout)
            how = f"ended with {started.returncode}, expected {expect}"
            if expect in (None, started.returncode):
                return subprocess.CompletedProcess(command, started.returncode, stdout, stderr)
        except BaseException as error:
            started.kill()  # it may not have entered yet
            self._end_commands()
            stdout, stderr = started.communicate(timeout=STOP_TIMEOUT)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            how = f"did not end within {timeout:g} s"
        said = f"--- stdout\n{stdout}\n--- stderr\n{stderr}\n{self._logs()}"
        raise SandboxError(f"{shlex.join(map(str, command))} {how}\n{said}")

    def _end_commands(self):
        """End what a command has started in the sandbox."""

    def _logs(self):
        return ""


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
