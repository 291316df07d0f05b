"""ezpz-launch inside a real job: srun starts its ranks on the job's nodes, as many as are asked."""

import json
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

FOUR = ["nid001", "nid002", "nid003", "nid004"]
PROGRAMS = Path(__file__).resolve().parents[1] / "faults" / "programs"


@pytest.fixture
def ezpz(tool):
    return tool("ezpz-launch")


@pytest.fixture
def salloc(slurm, sandbox, program, ezpz, tmp_path):
    """Launch in a job of four nodes of two tasks each; where each rank says that it is."""

    def run(*options, before=()):
        job = ["salloc", "-Q", "-N", "4", "-n", "8", *before]
        slurm.run([*job, ezpz, *options, *program("say_rank"), str(tmp_path)])
        return places(sandbox.reports(tmp_path))

    return run


def places(said):
    """Return node, node rank, local rank and local world size of each rank, in their order."""
    assert [one["rank"] for one in said] == list(range(len(said)))
    assert {(one["world_size"], one["launcher"]) for one in said} == {(len(said), "ezpz")}
    names = ("node", "node_rank", "local_rank", "local_world_size")
    return [tuple(one[name] for name in names) for one in said]


def filled(nodes, ranks):
    """Return the places of so many ranks on each of these nodes."""
    counted = enumerate(zip(nodes, ranks, strict=True))
    return [(node, at, local, of) for at, (node, of) in counted for local in range(of)]


REQUESTS = {
    "as the job says": ((), FOUR, [2, 2, 2, 2]),
    "ranks": (("-n", "4", "--ppn", "1"), FOUR, [1, 1, 1, 1]),
    "nodes": (("-N", "2"), FOUR[:2], [2, 2]),
    "the last nodes": (("--include", "nid[003-004]"), FOUR[2:], [2, 2]),
    "not the first": (("--exclude", "nid001", "--ppn", "1"), FOUR[1:], [1, 1, 1]),
    "uneven": (("-n", "5", "--ppn", "2"), FOUR[:3], [2, 2, 1]),
}


@pytest.mark.parametrize("asked", REQUESTS)
def test_a_salloc_shell_starts_ranks_on_all_its_nodes(salloc, asked):
    options, nodes, ranks = REQUESTS[asked]
    assert salloc(*options) == filled(nodes, ranks)


def test_a_hostfile_gives_the_order(salloc, tmp_path):
    hostfile = tmp_path.with_suffix(".hosts")
    hostfile.write_text("nid003\nnid001\n")
    said = salloc("--hostfile", str(hostfile), "--ppn", "2")
    assert said == filled(["nid003", "nid001"], [2, 2])


