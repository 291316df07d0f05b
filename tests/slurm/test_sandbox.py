"""The sandbox itself: two at once, nothing left behind."""

import socket
import subprocess

import pytest
from waiting import until


def test_two_sandboxes_run_at_once_and_one_with_a_running_job_leaves_nothing(slurm, sandbox):
    job = ["srun", "-n", "1", "printenv", "SLURM_JOB_ID"]
    with sandbox.SlurmSandbox() as other:
        assert other.directory != slurm.directory
        assert slurm.run(job).stdout != other.run(job).stdout
        job = f"srun -n 2 sh -c 'touch {other.directory}/runs; exec sleep 300'"
        other.run(["sbatch", "-N", "2", "--wrap", job])
        until((other.directory / "runs").exists)
    mark = "SLURM_CONF={}/slurm.conf"
    assert sandbox.processes_with(mark.format(other.directory)) == []
    assert not other.directory.exists()
    assert sandbox.processes_with(mark.format(slurm.directory)), "the other sandbox lives on"


def test_a_sandbox_that_does_not_start_says_why_and_leaves_nothing(slurm, sandbox, monkeypatch):
    monkeypatch.setattr(sandbox, "CONFIGURATION", sandbox.CONFIGURATION + "SelectType=select/no\n")
    broken = sandbox.SlurmSandbox()
    with pytest.raises(sandbox.SandboxError, match=r"(?s)slurmctld ended with 1.*select/no"):
        broken.__enter__()
    assert sandbox.processes_with(f"SLURM_CONF={broken.directory}/slurm.conf") == []
    assert not broken.directory.exists()


def test_a_command_that_hangs_is_ended_and_its_job_cancelled(slurm, sandbox):
    with pytest.raises(sandbox.SandboxError, match=r"did not end within 1 s"):
        slurm.run(["srun", "-N", "4", "-n", "8", "sleep", "300"], timeout=1)
    # All eight cores are needed again.
    slurm.run(["srun", "-N", "4", "-n", "8", "true"], timeout=120)


def test_it_listens_on_loopback_only(slurm):
    ports = [
        int(line.split("Port=")[1].split()[0])
        for line in (slurm.directory / "slurm.conf").read_text().splitlines()
        if line.startswith("NodeName=")
    ]
    assert len(ports) == 4
    answer = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False)
    for address in answer.stdout.split():
        for port in ports:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.socket(family) as probe:
                probe.settimeout(2)
                assert probe.connect_ex((address, port)) != 0, (address, port)
