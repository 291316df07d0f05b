"""Which job a store belongs to: what rank 0 writes into it, and what the others compare."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from ezpz_topo import RankInfo, get_hostname

_OF_ANY = {
    # The parts of a heterogeneous Slurm job have numbers of their own, and one in common.
    "Slurm job": ("SLURM_HET_JOB_ID", "SLURM_JOB_ID"),
    "PBS job": ("PBS_JOBID",),
}
_OF_LAUNCHER = {
    "ezpz": {"launch": ("EZPZ_LAUNCH_ID",), "attempt": ("EZPZ_ATTEMPT",)},
    "torchrun": {"run": ("TORCHELASTIC_RUN_ID",), "restart": ("TORCHELASTIC_RESTART_COUNT",)},
    # Ranks that another launcher started may lie in several steps: they are one world still.
    "slurm": {"Slurm step": ("SLURM_STEP_ID",)},
}


@dataclass(frozen=True, slots=True)
class Job:
    """What a rank knows of the job that it is part of.

    Attributes:
        facts: Such as ``{"user": "1000", "PBS job": "7.pbs"}``. Not every rank need know all of
            them: a variable may reach some nodes only.
        host: Where the process runs that wrote this.
        pid: Its process id there.
    """

    facts: Mapping[str, str]
    host: str
    pid: int

    @classmethod
    def of(cls, info: RankInfo, port: int, env: Mapping[str, str]) -> Self:
        """Return this rank's job.

        Args:
            info: This rank.
            port: Where the ranks were told to meet. The address is no part of it: rank 0's own
                is often ``localhost`` to itself.
            env: The environment to read.
        """
        names = _OF_ANY | _OF_LAUNCHER.get(info.launcher, {})
        facts = {"user": str(os.getuid()), "port": str(port)}
        for fact, variables in names.items():
            value = next((env[name] for name in variables if env.get(name)), None)
            if value is not None:
                facts[fact] = value
        return cls(facts, get_hostname(), os.getpid())

    @classmethod
    def read(cls, written: bytes) -> Self | None:
        """Return the job that was written; None if this is no such thing."""
        try:
            facts, host, pid = json.loads(written)
            return cls({key: str(value) for key, value in facts.items()}, str(host), int(pid))
        except (ValueError, TypeError, AttributeError):
            return None

    def written(self) -> bytes:
        """Return what `read` reads."""
        return json.dumps([dict(self.facts), self.host, self.pid]).encode()

    def differs(self, other: Job) -> str:
        """Return by what this is another job than the other; an empty text if it is the same."""
        both = self.facts.keys() & other.facts.keys()
        return ", ".join(
            f"{key} {self.facts[key]}, not {other.facts[key]}"
            for key in sorted(both)
            if self.facts[key] != other.facts[key]
        )