def test_a_host_outside_of_the_job_is_refused(slurm, ezpz, tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("nid001\nnid004\n")
    launch = [ezpz, "--hostfile", str(hostfile), "echo", "started"]
    done = slurm.run(["salloc", "-Q", "-N", "2", "-w", "nid[001-002]", *launch], expect=None)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "nid004" in line


def test_an_interactive_step_starts_ranks_on_all_its_job_s_nodes(salloc):
    # As where LaunchParameters=use_interactive_step gives salloc's shell.
    interactive = ("srun", "--interactive", "-Q", "-N", "1", "-n", "1")
    assert salloc("-n", "4", "--ppn", "1", before=interactive) == filled(FOUR, [1, 1, 1, 1])


def test_a_batch_script_starts_ranks_on_all_its_nodes(slurm, sandbox, program, ezpz, tmp_path):
    command = shlex.join([ezpz, "--ppn", "2", *program("say_rank"), str(tmp_path)])
    slurm.batch(command, "-N", "4", "-n", "8")
    assert places(sandbox.reports(tmp_path)) == filled(FOUR, [2, 2, 2, 2])


def test_the_exit_status_is_the_script_s(slurm, ezpz):
    ranks = ["sh", "-c", '[ "$RANK" != 2 ] || exit 7; exec sleep 30']
    command = shlex.join([ezpz, "-n", "4", "--ppn", "1", *ranks])
    output = slurm.batch(f"{command} || echo status $?", "-N", "4")
    assert output.splitlines()[-1] == "status 7"
    assert "rank 2 on nid003 exited with status 7, first of all ranks" in output


SAVE_AND_REQUEUE = """
import os, signal, sys, time
said = f"saved {os.environ['RANK']}\\n".encode()  # whole: two ranks write at once
signal.signal(signal.SIGUSR1, lambda *_: (os.write(1, said), sys.exit(75)))
time.sleep(100)
"""


def test_ranks_are_told_before_the_job_ends_and_ask_to_be_requeued(slurm, ezpz):
    # a job of one minute, of which some seconds are left for the ranks to start
    words = ["--signal-before", "50s", sys.executable, "-c", SAVE_AND_REQUEUE]
    job = ["salloc", "-Q", "-t", "1", "-N", "2", "-n", "2", ezpz, *words]
    done = slurm.run(job, expect=75, timeout=300)
    assert sorted(done.stdout.splitlines()) == ["saved 0", "saved 1"]
    assert "the job's end is near (--signal-before)" in done.stderr


def test_a_batch_script_of_one_node_starts_its_ranks(slurm, sandbox, program, ezpz, tmp_path):
    command = shlex.join([ezpz, "-n", "2", *program("say_rank"), str(tmp_path)])
    slurm.batch(command, "-N", "1", "-n", "2")
    assert places(sandbox.reports(tmp_path)) == filled(["nid001"], [2])


def test_a_step_of_one_task_starts_its_ranks_on_its_node(slurm, ezpz):
    step = ["srun", "-w", "nid002", "-N", "1", "-n", "1"]
    launch = [ezpz, "-n", "2", "printenv", "SLURMD_NODENAME"]
    done = slurm.run(["salloc", "-Q", "-N", "4", "-n", "8", *step, *launch])
    assert done.stdout.split() == ["nid002", "nid002"]


def test_a_step_of_a_job_of_one_node_starts_its_ranks(slurm, ezpz):
    step = ["srun", "-w", "nid001", "-n", "1", "-c", "2"]
    done = slurm.run([*step, ezpz, "-n", "2", "printenv", "SLURMD_NODENAME"])
    assert done.stdout.split() == ["nid001", "nid001"]


def test_a_rank_of_srun_does_not_launch(slurm, ezpz):
    done = slurm.run(["srun", "-n", "2", ezpz, "-n", "2", "echo", "started"], expect=None)
    assert done.returncode == 2
    assert done.stdout == ""
    for rank in range(2):
        assert f"this process is rank {rank} of 2 already (SLURM_PROCID)" in done.stderr


def test_slurm_s_own_signal_reaches_each_rank_once(slurm, ezpz, tmp_path):
    """As with ``sbatch --signal=USR1@300``, which signals what the steps run."""
    said = tmp_path / "said"
    said.mkdir()
    ranks = [sys.executable, str(PROGRAMS / "rank.py"), str(said), "goes_on"]
    command = shlex.join([ezpz, "-n", "4", "--ppn", "1", *ranks])

    def wait_for(suffix):
        end = time.monotonic() + 120
        while len(found := sorted(said.glob(f"*.{suffix}"))) < 4:
            assert time.monotonic() < end, f"{len(found)} of 4 ranks have {suffix}"
            time.sleep(0.05)
        return found

    with ThreadPoolExecutor() as pool:
        job = pool.submit(slurm.batch, command, "-N", "4")
        try:
            first = json.loads(wait_for("started")[0].read_text())
            slurm.run(["scancel", "--signal=USR1", first["environment"]["SLURM_JOB_ID"]])
            wait_for("signals")
        finally:
            (said / "go").touch()
        job.result()
    assert [file.read_text().split() for file in wait_for("signals")] == [["SIGUSR1"]] * 4
    assert len(wait_for("done")) == 4


def test_an_unmodified_torchrun_script_trains_on_four_nodes(slurm, ezpz, tmp_path):
    # The sandbox's node names are no host's: the ranks could not find MASTER_ADDR by it.
    report = tmp_path / "report.json"
    launch = [ezpz, "--ppn", "1", "--env", "MASTER_ADDR=127.0.0.1", "--env", "OMP_NUM_THREADS=1"]
    script = [sys.executable, str(PROGRAMS / "ddp_tutorial.py"), str(report)]
    slurm.run(["salloc", "-Q", "-N", "4", *launch, *script], timeout=300)
    said = json.loads(report.read_text())
    assert [(one["rank"], one["local_rank"], one["host"]) for one in said] == [
        (rank, 0, host) for rank, host in enumerate(FOUR)
    ]
    for one in said:
        assert one["world_size"] == 4
        assert one["weights"] == said[0]["weights"]
        assert one["losses"][-1] < 0.7 * one["losses"][0]
    assert len({one["losses"][0] for one in said}) == 4, "each trains on its own data"
