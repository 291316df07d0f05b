"""MPI as far as we need it: initialised by us or by the script, finalised once, or not there."""

import subprocess
import sys
from datetime import timedelta

import pytest

from ezpz_dist import SetupError, _mpi
from ezpz_dist._rendezvous import meet
from ezpz_topo import RankInfo

# One process can be a world of MPI without a launcher.
SCRIPT = """
import atexit, sys
import mpi4py
from ezpz_dist import SetupError
from ezpz_dist import _mpi as mpi
from ezpz_topo import RankInfo
alone = RankInfo(0, 1, 0, 1, 0, "pmi")
"""
BY_US = """
print(mpi.broadcast_once(("h\\u00e4", 7, ""), alone, 60))
try:
    mpi.broadcast_once(("h", 7, ""), RankInfo(1, 2, 1, 2, 0, "pmi"), 60)
except SetupError as error:
    print(error)
"""
LEFT_TO_THE_SCRIPT = """
mpi4py.rc.initialize = False
# Runs after what is registered later.
atexit.register(lambda: print("finalized", sys.modules["mpi4py.MPI"].Is_finalized()))
"""
FAILS = """
try:
    mpi.broadcast_once(("h", 7, ""), alone, 60)
except SetupError as error:
    print(error)
"""
SAID = (
    "('h\u00e4', 7, '')\n"
    "mpi4py sees rank 0 of 1, the launcher (pmi) says 1 of 2: mpi4py loaded another MPI ("
)


@pytest.mark.parametrize("before", ["", "from mpi4py import MPI"])
def test_mpi_is_initialised_by_us_or_by_the_script(ranks, before):
    (said,) = ranks(1, SCRIPT + before + BY_US)
    assert said.startswith(SAID)


def test_mpi_that_the_script_was_to_initialise_is_finalised_by_us(clean_env):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + LEFT_TO_THE_SCRIPT + BY_US], env=clean_env,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(SAID)
    assert done.stdout.endswith("finalized True\n")


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (
            "from mpi4py import MPI; MPI.Finalize()",
            "MPI was finalized before setup_torch, which needs it",
        ),
        (
            "sys.modules['mpi4py.MPI'] = None",
            "MASTER_ADDR and MASTER_PORT are not set and mpi4py cannot load an MPI (",
        ),
    ],
)
def test_mpi_that_cannot_be_had(ranks, before, said):
    (told,) = ranks(1, SCRIPT + before + FAILS)
    assert told.startswith(said)
    assert "ezpz-launch" in told


def test_rank_0s_trouble_is_everybodys(monkeypatch):
    monkeypatch.setattr(_mpi, "broadcast_once", lambda value, info, timeout: ("", 0, "no address"))
    with pytest.raises(SetupError, match=r"^no address$"):
        meet(RankInfo(1, 2, 1, 2, 0, "pmi"), timedelta(seconds=1), {})
