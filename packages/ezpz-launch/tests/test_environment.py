"""What is added to the ranks' environment beside what the user and the scheduler set."""

import pytest

from ezpz_launch import Request, plan
from ezpz_launch._environment import users_own
from ezpz_launch._identify import Launcher
from ezpz_topo import imagine

PBS = {
    "PBS_ENVIRONMENT": "PBS_BATCH",
    "PBS_JOBID": "1.pbs-0001",
    "NCPUS": "64",
    "OMP_NUM_THREADS": "64",
    "TMPDIR": "/var/tmp/pbs.1.pbs-0001",
}


def planned(machine, kind, *, env=None, **options):
    topology = imagine(machine, options.get("nodes", 2), {})
    return plan(
        topology,
        Request(("true",), **options),
        Launcher("x", kind, ""),
        hosts=topology.allocation.hosts,
        hosts_source="the job",
        hostfile="f",
        port=1,
        user_env=env or {},
    )


@pytest.mark.parametrize(
    ("changed", "own"),
    [
        ({}, set()),
        ({"OMP_NUM_THREADS": "4"}, {"OMP_NUM_THREADS"}),
        ({"TMPDIR": "/scratch/me"}, {"TMPDIR"}),
        ({"PBS_ENVIRONMENT": ""}, {"OMP_NUM_THREADS", "TMPDIR"}),
        ({"NCPUS": ""}, {"OMP_NUM_THREADS"}),
    ],
)
def test_what_pbs_sets_for_every_job_is_no_choice(changed, own):
    assert users_own({**PBS, **changed}) & {"OMP_NUM_THREADS", "TMPDIR"} == own


def test_pbs_does_not_decide_threads_and_temporary_folder():
    told = planned("aurora", "pals", env=PBS)
    assert told.environment["OMP_NUM_THREADS"] == "4"
    assert "64 is PBS's, not the user's" in told.sources["OMP_NUM_THREADS"]
    assert told.environment["TMPDIR"] == "/tmp"
    kept = planned("aurora", "pals", env={**PBS, "OMP_NUM_THREADS": "2"})
    assert "OMP_NUM_THREADS" not in kept.environment


@pytest.mark.parametrize(("kind", "kept"), [("pals", True), ("hydra", False), ("spawn", False)])
def test_variables_of_a_launcher_are_for_that_launcher(kind, kept):
    told = planned("aurora", kind)
    assert ("CCL_PROCESS_LAUNCHER" in told.environment) is kept
    assert ("CCL_KVS_MODE" in told.environment) is kept
    assert told.environment["FI_MR_CACHE_MONITOR"] == "userfaultfd"
    assert any("CCL_PROCESS_LAUNCHER" in note for note in told.notes) is not kept


def test_variables_of_an_option_outrank_the_machines_and_not_the_users():
    told = planned("aurora", "pals", options=("scale",), env={"CCL_OP_SYNC": "0"})
    assert told.environment["FI_CXI_CQ_FILL_PERCENT"] == "30"
    assert told.sources["FI_CXI_CQ_FILL_PERCENT"] == "--option scale"
    assert "CCL_OP_SYNC" not in told.environment
    assert told.sources["--option scale"] == "at scale"


@pytest.mark.parametrize(
    ("machine", "kind", "options", "threads"),
    [
        ("frontier", "srun", {}, "7"),  # the bind list
        ("frontier", "srun", {"cpu_bind": "none"}, None),
        ("perlmutter", "srun", {}, "32"),  # -c 32
        ("perlmutter", "srun", {"ppn": 2}, "64"),
        ("crux", "pals", {"ppn": 4}, "32"),  # --depth
        ("polaris", "pals", {"options": ("depth",)}, "8"),
    ],
)
def test_threads_are_the_cores_that_a_rank_is_bound_to(machine, kind, options, threads):
    told = planned(machine, kind, **options)
    if threads is None:
        assert told.sources["OMP_NUM_THREADS"].startswith("64 cores / 8 ranks")
    else:
        assert told.environment["OMP_NUM_THREADS"] == threads


def test_what_open_mpi_is_to_name():
    env = {"PATH": "/bin", "TMPDIR": "/scratch", "OMP_NUM_THREADS": "3", "HOME": "/me"}
    told = planned("aurora", "openmpi", env=env)
    # the user's own TMPDIR stands in place of the machine's, and must reach the other hosts
    assert {"PATH", "TMPDIR", "OMP_NUM_THREADS", "MASTER_ADDR"} <= set(told.exported)
    assert not {"HOME", "LD_LIBRARY_PATH"} & set(told.exported)
    assert len(set(told.exported)) == len(told.exported)
