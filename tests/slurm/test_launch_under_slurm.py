"""ezpz-launch inside a real job: srun starts its ranks on the job's nodes, as many as are asked."""

import sys

import pytest
from tests.slurm.topology import row

FOUR = ["nid001", "nid002", "nid003", "nid004"]


@pytest.fixture
def ezpz(tool):
    return tool("ezpz-launch")


def assert_places(said, nodes, ranks):
    """Assert that so many ranks are on each of these nodes, in their order."""
    counted = enumerate(zip(nodes, ranks, strict=True))
    size = sum(ranks)
    rows = [(node, at, local, of) for at, (node, of) in counted for local in range(of)]
    expected = [("ezpz", rank, size, local, of, at) for rank, (_, at, local, of) in enumerate(rows)]
    assert [row(one) for one in said] == expected
    assert [one["env"]["SLURMD_NODENAME"] for one in said] == [node for node, *_ in rows]


ALL = ("salloc", "-Q", "-N", "4", "-n", "8")
# As where LaunchParameters=use_interactive_step gives salloc's shell.
INTERACTIVE = (*ALL, "srun", "--interactive", "-Q", "-N", "1", "-n", "1")


@pytest.mark.parametrize(
    ("job", "options", "nodes", "ranks"),
    [
        (ALL, "", FOUR, [2, 2, 2, 2]),
        (ALL, "--exclude nid001 -n 5 --ppn 2", FOUR[1:], [2, 2, 1]),
        (ALL, "--hostfile hosts --ppn 2", ["nid003", "nid001"], [2, 2]),
        (INTERACTIVE, "-n 4 --ppn 1", FOUR, [1, 1, 1, 1]),
    ],
    ids=["as the job says", "not the first, uneven", "hostfile", "interactive"],
)
def test_a_shell_of_a_job_starts_ranks_on_its_nodes(
    *, say, ezpz, tmp_path, job, options, nodes, ranks
):
    (tmp_path / "hosts").write_text("nid003\nnid001\n")
    words = options.replace("hosts", str(tmp_path / "hosts")).split()
    assert_places(say(*job, ezpz, *words, then=("--no-scontrol",)), nodes, ranks)


def test_a_batch_script_starts_ranks_on_all_its_nodes(batch, ezpz):
    said = batch(f"{ezpz} --ppn 2 say --no-scontrol", "-N", "4", "-n", "8")
    assert_places(said, FOUR, [2, 2, 2, 2])


SAVE_AND_REQUEUE = """
import os, signal, sys, time
said = f"saved {os.environ['RANK']}\\n".encode()  # whole: two ranks write at once
signal.signal(signal.SIGUSR1, lambda *_: (os.write(1, said), sys.exit(75)))
time.sleep(100)
"""


def test_ranks_are_told_before_the_job_ends_and_ask_to_be_requeued(slurm, ezpz):
    # a job of one minute, of which 20 s are left for the ranks to start
    words = ["--signal-before", "40s", sys.executable, "-c", SAVE_AND_REQUEUE]
    job = ["salloc", "-Q", "-t", "1", "-N", "2", "-n", "2", ezpz, *words]
    done = slurm.run(job, expect=75)
    assert sorted(done.stdout.splitlines()) == ["saved 0", "saved 1"]
    assert "the job's end is near (--signal-before)" in done.stderr


def test_a_step_of_one_task_starts_its_ranks_on_its_node(say, ezpz):
    job = ("salloc", "-Q", "-w", "nid001,nid002", "-n", "4")
    step = ("srun", "-w", "nid002", "-N", "1", "-n", "1", "-c", "2")
    assert_places(say(*job, *step, ezpz, "-n", "2", then=("--no-scontrol",)), ["nid002"], [2])
