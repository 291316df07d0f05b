"""One rank of a training script fails: all end, and it is named, under every launcher."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from tests.faults.launches import PROGRAMS, SLACK

if TYPE_CHECKING:
    from tests.faults.launches import Launch

Start = Callable[..., "Launch"]

SOURCE = (PROGRAMS / "train.py").read_text(encoding="utf-8").splitlines()
(HANGS,) = (number for number, line in enumerate(SOURCE, 1) if "# the line that hangs" in line)


def train(launch: Start, what: str, guilty: int) -> Launch:
    script = [sys.executable, str(PROGRAMS / "train.py"), ".", what, str(guilty)]
    # Long enough for the others to have ended by themselves.
    options = ["--env", "OMP_NUM_THREADS=1", "--grace", "30"]
    # The names of Slurm's nodes are no host's here.
    started = launch([*options, "--env", "MASTER_ADDR=127.0.0.1"], script)
    started.until((started.folder / "time").exists, "all ranks are set up", 90)
    return started


@pytest.mark.with_torchrun
@pytest.mark.parametrize("guilty", [0, 1])
def test_an_exception_ends_all_at_once(launch: Start, guilty: int) -> None:
    started = train(launch, "raises", guilty)
    status = started.ends(within=30)
    began = float((started.folder / "time").read_text())
    assert time.time() - began < 2 + SLACK, started.stderr
    assert status != 0
    stderr = started.stderr
    # The others sleep, and would for long: they were ended, and one says by whom.
    assert "ValueError: boo" in stderr
    host = re.escape(os.uname().nodename)
    said = re.search(
        rf"ezpz: rank {guilty} on {host} failed at train\.py:\d+ in <module>: ", stderr
    )
    assert said, stderr
    assert stderr.index("ValueError: boo") < said.start(), "its traceback first"
    started.leaves_nothing()


@pytest.mark.with_torchrun
def test_a_missing_rank_is_named_with_host_and_line(launch: Start) -> None:
    started = train(launch, "hangs", 2)
    started.ends(within=30)
    began = float((started.folder / "time").read_text())
    # The time-out, two seconds for the name, two for the end.
    assert time.time() - began < 2 + 2 + 2 + SLACK, started.stderr
    host = re.escape(os.uname().nodename)
    named = rf"HangError: barrier.* rank 2 on {host} stands at train\.py:{HANGS} in load_batch"
    assert re.search(named, started.stderr), started.stderr
    started.leaves_nothing()
