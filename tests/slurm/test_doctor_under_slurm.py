"""ezpz doctor inside a real job: its controller, its hosts, and what is installed on each."""

import json
import sys

import pytest

DOCTOR = [
    sys.executable, "-P", "-c", "import sys; from ezpz.doctor import main; sys.exit(main())",
    "--json", "--timeout=50",
]  # fmt: skip
TWO_NODES = ["salloc", "-Q", "-N", "2", "-n", "4", "-w", "nid[001-002]"]


@pytest.fixture
def checked(slurm):
    """Run these checks in a job of two nodes; return the exit status and each result."""

    def run(only, before=None, **env):
        # Whatever devices this host has, they are not the sandbox's.
        more = {"TORCH_DEVICE": "cpu", **env}
        words = [*(TWO_NODES if before is None else before), *DOCTOR, f"--only={only}"]
        done = slurm.run(words, env=more, expect=None)
        assert done.returncode in (0, 1), done.stderr
        return done.returncode, {each["name"]: each for each in json.loads(done.stdout)["checks"]}

    return run


def test_a_job_that_is_well(checked):
    # The nodes of the sandbox are one host, and meet on its loopback.
    every = "scheduler,hostfile,versions,network,mpi"
    status, found = checked(every, GLOO_SOCKET_IFNAME="", FI_TCP_IFACE="")
    assert status == 0, [each for each in found.values() if each["status"] != "ok"]
    assert {each["status"] for each in found.values()} == {"ok"}
    assert "has 2 hosts: nid[001-002], ends at " in found["scheduler"]["message"]
    assert "2 of the 2 hosts of job " in found["hostfile"]["message"]
    assert "are the same on 2 hosts" in found["versions"]["message"]
    assert set(found["versions"]["details"]["versions"]) == {"nid001", "nid002"}


def test_a_rank_of_the_job_does_not_launch(checked):
    first = 'if [ "$SLURM_PROCID" = 0 ]; then exec "$@"; fi'
    before = ["srun", "-N", "2", "-n", "2", "sh", "-c", first, "sh"]
    status, found = checked("versions", before)
    assert status == 0, [each for each in found.values() if each["status"] != "ok"]
    assert found["versions"]["message"] == "not compared: this is one of several ranks"
