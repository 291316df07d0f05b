"""What a job of PBS asked for decides ranks, cores and threads."""

import json

import pytest

CHUNKS = {
    # select: ranks of each node, CPUs of the node with the fewest
    "2:ncpus=4:mpiprocs=2": ([2, 2], 4),
    "1:ncpus=3:mpiprocs=3+1:ncpus=2:mpiprocs=2": ([3, 2], 2),
    "1:ncpus=4:mpiprocs=2:ompthreads=1": ([2], 2),
    "1:ncpus=4:mpiprocs=2:ompthreads=2": ([2], 4),
    "1:ncpus=1": ([1], 1),
    "1:ncpus=4": ([2], 4),
}


@pytest.mark.parametrize("select", CHUNKS)
def test_chunks_decide_ranks_and_threads(pbs, select):
    ranks, cpus = CHUNKS[select]
    job = pbs.sub("ezpz-launch --launcher hydra --dry-run --json true", "-l", f"select={select}")
    text = pbs.ended(job)
    told = json.loads(text[text.index("{") :])
    assert told["ranks_per_host"] == ranks, text
    # PBS believes in more than this machine has.
    threads = max(1, min(cpus, int(pbs.on("x1n0", "nproc"))) // ranks[0])
    assert told["environment"]["OMP_NUM_THREADS"] == str(threads), told["sources"]


def test_launches_at_once_in_a_job_have_a_port_each(pbs):
    launch = "ezpz-launch -n 2 --launcher spawn sh -c 'sleep 1; echo port $MASTER_PORT'"
    job = pbs.sub(f"{launch} & {launch} & {launch} & wait", "-l", "select=1:ncpus=4")
    ports = [line for line in pbs.ended(job).splitlines() if line.startswith("port ")]
    assert (len(ports), len(set(ports))) == (6, 3)
