"""Every row of the launcher table, and every combination that misleads."""

import itertools
import os
import subprocess
import sys

import pytest

from ezpz_topo import (
    Ancestor,
    IncompleteLauncherError,
    InvalidVariableError,
    LauncherConflictError,
    get_local_device,
    get_local_world_size,
    get_rank,
    get_rank_info,
    get_world_size,
)

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}  # fmt: skip
PALS_PMIX = {"PALS_RANKID": "5", "PMIX_RANK": "5", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4"}
PALS_CRAY_PMI = {
    **PALS_PMIX, "PALS_NODEID": "1", "PMI_RANK": "5", "PMI_SIZE": "8",
    "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4",
}  # fmt: skip
MVAPICH2 = {
    "MV2_COMM_WORLD_RANK": "5", "MV2_COMM_WORLD_SIZE": "8",
    "MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_LOCAL_SIZE": "4",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NTASKS": "16",
}  # fmt: skip
FLUX = {"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1"}
JSRUN = {
    "JSM_NAMESPACE_RANK": "5", "JSM_NAMESPACE_SIZE": "8",
    "JSM_NAMESPACE_LOCAL_RANK": "1", "JSM_NAMESPACE_LOCAL_SIZE": "4",
}  # fmt: skip
STAMP = {
    "EZPZ_RANK": "5", "EZPZ_WORLD_SIZE": "8", "EZPZ_LOCAL_RANK": "1",
    "EZPZ_LOCAL_WORLD_SIZE": "4", "EZPZ_NODE_RANK": "1", "EZPZ_LAUNCHER": "pmi",
}  # fmt: skip

ROWS = {
    "ezpz": (STAMP, 4, 1),
    "torchrun": (TORCHRUN, 4, 1),
    "openmpi": (OPENMPI, 4, None),
    "mvapich2": (MVAPICH2, 4, None),
    "pals": (PALS_CRAY_PMI, 4, 1),
    "pmi": (HYDRA, 4, None),
    "flux": (FLUX, None, None),
    "jsrun": (JSRUN, 4, None),
    "slurm": (SRUN, 4, 1),
}


@pytest.mark.parametrize("launcher", ROWS)
def test_each_launcher_alone(launcher):
    env, local_world_size, node_rank = ROWS[launcher]
    info = get_rank_info(env)
    assert (info.launcher, info.rank, info.world_size, info.local_rank) == (launcher, 5, 8, 1)
    assert (info.local_world_size, info.node_rank) == (local_world_size, node_rank)
    assert info.sources["rank"] in env
    assert info.notes == ()


def test_deepspeed_says_local_size():
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}
    assert get_local_world_size(env) == 4


def test_no_launcher_is_one_process():
    info = get_rank_info({})
    assert (info.rank, info.world_size, info.local_world_size, info.launcher) == (0, 1, 1, "none")
    assert "no launcher" in info.sources["rank"]


def test_all_ranks_on_one_node_is_node_0():
    env = {**HYDRA, "MPI_LOCALNRANKS": "8", "MPI_LOCALRANKID": "5"}
    assert get_rank_info(env).node_rank == 0


# Combinations that mislead.


def test_sbatch_body_is_one_process_not_rank_0_of_4():
    env = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
    assert get_rank_info(env).launcher == "none"
    assert get_world_size(env) == 1


def test_salloc_shell_is_one_process():
    assert get_world_size({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}) == 1


def test_interactive_step_is_one_process():
    env = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "4",
        "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1",
    }  # fmt: skip
    assert get_world_size(env) == 1


def test_step_smaller_than_its_job():
    env = {**SRUN, "SLURM_PROCID": "1", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "2",
           "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NTASKS": "8"}  # fmt: skip
    assert get_world_size(env) == 2


