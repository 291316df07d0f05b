"""What one run is given, and what it returns."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from ezpz_launch._errors import UsageError
from ezpz_launch._plan.options import GRACE
from ezpz_launch._plan.shim import PROGRAMS
from ezpz_topo import same_host

NEVER = float("inf")

VARIABLE = "EZPZ_CONTROL"
"""The variable in which each rank's process finds its `RankSettings`."""

NODE_TIMEOUT = 15
"""Seconds without a sign of a node after which it is lost, unless requested otherwise."""


@dataclass(frozen=True)
class RankSettings:
    """What a launch hands to its ranks' processes (rank_main.py) and its nodes' agents.

    Attributes:
        launch_id: By which the launch's reports and processes are recognised.
        hold_seconds: For which a rank that failed waits to be released.
        addresses: ``host:port`` of ezpz-launch, for the agents of other hosts.
        secret: What only ezpz-launch and its agents know.
        node_timeout: Seconds without a sign of a node after which it is lost.
        log_dir: Folder for the output of each rank; empty for none.
        prefix: Whether each line begins with its rank and host.
        whole_lines: Whether no rank's line may be cut by another's.
        tee: Whether output goes to the files and to the terminal.
        port: To be found free on rank 0's host; 0 if it is known to be.
        device_type: torch's word for the devices, cuda or xpu; empty if there are none.
        devices: Of a node.
        one_device: Whether each rank is to see one device only.
        attempt: From 0.
        progress_file: Where scripts report their progress.
        job_id: The scheduler's; empty outside of a job.
        run_file: Where a History writes where its own file is.
        last_fault: Why the attempt before ended, as people read it.
        python: Runs our programs beside the ranks.
        programs: The folder of these.
    """

    launch_id: str
    hold_seconds: float
    addresses: tuple[str, ...] = ()
    secret: str = ""
    node_timeout: int = NODE_TIMEOUT
    log_dir: str = ""
    prefix: bool = False
    whole_lines: bool = False
    tee: bool = False
    port: int = 0
    device_type: str = ""
    devices: int = 0
    one_device: bool = False
    attempt: int = 0
    progress_file: str = ""
    job_id: str = ""
    run_file: str = ""
    last_fault: str = ""
    python: str = sys.executable
    programs: str = PROGRAMS

    def to_text(self) -> str:
        """Return the value of `VARIABLE`: a line ``name=value`` a field, empty ones left out.

        It is read without a parser's import, which each rank would pay for; sh reads ``python``.

        Raises:
            UsageError: A value has a line break.
        """
        lines = [f"python={self.python}"]
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "addresses":
                value = " ".join(value)
            elif isinstance(value, bool):
                value = int(value)
            if "\n" in str(value):
                raise UsageError(f"{value!r} holds a line break; expected a path without one")
            if value and each.name != "python":
                lines.append(f"{each.name}={value}")
        return "\n".join(lines)


class Launch(NamedTuple):
    """One run, ready to start."""

    argv: tuple[str, ...]  # the launcher's command line
    nproc: int  # how many ranks it starts
    hosts: tuple[str, ...]  # that get ranks, in the order of their nodes
    ppn: int  # ranks of a full host
    on_this_host: bool  # whether this host alone has ranks
    environment: Mapping[str, str]  # of the launcher and its ranks, complete
    settings: RankSettings
    grace: float = GRACE  # seconds from SIGTERM to SIGKILL
    idle_timeout: float = 0.0  # seconds without any output after which ranks hang; 0 for never
    signal_at: Callable[[], float] = lambda: NEVER  # when SIGUSR1 is due, since the epoch
    scratch: str = ""  # a file or folder of the launch, to be removed also if we are killed
    end_file: str = ""  # where another host requests the end of the launch
    is_over: Callable[[], bool] | None = None  # whether ranks, which end by themselves, should have

    def host_of(self, rank: int) -> str:
        host = self.hosts[rank // self.ppn]
        if same_host(host, "localhost"):
            return os.uname().nodename
        return host


@dataclass
class FailureEvidence:
    """What is known of how a run failed; nodes are indices of its hosts."""

    hosts: tuple[str, ...]
    ppn: int
    exit_statuses: Mapping[int, int]  # of ranks that had ended before the others were stopped
    unreachable_nodes: set[int] = field(default_factory=set)
    dead_agents: set[int] = field(default_factory=set)  # nodes whose agent ended without farewell
    lost_ranks: set[int] = field(default_factory=set)  # whose process, or its launcher's, is gone
    unstarted_ranks: Sequence[int] = ()
    hangs: bool = False  # whether it was silent for too long
    unresponsive_nodes: Collection[int] = ()  # that did not tell where their ranks hang
    detected_at: float = 0.0  # when the failure was seen, in seconds since the epoch


class Outcome(NamedTuple):
    """How a run ended."""

    exit_status: int  # that of ezpz-launch
    failure: tuple[int, str, int] | None = None  # rank, host and status of the first that failed
    end_signal: signal.Signals | None = None  # the signal that ended it, if one did
    port_taken: bool = False  # whether another program holds the port on rank 0's host
    tail: bytes = b""  # the last bytes of standard error
    goes_with_job: bool = False  # whether it was ended because its job is about to be
    evidence: FailureEvidence | None = None  # of one that failed; None if it was told to end


def describe_exit_status(status: int) -> str:
    if status > 128 and status - 128 in {each.value for each in signal.Signals}:
        return f"was killed by {signal.Signals(status - 128).name} (exit status {status})"
    return f"exited with status {status}"
