"""What is kept of a launch while it runs, and after it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from ezpz_launch._planning.plan import LaunchPlan
from ezpz_launch._running.outcome import how
from ezpz_topo import Topology

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .record import Recorder


class Keeper:
    """The record of one launch, written while its ranks start: they do not wait for it.

    Args:
        topology: Where we are.
        env: The environment, which tells the folder of the records.

    Attributes:
        launch_id: The launch's id.
    """

    def __init__(self, topology: Topology, env: Mapping[str, str]) -> None:
        self._topology, self._env = topology, env
        self.launch_id = new_id(time.time())
        self._recorder: Recorder | None = None

    @property
    def progress_file(self) -> str:
        """Where scripts report their progress; empty where nothing can be written."""
        from ezpz_launch._errors import LaunchError  # noqa: PLC0415  # only --retries needs it

        from .state_folder import make_folder, records_folder  # noqa: PLC0415

        try:
            folder = records_folder(self._env)
            make_folder(folder)
        except (LaunchError, OSError):
            # The recorder says so.
            return ""
        return os.path.join(folder, f"{self.launch_id}.progress")

    def start(self, planned: LaunchPlan, argv: Sequence[str]) -> None:
        """Record that an attempt runs."""
        from .record import Recorder, record_of  # noqa: PLC0415  # the ranks do not wait for it

        if self._recorder is None:
            job, retries = self._topology.allocation, planned.request.retries
            record = record_of(planned, argv, job, launch_id=self.launch_id, retries=retries)
            self._recorder = Recorder.start(record, self._env)
        else:
            self._recorder.next_attempt(argv, planned.environment)

    def finish(self, exit_status: int, failure: tuple[int, str, int] | None) -> None:
        """Record how it ended."""
        if self._recorder is not None:
            first: dict[str, str | int] | None = None
            if failure:
                rank, host, status = failure
                first = {"rank": rank, "host": host, "status": status, "how": how(status)}
            self._recorder.finish(exit_status, first)


def new_id(now: float) -> str:
    """Return an id for a launch that starts now, in seconds since the epoch: when, who, chance."""
    second = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now))
    return f"{second}{int(now % 1 * 1e6):06}Z-{os.getpid()}-{os.urandom(3).hex()}"
