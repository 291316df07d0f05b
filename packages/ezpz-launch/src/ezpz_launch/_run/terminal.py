"""A launch whose output is shown on a terminal."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress

from ezpz_launch._errors import say
from ezpz_launch._plan.plan import LaunchPlan
from ezpz_launch._run.record import duration


class Terminal:
    """What ranks whose output is shown on a terminal find in their environment, and two lines."""

    def __init__(self, planned: LaunchPlan, env: Mapping[str, str], run_file: str) -> None:
        self._planned, self._run_file = planned, run_file
        self._began = time.monotonic()
        columns, lines = os.get_terminal_size(1)
        if planned.request.prefix:
            placement = planned.placement
            columns -= len(f"[{placement.nproc - 1}@{max(placement.hosts, key=len)}] ")
        # Ours is read by the rank's pump and by ezpz_obs. FORCE_COLOR is read by rich, structlog,
        # termcolor, pytest, and Python from 3.13 on (docs.python.org/3/using/cmdline.html,
        # "Controlling color"); COLUMNS and LINES by Python's shutil and rich; TQDM_NCOLS by tqdm,
        # which leaves a column free and else asks the pipe that it has (tqdm/utils.py, 4.70).
        added = {"EZPZ_TERMINAL": "1", "TERM": "xterm", "FORCE_COLOR": "1"}
        if columns > 20 and lines > 0:  # some pseudo-terminals have no size
            added |= {"COLUMNS": f"{columns}", "LINES": f"{lines}", "TQDM_NCOLS": f"{columns - 1}"}
        if env.get("NO_COLOR") or env.get("TERM") == "dumb":
            del added["FORCE_COLOR"]
        # What is added to the ranks' environment; what the user has set, stays.
        self.environment = {name: env.get(name, value) for name, value in added.items()}

    def print_start(self) -> None:
        """Say what is started: it may take a rank a minute to import torch."""
        launcher, placement = self._planned.launcher, self._planned.placement
        program, count = os.path.basename(launcher.path), len(placement.hosts)
        own = program.startswith(("python", launcher.kind))
        how = launcher.kind if own else f"{program} ({launcher.kind})"
        first = os.uname().nodename if self._planned.on_this_host else placement.hosts[0]
        ranks = f"{placement.nproc} rank{'s' * (placement.nproc > 1)}"
        say(f"{ranks} on {first if count == 1 else f'{count} hosts'} by {how}")

    def print_end(self, status: int) -> None:
        """Say that all is well, and in any case where the metrics are."""
        words = [f"ok in {duration(time.monotonic() - self._began)}"] if not status else []
        with suppress(OSError):  # no History of rank 0's, or on a host that does not share the file
            with open(self._run_file, encoding="utf-8", errors="surrogateescape") as file:
                folder = os.path.relpath(os.path.dirname(file.read().strip()))
            words.append(f"metrics: ezpz-obs report {folder}")
        if words:
            say("; ".join(words))
