"""Which hosts, how many ranks, and of which cores: without any launcher."""

from dataclasses import replace

import pytest

from ezpz_launch import LaunchError, Request, UsageError
from ezpz_launch._placement import arrange
from ezpz_topo import Accelerators, imagine

COMMAND = ("python", "train.py")
# One host of 8 cores, of which this process may use 2.
HERE = replace(
    imagine("workstation", 1, {}),
    cpu_count=2,
    cpu_source="affinity",
    cpus_per_node=8,
    cpus_per_node_source="os.cpu_count()",
)


def job(nodes, *, on_node=True, machine="generic-slurm", **facts):
    topology = imagine(machine, nodes, {})
    first = topology.allocation.hosts[0] if on_node else None
    allocation = replace(topology.allocation, node_name=first)
    told = {"cpu_count": 2, "cpus_per_node": 8, "cpus_per_node_source": "SLURM_CPUS_ON_NODE"}
    return replace(topology, allocation=allocation, **told, **facts)


def arranged(topology, hosts=None, *, slots=0, source="the job", **options):
    hosts = topology.allocation.hosts if hosts is None else hosts
    request = Request(COMMAND, **options)
    return arrange(topology, request, hosts=hosts, hosts_source=source, slots=slots)


def test_this_host_has_the_cores_that_this_process_may_use():
    told = arranged(HERE)
    assert told.on_this_host
    assert (told.cores, told.cores_source) == (2, "affinity")
    assert told.placement.nproc == 2


def test_several_hosts_have_the_cores_of_a_node():
    told = arranged(job(2))
    assert not told.on_this_host
    assert (told.cores, told.cores_source) == (8, "SLURM_CPUS_ON_NODE")
    assert told.placement.ranks == (4, 4)


def test_another_host_has_not_our_affinity_either():
    told = arranged(job(2), exclude="node0001")
    assert not told.on_this_host
    assert (told.cores, told.placement.ranks) == (8, (4,))


def test_one_host_of_several_that_is_this_one():
    told = arranged(job(2), nproc=1)
    assert told.on_this_host
    assert told.cores == 2


def test_a_login_node_tells_nothing_of_the_jobs_cores():
    # Crux's file says 128; the login node's own 8 are no fact of its nodes.
    told = arranged(job(2, on_node=False, machine="crux"))
    assert (told.cores, told.cores_source) == (128, "cores_per_node of crux.toml")
    assert told.placement.ranks == (64, 64)


def test_cores_are_not_hardware_threads_where_the_machines_file_tells():
    told = arranged(replace(job(2, machine="crux"), cpus_per_node=256))
    assert (told.cores, told.placement.ppn) == (128, 64)


def test_part_of_a_node_is_no_whole_one():
    assert arranged(replace(job(2, machine="crux"), cpus_per_node=16)).cores == 16


def test_slots_are_those_of_the_hosts_in_use():
    three = job(3)
    hosts = three.allocation.hosts
    options = {"slots": (1, 4, 6), "source": "argument"}
    assert arranged(three, hosts, **options).placement.ranks == (1, 1, 1)
    assert arranged(three, hosts, **options, exclude="node0001").placement.ranks == (4, 4)
    assert arranged(three, hosts, **options, include="node0003").placement.ranks == (6,)
    assert arranged(three, hosts[1:], slots=(0, 6), source="argument").placement.ppn == 6


PBS_JOB = replace(
    job(2, machine="generic-pbs"), cpus_per_node=6, cpus_per_node_source="exec_host and NCPUS"
)


@pytest.mark.parametrize(
    ("slots", "ranks"),
    [
        ((3, 2), (3, 2)),  # 1:ncpus=3:mpiprocs=3+1:ncpus=2:mpiprocs=2
        ((2, 2), (2, 2)),
        ((3, 1), (3, 1)),
        ((1, 1), (3, 3)),  # no mpiprocs: by ncpus
        ((1, 3), (1, 1)),
    ],
)
def test_mpiprocs_of_a_pbs_job_decide(slots, ranks):
    told = arranged(PBS_JOB, slots=slots)
    assert told.placement.ranks == ranks
    assert ("1, 3; 1 ranks a host are started" in told.warning) == (slots == (1, 3))
    assert told.placement.source.startswith(f"{sum(ranks)}: " if len(set(ranks)) > 1 else "2 x ")


def test_slots_of_which_only_the_last_hosts_differ():
    assert arranged(job(3), slots=(4, 4, 3)).placement.ranks == (4, 4, 3)
    assert arranged(job(2), slots=(4, 3), source="argument").placement.ranks == (4, 3)
    # The last one does not tell: none is given more than it has.
    assert arranged(job(3), slots=(4, 2, 0), source="argument").placement.ranks == (2, 2, 2)
    assert arranged(job(2), slots=(4, 3), nproc=2).placement.ranks == (2,)
    assert arranged(job(2), slots=(4, 3), ppn=1).placement.ranks == (1, 1)


def test_a_job_of_one_cpu_has_one_rank():
    alone = job(1, machine="generic-pbs", cpu_source="NCPUS")
    told = arranged(replace(alone, cpu_count=1), slots=(1,))
    assert (told.placement.ranks, told.cores, told.cores_source) == ((1,), 1, "NCPUS")


@pytest.mark.parametrize(("slots", "ppn"), [((2, 2), 2), ((1, 1), 4), ((8, 8), 4)])
def test_mpiprocs_where_there_are_devices_are_at_most_one_a_device(slots, ppn):
    devices = Accelerators("cuda", 4, "4 x /dev/nvidia<N>")
    assert arranged(replace(PBS_JOB, accelerators=devices), slots=slots).placement.ppn == ppn


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nproc": 4, "nodes": 3}, "-n 4 on -N 3 hosts: 2 ranks each .* fill 2 of them"),
        ({"nproc": 4, "nodes": 2, "ppn": 4}, r"-n 4 on -N 2 hosts: 4 ranks each \(--ppn\) fill 1"),
        (
            {"nproc": 2, "nodes": 3},
            "-n 2 on -N 3 hosts: 1 ranks each .* expected -N 2, or -n fr",
        ),
        (
            {"nproc": 4, "only_ranks": (0, 4)},
            r"--only-ranks 4: there are 4 ranks \(-n\); .*0 to 3",
        ),
        ({"one_device": True}, "--one-device: no device to show"),
    ],
)
def test_numbers_that_contradict_each_other(options, message):
    with pytest.raises(UsageError, match=message):
        arranged(job(3), **options)


def test_one_device_a_rank_wants_as_many_devices():
    devices = Accelerators("cuda", 4, "4 x /dev/nvidia<N>")
    node = job(2, accelerators=devices)
    assert arranged(node, one_device=True).placement.ranks == (4, 4)
    with pytest.raises(UsageError, match=r"--one-device with 8 ranks a host \(--ppn\): there "):
        arranged(node, one_device=True, ppn=8)


def test_devices_that_cannot_be_counted_are_not_guessed():
    node = job(1, accelerators=Accelerators("xpu", 0, "TORCH_DEVICE=xpu"))
    with pytest.raises(LaunchError, match="how many ranks"):
        arranged(node)


def test_cores_that_nobody_tells():
    told = arranged(imagine("generic-pbs", 2, {}))
    assert told.placement.ranks == (2, 2)
    assert "cores are not told by generic-pbs.toml" in told.placement.source
