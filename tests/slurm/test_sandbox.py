"""The sandbox itself: two at once, nothing left behind."""

import socket
import subprocess

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
