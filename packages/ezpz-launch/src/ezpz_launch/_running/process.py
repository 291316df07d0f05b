"""The launcher as a process: in a session of its own, with pipes that are ours to read."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from ezpz_launch._errors import LaunchError

from .signals import signal_group


class LauncherProcess:
    """A launcher that runs.

    Args:
        argv: Its command line.
        environment: Its environment, complete.

    Attributes:
        pid: Its process id, and that of its session and process group.
        stdout: The end to read of its standard output; whoever reads it closes it.
        stderr: The same of its standard error.

    Raises:
        LaunchError: It cannot be started.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        # Not Popen's own pipes, which it would close a second time.
        (self.stdout, out), (self.stderr, err) = os.pipe(), os.pipe()
        try:
            self._process = subprocess.Popen(
                argv,
                env=environment,
                # mpiexec would swallow ours.
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        except OSError as error:
            os.close(self.stdout)
            os.close(self.stderr)
            raise LaunchError(f"{argv[0]} cannot be started: {error.strerror}") from error
        finally:
            os.close(out)
            os.close(err)
        self.pid = self._process.pid
        self._next_signal = signal.SIGTERM

    def poll(self) -> int | None:
        """Return its exit status, -signal where one killed it; None while it runs."""
        return self._process.poll()

    def pass_on(self, number: int) -> None:
        """Send it a signal that it passes on, or takes for its own."""
        self._process.send_signal(number)

    def end(self) -> None:
        """Send SIGTERM to all of it; the next time, SIGKILL."""
        signal_group(self.pid, self._next_signal)
        self._next_signal = signal.SIGKILL

    def kill(self) -> None:
        """SIGKILL what is left of it."""
        signal_group(self.pid, signal.SIGKILL)
