"""No rank says anything for too long: where each hangs is shown, and the launch is ended."""

import re

import pytest
from tests.faults.launches import PROGRAMS, rank_program

SOURCE = (PROGRAMS / "rank.py").read_text(encoding="utf-8").splitlines()
(HANGS,) = (number for number, line in enumerate(SOURCE, 1) if "# the line that hangs" in line)

# As py-spy says it, and as faulthandler does.
FRAME = re.compile(rf'stuck_here \(\S*rank\.py:{HANGS}\)|rank\.py", line {HANGS} in stuck_here')


@pytest.mark.under("hydra", "srun")
def test_hang(running, place):
    # Nothing is said until Python has started: on a busy machine, for seconds.
    started = running(["--idle-timeout", "8", "--grace", "2"], rank_program("hangs"))
    assert started.ends(within=8 + 10 + 2 + 2) == 124, started.stderr
    assert started.stdout.count(b"began") == 3
    stderr = started.stderr
    assert len(FRAME.findall(stderr)) == 2, stderr
    # Rank 0 has ended well: it does not hang, and the others went on.
    (line,) = (line for line in stderr.splitlines() if line.startswith("ezpz-launch: no output"))
    hosts = place.hosts
    assert "for 8 s" in line
    assert re.findall(r"(\d) on ([\w.-]+)", line) == [("1", hosts[1]), ("2", hosts[2])]
    started.leaves_nothing()
