"""By what a rank tells its own job's store from another's."""

import os

import pytest

from ezpz_dist._address import Job
from ezpz_topo import RankInfo


def job(launcher="torchrun", port=29500, **env):
    return Job.of(RankInfo(1, 2, 1, 2, 0, launcher), port, env)


def test_what_is_written_is_read():
    mine = job(PBS_JOBID="7.pbs")
    assert Job.read(mine.written()) == mine
    assert mine.pid == os.getpid()


@pytest.mark.parametrize("text", [b"", b"{}", b"[1, 2]", b'[{}, "h", "p"]', b"\xff", b"[[], 1, 2]"])
def test_what_another_wrote_is_no_job(text):
    assert Job.read(text) is None


@pytest.mark.parametrize(
    ("launcher", "here", "there", "differs"),
    [
        ("torchrun", {}, {}, ""),
        # a variable may reach the first node only
        ("torchrun", {"PBS_JOBID": "7"}, {}, ""),
        ("torchrun", {"PBS_JOBID": "7"}, {"PBS_JOBID": "8"}, "PBS job 7, not 8"),
        (
            "torchrun",
            {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0"},
            {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"},
            "restart 0, not 1",
        ),
        ("slurm", {"SLURM_STEP_ID": "0"}, {"SLURM_STEP_ID": "1"}, "Slurm step 0, not 1"),
        # two steps, one world: somebody's own way of starting
        ("torchrun", {"SLURM_STEP_ID": "0"}, {"SLURM_STEP_ID": "1"}, ""),
        # the parts of a heterogeneous job
        (
            "slurm",
            {"SLURM_JOB_ID": "7", "SLURM_HET_JOB_ID": "7"},
            {"SLURM_JOB_ID": "8", "SLURM_HET_JOB_ID": "7"},
            "",
        ),
        ("ezpz", {"EZPZ_LAUNCH_ID": "a"}, {"EZPZ_LAUNCH_ID": "b"}, "launch a, not b"),
        ("ezpz", {"EZPZ_ATTEMPT": "0"}, {"EZPZ_ATTEMPT": "1"}, "attempt 0, not 1"),
    ],
)
def test_another_job(launcher, here, there, differs):
    assert job(launcher, **here).differs(job(launcher, **there)) == differs


def test_another_port_is_another_job():
    assert job(port=1).differs(job(port=2)) == "port 1, not 2"
