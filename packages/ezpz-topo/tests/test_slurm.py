"""Slurm's variables as captured from Slurm 22.05.8; its commands are tested on a real one."""

from datetime import UTC, datetime

import pytest

from ezpz_topo import InvalidVariableError, NodelistError, SchedulerError, get_allocation
from ezpz_topo._checks import check_scheduler

BATCH = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "my job", "SLURM_JOB_PARTITION": "all",
    "SLURM_JOB_NODELIST": "nid[001-003]", "SLURM_JOB_NUM_NODES": "3", "SLURM_NNODES": "3",
    "SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_PROCID": "0",
    "SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "nid001",
}  # fmt: skip
STEP = {
    **BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "nid001", "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NTASKS": "2",
    "SLURM_TASKS_PER_NODE": "2", "SLURM_NNODES": "1",
}  # fmt: skip
SALLOC = {name: value for name, value in BATCH.items() if name not in (
    "SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "SLURMD_NODENAME")}  # fmt: skip
INTERACTIVE = {
    **BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NODELIST": "nid001",
    "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "1",
}  # fmt: skip
HET = {
    "SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2", "SLURM_NTASKS": "4",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "nid001", "SLURM_JOB_NUM_NODES_HET_GROUP_0": "1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "nid[002-003]", "SLURM_JOB_NUM_NODES_HET_GROUP_1": "2",
    "SLURM_JOB_NAME_HET_GROUP_0": "interactive", "SLURM_JOB_PARTITION_HET_GROUP_0": "all",
}  # fmt: skip


def test_a_batch_script():
    job = get_allocation(BATCH)
    assert (job.scheduler, job.job_id, job.name, job.queue) == ("slurm", "7", "my job", "all")
    assert (job.hosts, job.slots, job.num_nodes) == (("nid001", "nid002", "nid003"), (2, 2, 1), 3)
    assert job.on_node
    assert job.sources == {
        "scheduler": "SLURM_JOB_ID", "job_id": "SLURM_JOB_ID", "hosts": "SLURM_JOB_NODELIST",
        "slots": "SLURM_TASKS_PER_NODE", "name": "SLURM_JOB_NAME", "queue": "SLURM_JOB_PARTITION",
        "node_name": "SLURMD_NODENAME",
    }  # fmt: skip


@pytest.mark.parametrize(("env", "num_nodes", "slots", "on_node", "source"), [
    (STEP, 1, (2,), True, "SLURM_STEP_NODELIST"),
    (SALLOC, 3, (2, 2, 1), False, "SLURM_JOB_NODELIST"),
    # an interactive step's shell stands for the whole job; SLURM_TASKS_PER_NODE is the step's
    (INTERACTIVE, 3, None, True, "SLURM_JOB_NODELIST"),
    ({**BATCH, "SLURM_TASKS_PER_NODE": "4(x2),3"}, 3, (4, 4, 3), True, "SLURM_JOB_NODELIST"),
    # no tasks were requested
    ({**BATCH, "SLURM_NTASKS": ""}, 3, None, True, "SLURM_JOB_NODELIST"),
])  # fmt: skip
def test_steps_and_shells(*, env, num_nodes, slots, on_node, source):
    job = get_allocation(env)
    assert (job.num_nodes, job.slots, job.on_node) == (num_nodes, slots, on_node)
    assert job.sources["hosts"] == source


def test_a_heterogeneous_job_is_all_its_components():
    job = get_allocation(HET)
    assert job.hosts == ("nid001", "nid002", "nid003")
    assert (job.name, job.queue) == ("interactive", "all")
    assert job.sources["hosts"] == "SLURM_JOB_NODELIST_HET_GROUP_0 to 1"


@pytest.mark.parametrize(("env", "asked"), [
    ({}, "none"),
    ({"SLURM_CLUSTERS": "a,b"}, "none"),
    ({"SLURM_CLUSTERS": "a,b", "SLURM_CLUSTER_NAME": "c"}, "c"),  # salloc's shell, as far as we see
    ({"SLURM_CLUSTERS": "a,b", "SLURM_CLUSTER_NAME": "c", "SLURMD_NODENAME": "nid001"}, "none"),
    ({"SLURM_CLUSTER_NAME": "c"}, "none"),
])  # fmt: skip
def test_a_job_is_asked_for_on_its_own_cluster(tmp_path, command, env, asked):
    job = "JobId=7 JobName=x\n   UserId=a(1)\n   JobState=RUNNING\n   NodeList=nid001\n"
    note = f'echo "${{SLURM_CLUSTERS-none}}" >>{tmp_path}/asked'
    command("scontrol", f"{note}; [ $1 = ping ] && echo is UP || printf '%s' '{job}'")
    env = {**env, "SLURM_JOB_ID": "7", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert get_allocation(env).hosts == ("nid001",)
    check_scheduler(5.0, {**env, "SLURM_JOB_NODELIST": "nid001"})
    assert set((tmp_path / "asked").read_text().split()) == {asked}


def test_a_job_that_is_over_has_no_hosts_although_slurm_tells_them(tmp_path, command):
    job = "JobId=7 JobName=x\n   UserId=a(1)\n   JobState=COMPLETED\n   NodeList=nid001\n"
    command("scontrol", f"printf '%s' '{job}'")
    with pytest.raises(SchedulerError, match=r"job 7: no nodes in use, state COMPLETED; .* unset"):
        get_allocation({"SLURM_JOB_ID": "7", "PATH": f"{tmp_path}:/usr/bin:/bin"})


def test_the_end_where_slurm_tells():
    env = {**BATCH, "SLURM_JOB_END_TIME": "1795226400"}
    assert get_allocation(env).ends_at == datetime(2026, 11, 21, 2, 0, tzinfo=UTC)
    assert get_allocation({**BATCH, "SLURM_JOB_END_TIME": "4294967295"}).ends_at is None


@pytest.mark.parametrize(("changed", "error", "what"), [
    ({"SLURM_JOB_NUM_NODES": "2"}, InvalidVariableError, "3 nodes, SLURM_JOB_NUM_NODES='2'"),
    ({"SLURM_TASKS_PER_NODE": "2(x2)"}, InvalidVariableError, "2 nodes; expected 3"),
    ({"SLURM_TASKS_PER_NODE": "2(x999999999)"}, InvalidVariableError, "999999999 nodes"),
    ({"SLURM_TASKS_PER_NODE": "two"}, InvalidVariableError, "'two' does not parse"),
    ({"SLURM_JOB_NODELIST": "nid[001-"}, NodelistError, "not closed"),
    ({"SLURM_HET_SIZE": "many"}, InvalidVariableError, "many"),
    ({"SLURM_JOB_NODELIST": ""}, SchedulerError, "'scontrol' cannot be started"),
    ({"SLURM_JOB_NODELIST": "", "SLURM_JOB_ID": "--help"}, InvalidVariableError, "--help"),
    ({"SLURM_HET_SIZE": "0"}, InvalidVariableError, "a number of components"),
])  # fmt: skip
def test_variables_that_contradict_each_other(changed, error, what):
    with pytest.raises(error, match="".join(f"[{c}]" if c in "[](" else c for c in what)):
        get_allocation({**BATCH, "PATH": "/nonexistent", **changed})


@pytest.mark.parametrize("launcher", [
    {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
    {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x"},
    {},
], ids=["hydra", "torchrun", "alone"])  # fmt: skip
def test_a_step_left_over_from_another_job_is_not_where_we_are(launcher):
    stale = {"SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "old[1-2]", "SLURM_STEP_NUM_NODES": "2",
             "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}  # fmt: skip
    assert get_allocation({**BATCH, **stale, **launcher}).hosts == ("nid001", "nid002", "nid003")
