import time
from dataclasses import replace

import pytest

from ezpz_launch import LaunchError, Request, UsageError, plan
from ezpz_launch._identify import Launcher
from ezpz_launch.launchers import argv
from ezpz_topo import (
    Accelerators,
    Allocation,
    RankInfo,
    Topology,
    get_machine_info,
    imagine,
)

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


HYDRA = Launcher("/venv/bin/mpiexec", "hydra", "--version says HYDRA")


def planned(topology, nproc=None, *, env=None, launcher=HYDRA, added=(), **options):
    return plan(
        topology,
        Request(COMMAND, nproc, env=added, **options),
        launcher,
        hosts=topology.allocation.hosts,
        hosts_source="no job is running",
        hostfile="/tmp/hosts",
        port=29500,
        user_env=env or {},
    )


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
    own = {"nproc", "ppn", "hosts", "launcher", "cpu_bind"}
    decisions = {*own, *planned(LAPTOP).environment}
    assert decisions == set(planned(LAPTOP).sources)


def test_a_job_of_one_node_is_launched_here():
    node = replace(LAPTOP, allocation=job("slurm", "7", "laptop"))
    assert planned(node).on_this_host
    assert planned(node).nproc == 4


def test_several_hosts_never_meet_at_localhost():
    several = planned(replace(LAPTOP, allocation=job("pbs", "1.pbs", "a", "b")))
    assert not several.on_this_host
    assert several.environment["MASTER_ADDR"] == "a"
    assert several.placement.ranks == (4, 4)


def test_the_fast_network_where_it_is_known():
    aurora = imagine("aurora", 2, {})
    assert planned(aurora).environment["MASTER_ADDR"] == "node0001.hsn.cm.aurora.alcf.anl.gov"


def test_slots_of_a_hostfile_are_ranks_of_a_host():
    several = replace(LAPTOP, allocation=job("none", None, "a", "b"))
    told = plan(
        several, Request(COMMAND), HYDRA, hosts=["a", "b"], hosts_source="argument", slots=3,
        hostfile="f", port=1, user_env={},
    )  # fmt: skip
    assert told.placement.ranks == (3, 3)
    assert "slots of the hostfile" in told.sources["ppn"]


def test_what_the_user_sets_outranks_the_machine():
    aurora, pals = imagine("aurora", 2, {}), Launcher("mpiexec", "pals", "")
    env = planned(aurora, env={"TMPDIR": "/scratch"}, launcher=pals).environment
    assert "TMPDIR" not in env
    assert env["CCL_KVS_MODE"] == "mpi"


def test_env_of_the_request_comes_last():
    told = planned(imagine("polaris", 1, {}), added=("CCL_KVS_MODE=pmi", "X=a=b"))
    assert (told.environment["CCL_KVS_MODE"], told.environment["X"]) == ("pmi", "a=b")
    assert told.sources["X"] == "--env"


@pytest.mark.parametrize(
    ("options", "bound", "why"),
    [
        ({}, 12, "pytorch: default_cpu_bind"),
        ({"cpu_bind": "running-jobs"}, 12, "running-jobs: --cpu-bind"),
        ({"cpu_bind": "none"}, 0, "--cpu-bind"),
        ({"cpu_bind": "0-7:8-15", "ppn": 2}, 2, "0-7:8-15: --cpu-bind"),
        ({"ppn": 13}, 0, "13 ranks a host are more than the 12 ranges"),
    ],
)
def test_cpu_binding(options, bound, why):
    pals = Launcher("mpiexec", "pals", "")
    told = planned(imagine("aurora", 1, {}), launcher=pals, **options)
    assert len(told.cpu_bind) == bound
    assert why in told.sources["cpu_bind"]


@pytest.mark.parametrize("wrong", ["pytorhc", "depth", "7-0", "0-7"])
def test_a_binding_that_is_none(wrong):
    pals = Launcher("mpiexec", "pals", "")
    with pytest.raises(UsageError, match="expected"):
        planned(imagine("aurora", 1, {}), launcher=pals, cpu_bind=wrong)


def test_a_launcher_without_lists_refuses_one_and_is_not_told_the_machines():
    with pytest.raises(UsageError, match="hydra takes no list of cores"):
        planned(imagine("aurora", 1, {}), cpu_bind="pytorch")
    assert planned(imagine("aurora", 1, {})).cpu_bind == ()


def test_no_binding_is_said_to_a_launcher_that_binds_by_itself():
    for name, kind in (("crux", "pals"), ("frontier", "srun")):
        told = planned(imagine(name, 1, {}), launcher=Launcher(kind, kind, ""), cpu_bind="none")
        flags = [word for word in argv(told) if "cpu-bind" in word or "depth" in word]
        assert flags == ["--cpu-bind=none"]


def test_so_many_hosts_are_asked_for_and_so_many_are_used():
    told = planned(imagine("aurora", 4, {}), 4, nodes=4)
    assert told.placement.ranks == (1, 1, 1, 1)
    assert told.sources["ppn"] == "-n 4 / -N 4"


def test_the_ranks_are_told_the_machine_that_was_named():
    assert planned(LAPTOP, machine="polaris").environment["EZPZ_MACHINE"] == "polaris"


@pytest.mark.parametrize("host", ["laptop", "LAPTOP.example.org", "localhost", "127.0.0.1"])
def test_this_host_by_any_of_its_names(host):
    told = plan(
        LAPTOP, Request(COMMAND), HYDRA, hosts=[host], hosts_source="argument", hostfile="f",
        port=1, user_env={},
    )  # fmt: skip
    assert told.on_this_host


def test_localhost_among_several_hosts():
    with pytest.raises(UsageError, match="localhost among several hosts"):
        plan(
            LAPTOP, Request(COMMAND), HYDRA, hosts=["localhost", "b"], hosts_source="argument",
            hostfile="f", port=1, user_env={},
        )  # fmt: skip


def test_torchrun_is_for_one_host():
    several = planned(imagine("aurora", 2, {}), launcher=Launcher("torchrun", "torchrun", ""))
    with pytest.raises(LaunchError, match="one host, not on 2"):
        argv(several)


def test_threads_are_the_cores_that_a_rank_is_bound_to():
    pals = Launcher("mpiexec", "pals", "")
    told = planned(imagine("aurora", 1, {}), launcher=pals, cpu_bind="running-jobs")
    assert told.environment["OMP_NUM_THREADS"] == "8"


@pytest.mark.parametrize(("machine", "kind"), [("aurora", "pals"), ("frontier", "srun")])
def test_10080_hosts_are_planned_at_once(machine, kind):
    topology, launcher = imagine(machine, 10_080, {}), Launcher(kind, kind, "")
    begin = time.process_time()
    told = planned(topology, 120_960, launcher=launcher, ppn=12)
    assert argv(told)
    assert (told.nproc, len(told.placement.hosts)) == (120_960, 10_080)
    # 8 ms here; the promise is 100 ms.
    assert time.process_time() - begin < 1.0


@pytest.mark.parametrize("nproc", [0, -1])
def test_too_few_ranks(nproc):
    with pytest.raises(UsageError, match=f"-n {nproc}: expected at least 1 rank"):
        Request(COMMAND, nproc)


def test_no_command():
    with pytest.raises(UsageError, match="no command"):
        Request(())
