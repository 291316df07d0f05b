from dataclasses import replace

import pytest

from ezpz_launch import LaunchError, Request, UsageError, plan
from ezpz_topo import Accelerators, Allocation, RankInfo, Topology, get_machine_info

LAPTOP = Topology(
    rank=RankInfo(0, 1, 0, 1, 0, "none"),
    allocation=Allocation(
        "none", None, ("laptop",), node_name="laptop", sources={"hosts": "no job"}
    ),
    machine=get_machine_info({}, hostname="laptop"),
    accelerators=Accelerators("cpu", 0, "none found"),
    hostname="laptop",
    cpu_count=8,
    cpu_source="CPU affinity of this process",
    cpus_per_node=8,
    cpus_per_node_source="os.cpu_count()",
)
COMMAND = ("python", "train.py")


def job(scheduler, job_id, *hosts, on_node=True):
    node_name = hosts[0] if on_node else None
    return Allocation(scheduler, job_id, hosts, node_name=node_name, sources={"hosts": "its list"})


def planned(topology, nproc=None, env=None):
    return plan(topology, Request(COMMAND, nproc), port=29500, user_env=env or {})


@pytest.mark.parametrize(("cores", "ranks"), [(1, 2), (2, 2), (8, 4), (9, 4), (128, 64)])
def test_without_devices_one_rank_per_two_cores_at_least_two(cores, ranks):
    assert planned(replace(LAPTOP, cpu_count=cores)).nproc == ranks


def test_one_rank_a_device():
    node = replace(LAPTOP, accelerators=Accelerators("cuda", 4, "4 x /dev/nvidia<N>"))
    assert planned(node).nproc == 4
    assert planned(node).sources["nproc"] == "one a device: 4 x /dev/nvidia<N>"
    assert planned(node, nproc=2).nproc == 2


def test_devices_that_cannot_be_counted_are_not_guessed():
    node = replace(LAPTOP, accelerators=Accelerators("xpu", 0, "TORCH_DEVICE=xpu"))
    with pytest.raises(LaunchError, match="how many ranks"):
        planned(node)
    assert planned(node, nproc=12).nproc == 12


def test_the_ranks_environment():
    assert planned(LAPTOP).environment == {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "2",
    }


def test_threads_that_the_user_set_are_kept():
    assert "OMP_NUM_THREADS" not in planned(LAPTOP, env={"OMP_NUM_THREADS": "7"}).environment


def test_every_decision_has_a_source():
    decisions = {"nproc", "hosts", *planned(LAPTOP).environment}
    assert decisions == set(planned(LAPTOP).sources)


@pytest.mark.parametrize(
    ("elsewhere", "words"),
    [
        (job("slurm", "7", "a", "b", "c", "d"), "slurm job 7: 4 nodes \\(its list\\).*srun"),
        (job("slurm", "7", "a", on_node=False), "not on the job's node"),
        (job("pbs", "1.pbs", "a", "b"), "pbs job 1.pbs: 2 nodes.*mpiexec"),
    ],
)
def test_other_nodes_are_refused_not_forgotten(elsewhere, words):
    with pytest.raises(LaunchError, match=words):
        planned(replace(LAPTOP, allocation=elsewhere))


def test_a_job_of_one_node_is_launched():
    assert planned(replace(LAPTOP, allocation=job("slurm", "7", "a"))).nproc == 4


@pytest.mark.parametrize("nproc", [0, -1])
def test_too_few_ranks(nproc):
    with pytest.raises(UsageError, match=f"-n {nproc}: expected at least 1 rank"):
        Request(COMMAND, nproc)


def test_no_command():
    with pytest.raises(UsageError, match="no command"):
        Request(())
