"""What is known of this process and its job, how large the world is, and hypothetical jobs."""

import pytest

import ezpz_topo
from ezpz_topo import IncompleteLauncherError, MachineError, get_hostname, imagine

HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
FLUX = {"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "12", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
BATCH = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "nid[001-002]", "SLURM_NTASKS": "3",
    "SLURM_TASKS_PER_NODE": "2,1", "SLURMD_NODENAME": "nid001", "SLURM_JOB_NAME": "probe",
}  # fmt: skip
NO_DEVICE = {"TORCH_DEVICE": "cpu"}


def rows_of(env):
    return {name: (value, source) for name, value, source in ezpz_topo.detect(env).explain()}


def test_a_jobs_facts_have_rows_of_their_own():
    rows = rows_of(BATCH)
    assert rows["job id"] == ("7", "SLURM_JOB_ID")
    assert rows["job name"] == ("probe", "SLURM_JOB_NAME")
    assert rows["hosts"] == ("nid[001-002]", "SLURM_JOB_NODELIST")
    assert rows["slots"] == (3, "SLURM_TASKS_PER_NODE")
    assert (rows["scheduler"], rows["launcher"][0]) == (("slurm", "SLURM_JOB_ID"), "none")
    assert rows["ends at"] == (None, "not told by slurm's variables")
    assert rows["machine"][0] == "generic-slurm"
    assert all(source for _, source in rows.values())


def test_what_is_not_known_is_said_to_be_unknown_and_why():
    rows = rows_of(FLUX)
    assert rows["local world size"] == (None, "not told by flux")
    assert rows["nodes"][0] is rows["node index"][0] is None
    assert "start the ranks with ezpz-launch" in rows["nodes"][1]


# How large the world is.


@pytest.mark.parametrize(("env", "ranks", "total", "nodes", "devices"), [
    (NO_DEVICE, 1, 1, 1, 0),
    # the nodes of a job count also where no ranks run; room is what the scheduler foresees
    ({**BATCH, **NO_DEVICE}, 1, 3, 2, 0),
    # one rank a device: a login node, where the machine's file tells of its nodes
    ({**BATCH, "SLURMD_NODENAME": "", "EZPZ_MACHINE": "perlmutter"}, 1, 8, 2, 4),
    # never less than the ranks that run
    ({**HYDRA, "MPI_LOCALRANKID": "5", "MPI_LOCALNRANKS": "8", **NO_DEVICE}, 8, 8, 1, 0),
    # nodes without a scheduler are those of the ranks
    ({**TORCHRUN, "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3", **NO_DEVICE}, 12, 12, 3, 0),
])  # fmt: skip
def test_sizes(env, ranks, total, nodes, devices):
    assert ezpz_topo.get_world_size(env) == ezpz_topo.get_world_size_in_use(env) == ranks
    assert ezpz_topo.get_world_size(env, in_use=True) == ranks
    assert ezpz_topo.get_world_size_total(env) == ezpz_topo.get_world_size(env, total=True) == total
    assert ezpz_topo.get_num_nodes(env) == nodes
    assert ezpz_topo.get_gpus_per_node(env) == devices
    assert ezpz_topo.get_node_index(env) == int(env.get("GROUP_RANK", 0))


def test_a_node_that_shows_no_device_has_none_whatever_its_machine(monkeypatch):
    # Perlmutter's CPU nodes are Perlmutter too.
    asked = []
    count = ezpz_topo.get_accelerators
    monkeypatch.setattr(
        "ezpz_topo._topology.get_accelerators",
        lambda env, **options: asked.append(options["fallback"]) or count(env, **options),
    )
    ezpz_topo.get_gpus_per_node({**BATCH, "EZPZ_MACHINE": "perlmutter"})
    assert asked == [None]


def test_total_and_in_use_at_once_make_no_sense():
    with pytest.raises(ValueError, match="expected one"):
        ezpz_topo.get_world_size({}, total=True, in_use=True)


# Division would be a guess: it is right where the layout is even, which no rank can see alone.
@pytest.mark.parametrize("env", [FLUX, HYDRA, {**HYDRA, "PMI_SIZE": "7"}])
def test_several_nodes_that_nobody_counts_are_an_error(env):
    with pytest.raises(IncompleteLauncherError, match="expected to be told the number of nodes"):
        ezpz_topo.get_num_nodes(env)


def pbs_job(tmp_path, hosts):
    path = tmp_path / "nodes"
    path.write_text("".join(f"{host}\n" for host in hosts).replace("HERE", get_hostname()))
    return {"PBS_JOBID": "1.pbs-0001", "PBS_NODEFILE": str(path)}


@pytest.mark.parametrize(("rank", "hosts", "index"), [
    ({}, ["elsewhere.example", "HERE.hsn.example"], 1),
    ({"PMI_RANK": "3"}, ["elsewhere.example", "HERE.hsn.example"], 1),  # in turn
    # ranks 0 and 1 here, four on the third node, none on the first
    ({"PMI_RANK": "0", "PMI_SIZE": "6", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
     ["x", "HERE", "y"], None),
    ({}, ["a", "b", "c", "HERE"], None),  # some nodes have no ranks
    ({}, ["a", "b"], None),  # a host outside the job
    # all of them here, on the first node that has ranks: those of the job are two
    ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, ["x", "HERE"], 0),
])  # fmt: skip
def test_node_index_is_the_hosts_place_only_where_every_node_has_ranks(
    tmp_path, rank, hosts, index
):
    env = {**HYDRA, **rank, **pbs_job(tmp_path, hosts)}
    assert ezpz_topo.get_num_nodes(env) == len(hosts)
    if index is not None:
        assert ezpz_topo.get_node_index(env) == index
        return
    with pytest.raises(IncompleteLauncherError, match="does not tell which node"):
        ezpz_topo.get_node_index(env)


def test_a_torchrun_node_beyond_its_group_is_impossible():
    with pytest.raises(ezpz_topo.InvalidVariableError, match="GROUP_RANK=2"):
        ezpz_topo.get_node_index({**TORCHRUN, "GROUP_RANK": "2", "GROUP_WORLD_SIZE": "2"})


# Hypothetical jobs.


def test_four_nodes_of_aurora_from_anywhere():
    aurora = imagine("aurora", 4, {"SLURM_JOB_ID": "7", "PMI_RANK": "1"})
    assert (aurora.machine.name, aurora.allocation.scheduler) == ("aurora", "pbs")
    assert aurora.allocation.hosts == ("node0001", "node0002", "node0003", "node0004")
    assert aurora.allocation.on_node
    assert (aurora.accelerators.device_type, aurora.accelerators.count) == ("xpu", 12)
    assert aurora.rank.world_size == 1
    assert all(source for _, _, source in aurora.explain())
    assert "hypothetical: 4 nodes of aurora" in aurora.allocation.sources["hosts"]
    assert imagine("workstation").allocation.scheduler == "none"


@pytest.mark.parametrize(("name", "nodes"), [("atlantis", 1), ("aurora", 0), ("aurora", 10**9)])
def test_what_cannot_be_imagined(name, nodes):
    with pytest.raises(MachineError, match="expected"):
        imagine(name, nodes, {})
