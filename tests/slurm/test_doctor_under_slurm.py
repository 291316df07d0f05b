"""ezpz doctor inside a real job: its controller, its hosts, and what is installed on each."""

import json
import sys

DOCTOR = [
    sys.executable, "-P", "-c", "import sys; from ezpz.doctor import main; sys.exit(main())",
    "--json", "--timeout=50",
]  # fmt: skip


def test_a_job_that_is_well(slurm):
    # The nodes of the sandbox are one host, and meet on its loopback.
    # Whatever devices this host has, they are not the sandbox's.
    env = {"GLOO_SOCKET_IFNAME": "", "FI_TCP_IFACE": "", "TORCH_DEVICE": "cpu"}
    job = ["salloc", "-Q", "-N", "2", "-n", "4", "-w", "nid[001-002]"]
    every = "--only=scheduler,hostfile,network,mpi"
    done = slurm.run([*job, *DOCTOR, every], env=env)
    found = {each["name"]: each for each in json.loads(done.stdout)["checks"]}
    assert {each["status"] for each in found.values()} == {"ok"}
    assert "has 2 hosts: nid[001-002], ends at " in found["scheduler"]["message"]
    assert "2 of the 2 hosts of job " in found["hostfile"]["message"]