@pytest.mark.parametrize("mpi", [HYDRA, OPENMPI], ids=["hydra", "openmpi"])
def test_mpi_inside_slurm_outranks_the_proxys_procid(mpi):
    env = {**mpi, **SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2",
           "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}  # fmt: skip
    assert (get_rank(env), get_world_size(env)) == (5, 8)


def test_torchrun_inside_sbatch():
    env = {**TORCHRUN, "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert get_rank_info(env).launcher == "torchrun"
    assert get_rank(env) == 5


@pytest.mark.parametrize(
    "leftover",
    [
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        {"LOCAL_RANK": "0"},
    ],
)
@pytest.mark.parametrize("launcher", [name for name in ROWS if name not in ("ezpz", "torchrun")])
def test_leftover_export_never_outranks_a_launcher(leftover, launcher):
    info = get_rank_info({**ROWS[launcher][0], **leftover})
    assert (info.launcher, info.rank, info.world_size) == (launcher, 5, 8)
    assert any("set aside" in note for note in info.notes)


def test_leftover_that_agrees_is_not_worth_a_note():
    env = {**HYDRA, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert get_rank_info(env).notes == ()


def test_cyclic_distribution_is_not_rank_modulo_ranks_per_node():
    env = {**SRUN, "SLURM_LOCALID": "2", "SLURM_NODEID": "1"}
    assert get_rank_info(env).local_rank == 2


def test_pals_variables_alone_do_not_prove_pals_under_slurm():
    # cray_shasta, Slurm's plug-in, sets PALS_* but no PMI_SIZE
    assert get_rank_info({**SRUN, **PALS_PMIX}).launcher == "slurm"


@pytest.mark.parametrize("outer", [SRUN, FLUX], ids=["slurm", "flux"])
def test_pmi_without_a_local_rank_gives_way(outer):
    env = {**outer, "PMI_RANK": "5", "PMI_SIZE": "8"}
    assert get_rank_info(env).launcher in ("slurm", "flux")
    assert get_rank_info(env).local_rank == 1


def test_torchrun_below_an_mpi_launcher_is_nearer():
    agent = {**HYDRA, "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0",
             "MPI_LOCALNRANKS": "1"}  # fmt: skip
    assert get_rank_info({**agent, **TORCHRUN}).rank == 5


def test_torchrun_below_our_stamp_is_nearer():
    info = get_rank_info({**STAMP, **TORCHRUN, "EZPZ_RANK": "0", "EZPZ_WORLD_SIZE": "2",
                          "EZPZ_LOCAL_RANK": "0", "EZPZ_LOCAL_WORLD_SIZE": "2"})  # fmt: skip
    assert (info.launcher, info.rank, info.world_size) == ("torchrun", 5, 8)
    assert any("below rank 0" in note for note in info.notes)


def test_stamp_outranks_leftovers():
    env = {**STAMP, **HYDRA, "RANK": "0"}
    assert get_rank_info(env).launcher == "ezpz"


def test_a_world_set_by_hand_below_a_stamped_rank_alone():
    # mp.spawn and the like: the shim had set the three as the stamp has them
    env = {**STAMP_OF_ONE, **HYDRA_OF_ONE, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    for above in ([], [PROXY]):
        info = get_rank_info(env, ancestors=above)
        assert (info.launcher, info.rank, info.world_size) == ("torchrun", 1, 2)
        assert "below rank 0 of an ezpz-launch" in info.notes[0]


def test_a_world_set_by_hand_below_one_of_many_stamped_ranks_is_an_error():
    env = {**STAMP, **HYDRA, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    with pytest.raises(LauncherConflictError, match=r"ezpz says rank 5 of 8.*torchrun says 0 of 1"):
        get_rank_info(env)


def test_deepspeeds_local_size_below_our_stamp():
    env = {**STAMP_OF_ONE, **HYDRA_OF_ONE, "LOCAL_WORLD_SIZE": "1",
           "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}  # fmt: skip
    assert get_rank_info(env, ancestors=[AGENT, PROXY]).local_world_size == 2


@pytest.mark.parametrize("inner", [OPENMPI, MVAPICH2, JSRUN], ids=["openmpi", "mvapich2", "jsrun"])
def test_another_launcher_inside_a_stamped_rank_is_an_error(inner):
    with pytest.raises(LauncherConflictError, match=r"ezpz says rank 0 of 1.*says 5 of 8"):
        get_rank_info({**STAMP, "EZPZ_RANK": "0", "EZPZ_WORLD_SIZE": "1", "EZPZ_LOCAL_RANK": "0",
                       "EZPZ_LOCAL_WORLD_SIZE": "1", **inner})  # fmt: skip


def test_a_world_of_one_around_the_launch_contradicts_nothing():
    one = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1",
           "OMPI_COMM_WORLD_LOCAL_RANK": "0"}  # fmt: skip
    assert get_rank_info({**STAMP, **HYDRA, **one}).rank == 5


def test_stamp_that_its_launcher_contradicts_is_an_error():
    with pytest.raises(LauncherConflictError, match=r"ezpz says rank 5 of 8.*pmi says 1 of 2"):
        get_rank_info({**STAMP, **HYDRA, "PMI_RANK": "1", "PMI_SIZE": "2",
                       "MPI_LOCALNRANKS": "2"})  # fmt: skip


def test_two_mpi_launchers_that_disagree_are_an_error():
    with pytest.raises(LauncherConflictError, match=r"openmpi says rank 5.*pmi says 1"):
        get_rank_info({**OPENMPI, **HYDRA, "PMI_RANK": "1", "PMI_SIZE": "2",
                       "MPI_LOCALNRANKS": "2"})  # fmt: skip


# Where variables cannot decide, the nearest launching process above does.

PROXY = Ancestor("pmi", "hydra_pmi_proxy (pid 12)")
STEP = Ancestor("slurm", "slurmstepd (pid 11)")
AGENT = Ancestor("torchrun", "torchrun (pid 13)")
DAEMON = Ancestor("openmpi", "prted (pid 14)")
OTHER_HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("above", "launcher", "rank"), [([PROXY, DAEMON], "pmi", 1), ([DAEMON, PROXY], "openmpi", 5)]
)
def test_of_two_mpi_launchers_the_nearer_one_decides(above, launcher, rank):
    info = get_rank_info({**OPENMPI, **OTHER_HYDRA}, ancestors=above)
    assert (info.launcher, info.rank) == (launcher, rank)


def test_srun_inside_a_rank_of_mpiexec():
    one = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    info = get_rank_info({**one, **SRUN}, ancestors=[STEP, PROXY])
    assert (info.launcher, info.rank, info.world_size) == ("slurm", 5, 8)
    assert any("slurmstepd (pid 11) is the nearest" in note for note in info.notes)


def test_mpiexec_inside_an_srun_step():
    env = {**OTHER_HYDRA, **SRUN}
    assert get_rank_info(env, ancestors=[PROXY, STEP]).launcher == "pmi"
    # Eight tasks cannot be the proxies of two ranks.
    with pytest.raises(LauncherConflictError, match=r"pmi says rank 1 of 2.*slurm says 5 of 8"):
        get_rank_info(env, ancestors=[])


def test_the_proxys_step_is_said_to_be_set_aside():
    env = {**HYDRA, **SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    assert get_rank_info(env).notes == (
        "slurm says 0 of 2, local rank 1: set aside, pmi is nearer",
    )


STAMP_OF_ONE = {
    **STAMP, "EZPZ_RANK": "0", "EZPZ_WORLD_SIZE": "1", "EZPZ_LOCAL_RANK": "0",
    "EZPZ_LOCAL_WORLD_SIZE": "1", "EZPZ_NODE_RANK": "0",
}  # fmt: skip
HYDRA_OF_ONE = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}


def test_srun_inside_a_stamped_launch_of_one_rank():
    env = {**STAMP_OF_ONE, **HYDRA_OF_ONE, **SRUN}
    assert get_rank_info(env, ancestors=[STEP, PROXY]).launcher == "slurm"
    assert get_rank_info(env, ancestors=[PROXY, STEP]).launcher == "ezpz"


def test_mpiexec_inside_a_stamped_rank_of_the_same_launcher():
    env = {**STAMP_OF_ONE, **HYDRA}
    info = get_rank_info(env, ancestors=[PROXY, PROXY])
    assert (info.launcher, info.rank, info.world_size) == ("pmi", 5, 8)
    assert any("before ezpz" in note for note in info.notes)


def test_a_deepspeed_agent_below_srun_is_nearer_than_the_step():
    by_hand = {"RANK": "3", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_SIZE": "8"}
    info = get_rank_info({**SRUN, **by_hand}, ancestors=[AGENT, STEP])
    assert (info.launcher, info.rank, info.world_size) == ("torchrun", 3, 16)


def test_mpiexec_inside_a_worker_of_torchrun():
    env = {**TORCHRUN, **OTHER_HYDRA}
    assert get_rank_info(env, ancestors=[PROXY, AGENT]).launcher == "pmi"
    assert get_rank_info(env, ancestors=[AGENT, PROXY]).launcher == "torchrun"


def test_ancestors_that_do_not_decide_leave_the_conflict():
    with pytest.raises(LauncherConflictError):
        get_rank_info({**OPENMPI, **OTHER_HYDRA}, ancestors=[STEP])


def test_variables_that_agree_need_no_ancestors():
    def never():
        raise AssertionError
        yield

    assert get_rank_info({**OPENMPI, **HYDRA}, ancestors=never()).launcher == "openmpi"


def test_a_subprocess_of_a_rank_is_that_rank():
    # Nothing tells `bash -c "python train.py"` from a helper that a rank starts; whoever wants
    # a world of its own in a subprocess starts it with `env -u PMI_RANK ...`.
    code = "import ezpz_topo; print(ezpz_topo.get_rank())"
    env = {**os.environ, **HYDRA}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
    assert said.stdout == b"5\n"


# Half a set is never an answer.

REQUIRED = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mvapich2": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    "pmi": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    "jsrun": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"),
    "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    "pals": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID"),
    "ezpz": ("EZPZ_RANK", "EZPZ_WORLD_SIZE", "EZPZ_LOCAL_RANK"),
}
HALVES = [(launcher, missing) for launcher, names in REQUIRED.items() for missing in names]


@pytest.mark.parametrize(("launcher", "missing"), HALVES)
def test_half_set_family_names_what_is_missing(launcher, missing):
    row = ROWS[launcher][0]
    if launcher == "pals":
        # Cray PMI's own variables beside them are a whole set again.
        row = {**PALS_PMIX, "PMI_SIZE": "8"}
    env = {name: value for name, value in row.items() if name != missing}
    env.pop("TORCHELASTIC_RUN_ID", None)
    with pytest.raises(IncompleteLauncherError, match=missing) as caught:
        get_rank_info(env)
    assert caught.value.family == launcher
    assert "ezpz-launch" in str(caught.value)


BY_HAND = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
PROXYS_STEP = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0",
               "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}  # fmt: skip


@pytest.mark.parametrize(
    "half",
    [
        PALS_PMIX,
        {"PMI_RANK": "5", "PMI_SIZE": "8"},
        {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        {"PMIX_RANK": "5"},
        {"PALS_RANKID": "5"},
        {"PALS_LOCAL_RANKID": "1"},
    ],
    ids="+".join,
)
@pytest.mark.parametrize("other", [BY_HAND, PROXYS_STEP], ids=["by hand", "a proxy's step"])
def test_a_half_set_launcher_is_never_outvoted_by_what_contradicts_it(half, other):
    with pytest.raises(IncompleteLauncherError, match="half-set"):
        get_rank_info({**half, **other})


def test_aurora_with_the_world_size_exported_by_hand_that_agrees():
    env = {**PALS_PMIX, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert get_rank_info(env).world_size == 8


def test_aurora_with_the_stamp_of_ezpz_launch():
    env = {**PALS_PMIX, **STAMP, "EZPZ_LAUNCHER": "pals", "WORLD_SIZE": "1"}
    info = get_rank_info(env)
    assert (info.launcher, info.rank, info.world_size, info.notes) == (
        "ezpz", 5, 8, ()
    )  # fmt: skip


def test_prterun_tells_pmix_rank_and_nothing_else():
    with pytest.raises(IncompleteLauncherError, match="PMIX_RANK=5 without a world size"):
        get_rank_info({"PMIX_RANK": "5"})


@pytest.mark.parametrize("launcher", ["openmpi", "pals", "slurm"])
def test_pmix_rank_beside_a_launcher_that_agrees(launcher):
    assert get_rank_info({**ROWS[launcher][0], "PMIX_RANK": "5"}).launcher == launcher


def test_cray_pmi_alone():
    env = {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}
    info = get_rank_info(env)
    assert (info.launcher, info.rank, info.local_rank, info.local_world_size) == ("pmi", 5, 1, 4)


def test_of_hydra_and_intel_mpi_the_local_rank_is_mpi_localrankid():
    info = get_rank_info(HYDRA)
    assert (info.sources["local_rank"], info.sources["local_world_size"]) == (
        "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
    )  # fmt: skip


def test_open_mpis_node_rank_is_no_node_index():
    assert get_rank_info({**OPENMPI, "OMPI_COMM_WORLD_NODE_RANK": "3"}).node_rank is None


def test_slurm_local_id_does_not_exist():
    env = {name: value for name, value in SRUN.items() if name != "SLURM_LOCALID"}
    with pytest.raises(IncompleteLauncherError, match="SLURM_LOCALID"):
        get_rank_info({**env, "SLURM_LOCAL_ID": "1"})


def test_flux_sets_pmi_without_a_local_rank():
    env = {**FLUX, "PMI_RANK": "5", "PMI_SIZE": "8"}
    assert get_rank_info(env).launcher == "flux"


STALE = {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
         "SLURM_GTIDS": "0", "SLURMD_NODENAME": "nid001"}  # fmt: skip


def test_sbatch_from_inside_a_step_hands_that_step_on():
    body = [Ancestor("slurm", "slurmstepd: [8.batch] (pid 11)")]
    info = get_rank_info(STALE, ancestors=body)
    assert (info.launcher, info.world_size) == ("none", 1)
    assert any("SLURM_STEP_ID=0 set aside" in note for note in info.notes)
    # Without /proc: one id, where that step had four tasks on a node.
    with pytest.raises(InvalidVariableError, match="SLURM_GTIDS=0"):
        get_rank_info(STALE)
    step = [Ancestor("slurm", "slurmstepd: [8.0] (pid 11)")]
    assert get_rank_info({**STALE, "SLURM_GTIDS": "0,1,2,3"}, ancestors=step).launcher == "slurm"


def test_a_step_whose_nodes_are_none_of_the_jobs_is_left_over():
    # Also where the counts agree by accident, and nothing shows the processes above.
    env = {**STALE, "SLURM_STEP_NODELIST": "old[1-2]", "SLURM_JOB_NODELIST": "nid[001-002]",
           "SLURM_STEP_TASKS_PER_NODE": "1(x8)"}  # fmt: skip
    info = get_rank_info(env)
    assert (info.launcher, info.world_size) == ("none", 1)
    assert any("old1 is none of the job's" in note for note in info.notes)


def test_a_world_of_one_is_on_one_node():
    info = get_rank_info(BY_HAND)
    assert (info.local_world_size, info.node_rank, info.num_nodes) == (1, 0, 1)


def test_a_torchrun_world_smaller_than_that_of_the_ranks_around_it():
    env = {**OPENMPI, **BY_HAND, "TORCHELASTIC_RUN_ID": "none"}
    with pytest.raises(
        LauncherConflictError, match=r"torchrun says rank 0 of 1.*openmpi says 5 of 8"
    ):
        get_rank_info(env)


def test_pals_with_pmix_has_no_world_size():
    with pytest.raises(IncompleteLauncherError, match="PMI_SIZE"):
        get_rank_info(PALS_PMIX)


def test_torchrun_mark_without_its_variables():
    with pytest.raises(IncompleteLauncherError, match="TORCHELASTIC_RUN_ID is set"):
        get_rank_info({"TORCHELASTIC_RUN_ID": "x"})


@pytest.mark.parametrize("bad", ["", "-1", "1.0", "one", " 1", "1_0", "٣", "99999999999"])
def test_a_rank_that_is_no_number(bad):
    expected = IncompleteLauncherError if bad == "" else InvalidVariableError
    with pytest.raises(expected, match="PMI_RANK"):
        get_rank_info({**HYDRA, "PMI_RANK": bad})


@pytest.mark.parametrize(
    ("name", "value"),
    [("PMI_RANK", "8"), ("MPI_LOCALRANKID", "4"), ("MPI_LOCALNRANKS", "9"), ("PMI_SIZE", "0")],
)
def test_numbers_that_cannot_be(name, value):
    with pytest.raises(InvalidVariableError, match=name):
        get_rank_info({**HYDRA, name: value})


def test_a_launcher_that_does_not_tell_the_local_size():
    with pytest.raises(IncompleteLauncherError, match="LOCAL_WORLD_SIZE"):
        get_local_world_size(FLUX)


def test_the_environment_is_never_changed():
    for first, second in itertools.permutations(ROWS, 2):
        env = {**ROWS[first][0], **ROWS[second][0]}
        before = dict(env)
        get_rank_info(env)
        assert env == before


STAMPED = {
    "EZPZ_RANK": "3", "EZPZ_WORLD_SIZE": "4", "EZPZ_LOCAL_RANK": "1", "EZPZ_LOCAL_WORLD_SIZE": "2",
    "EZPZ_NODE_RANK": "1", "EZPZ_NUM_NODES": "2", "EZPZ_LAUNCHER": "pmi",
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1",
    "PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2",
}  # fmt: skip


@pytest.mark.parametrize("of_job", [{"SLURM_JOB_ID": "8"}, {"PBS_JOBID": "8.pbs"}])
def test_a_job_submitted_by_a_stamped_rank_is_not_that_rank(of_job):
    info = get_rank_info({**STAMPED, "EZPZ_JOB_ID": "7", **of_job})
    assert (info.rank, info.world_size, info.launcher) == (0, 1, "none")
    assert "the variables of ezpz-launch are of job 7" in info.notes[0]


def test_a_step_of_a_job_submitted_by_a_stamped_rank():
    step = {"SLURM_JOB_ID": "8", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
            "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}  # fmt: skip
    info = get_rank_info({**STAMPED, "EZPZ_JOB_ID": "7", **step})
    assert (info.rank, info.world_size, info.launcher) == (1, 2, "slurm")


@pytest.mark.parametrize(
    "of_job",
    [{"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8", "SLURM_HET_JOB_ID": "7"}, {"PBS_JOBID": "7"}, {}],
)
def test_a_stamp_of_this_job_is_believed(of_job):
    info = get_rank_info({**STAMPED, "EZPZ_JOB_ID": "7", **of_job})
    assert (info.rank, info.launcher, info.notes) == (3, "ezpz", ())


def test_local_rank_is_the_index_of_a_device_where_the_stamp_says_so():
    env = {**STAMPED, "LOCAL_RANK": "0", "EZPZ_LOCAL_DEVICE": "0"}
    assert get_rank_info(env).local_rank == 1
    assert get_rank_info(env).notes == ()
    assert get_local_device(env) == 0
    assert get_local_device(STAMPED) == 1
    with pytest.raises(LauncherConflictError):
        get_rank_info({**env, "LOCAL_RANK": "1", "EZPZ_LOCAL_DEVICE": "0", "RANK": "1"})
    with pytest.raises(InvalidVariableError, match="EZPZ_LOCAL_DEVICE='x'"):
        get_local_device({**STAMPED, "LOCAL_RANK": "x", "EZPZ_LOCAL_DEVICE": "x"})
