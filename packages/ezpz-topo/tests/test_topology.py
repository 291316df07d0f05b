import ezpz_topo
from ezpz_topo import expand_nodelist


def rows_of(env):
    return {name: (value, source) for name, value, source in ezpz_topo.detect(env).explain()}


def test_detect_puts_a_source_to_every_value():
    env = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2",
           "RANK": "0"}  # fmt: skip
    rows = rows_of(env)
    assert rows["rank"] == (1, "PMI_RANK")
    assert rows["world size"] == (2, "PMI_SIZE")
    assert rows["nodes"] == (1, "every rank is on this node")
    assert rows["scheduler"][0] == "none"
    assert all(source for _, source in rows.values())
    assert any("RANK=0" in note for note in ezpz_topo.detect(env).notes)


def test_a_jobs_facts_have_rows_of_their_own():
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "nid[001-003]", "SLURM_JOB_NAME": "probe"}
    rows = rows_of(env)
    assert rows["job id"] == ("7", "SLURM_JOB_ID")
    assert rows["job name"] == ("probe", "SLURM_JOB_NAME")
    assert rows["hosts"] == ("nid[001-003]", "SLURM_JOB_NODELIST")
    assert rows["ends at"] == (None, "not told by slurm's variables")
    assert rows["machine"][0] == "generic-slurm"


def test_what_is_not_known_is_said_to_be_unknown_and_why():
    env = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "0"}
    rows = rows_of(env)
    assert rows["local world size"] == (None, "not told by flux")
    assert rows["nodes"][0] is rows["node index"][0] is None
    assert "start the ranks with ezpz-launch" in rows["nodes"][1]


def test_detect_reads_the_real_environment():
    topology = ezpz_topo.detect()
    assert topology.hostname == ezpz_topo.get_hostname()
    assert topology.cpu_count >= 1


def test_one_of_120960_ranks_on_10080_nodes():
    env = {
        "PALS_RANKID": "120959", "PMI_RANK": "120959", "PMI_SIZE": "120960",
        "PALS_LOCAL_RANKID": "11", "PALS_LOCAL_SIZE": "12", "PALS_NODEID": "10079",
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "x[1000-1139]c0s[0-71]",
        "SLURM_JOB_NUM_NODES": "10080", "SLURM_NTASKS": "120960",
        "SLURM_TASKS_PER_NODE": "12(x10080)",
    }  # fmt: skip
    topology = ezpz_topo.detect(env)
    assert (topology.rank.rank, topology.rank.world_size) == (120959, 120960)
    assert topology.allocation.num_nodes == 10080
    assert sum(topology.allocation.slots) == 120960
    assert ezpz_topo.get_node_index(env) == 10079
    rows = rows_of(env)
    assert expand_nodelist(rows["hosts"][0]) == list(topology.allocation.hosts)
