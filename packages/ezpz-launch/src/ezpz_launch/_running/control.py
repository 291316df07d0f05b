"""What the run loop tells the ranks' shims: one variable, one field a line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from ezpz_launch._errors import UsageError
from ezpz_launch._planning.cores import fold_ranks

VARIABLE = "EZPZ_CONTROL"

NODE_TIMEOUT = 15
"""Seconds without a sign of a node after which it is lost, unless asked otherwise."""

_HERE = os.path.dirname(os.path.abspath(__file__))


class Control(NamedTuple):
    """One launch's orders to its shims; `rank_shim.sh` lists the fields.

    Attributes:
        launch_id: By which the launch's reports and processes are told.
        hold: Seconds for which a rank that failed waits to be released.
        where: ``host:port`` of the run loop, for the nodes' agents; empty where it needs none.
        secret: What agents know, and do not say; empty where there are none.
        node_timeout: Seconds without a sign of a node after which it is lost.
        files: A folder for the output of each rank; empty for none.
        only_ranks: Ranks whose output is shown; None for all.
        prefix: Whether each line begins with its rank and host.
        whole_lines: Whether no rank's line may be cut by another's.
        tee: Whether output goes to the files and to the terminal.
        port: A port to be found free on rank 0's host; 0 where it has been.
        device_type: torch's word for the devices, ``cuda`` or ``xpu``; empty where there are none.
        devices: How many devices a node has.
        one_device: Whether each rank is to see one device only.
        attempt: The attempt, from 0.
        progress_file: Where scripts report their progress; empty for none.
        job_id: The scheduler's job; empty outside of one.
    """

    launch_id: str
    hold: float
    where: tuple[str, ...] = ()
    secret: str = ""
    node_timeout: int = NODE_TIMEOUT
    files: str = ""
    only_ranks: Sequence[int] | None = None
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

    def value(self) -> str:
        """Return the variable's value.

        Raises:
            UsageError: A path holds a line break.
        """
        # Into files alone, sh's own redirection is enough.
        pumped = self.tee or (
            (self.prefix or self.only_ranks is not None or self.whole_lines) and not self.files
        )
        fields = [
            self.launch_id,
            f"{self.hold:.0f}",
            sys.executable,
            os.path.join(_HERE, "node.py") if self.where else "-",
            " ".join(self.where) or "-",
            self.secret or "-",
            str(self.node_timeout),
            self.files or "-",
            "all" if self.only_ranks is None else fold_ranks(self.only_ranks),
            os.path.join(_HERE, "rank_output.py") if pumped else "-",
            "--prefix" if self.prefix else "-",
            str(self.port or "-"),
            self.device_type or "-",
            str(self.devices),
            str(int(self.one_device)),
            str(self.attempt),
            self.progress_file or "-",
            self.job_id or "-",
        ]
        for field in fields:
            if "\n" in field:
                raise UsageError(f"{field!r} holds a line break; expected a path without one")
        return "\n".join(fields)
