"""Every row of the launcher table, every combination that misleads, and real processes above."""

import itertools
import os
import shutil
import subprocess
import sys

import pytest

from ezpz_topo import (
    FAMILIES,
    Ancestor,
    IncompleteLauncherError,
    InvalidVariableError,
    LauncherConflictError,
    family,
    get_local_device,
    get_local_world_size,
    get_rank_info,
)
from ezpz_topo._rank import launching_ancestors

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
LAUNCH = {
    "EZPZ_RANK": "5", "EZPZ_WORLD_SIZE": "8", "EZPZ_LOCAL_RANK": "1",
    "EZPZ_LOCAL_WORLD_SIZE": "4", "EZPZ_NODE_RANK": "1", "EZPZ_LAUNCHER": "pmi",
}  # fmt: skip

ROWS = {
    "ezpz": (LAUNCH, 4, 1),
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


def test_no_launcher_is_one_process_and_no_process_two_launchers():
    claimed = [name for each in FAMILIES for name in each.processes]
    assert len(set(claimed)) == len(claimed)
    info = get_rank_info({})
    assert (info.rank, info.world_size, info.local_world_size, info.launcher) == (0, 1, 1, "none")
    assert "no launcher" in info.sources["rank"]


LAUNCH_OF_ONE = {
    **LAUNCH, "EZPZ_RANK": "0", "EZPZ_WORLD_SIZE": "1", "EZPZ_LOCAL_RANK": "0",
    "EZPZ_LOCAL_WORLD_SIZE": "1", "EZPZ_NODE_RANK": "0",
}  # fmt: skip
HYDRA_OF_ONE = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
OTHER_HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
BY_HAND = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
SHELL = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
NODE_0 = {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
PROXYS_STEP = {**SRUN, **NODE_0, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
MISLEADING = {
    "a batch script is one process, not rank 0 of 4": (SHELL, ("none", 0, 1)),
    "a shell of salloc": ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, ("none", 0, 1)),
    "a shell in an interactive step": (
        {**SHELL, "SLURM_STEP_ID": "4294967290", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "1",
         "SLURM_STEP_TASKS_PER_NODE": "1"}, ("none", 0, 1)),
    "a step smaller than its job": (
        {**SRUN, "SLURM_PROCID": "1", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "2",
         "SLURM_STEP_TASKS_PER_NODE": "2"}, ("slurm", 1, 2)),
    "Hydra in Slurm, with its proxy's SLURM_PROCID": ({**HYDRA, **PROXYS_STEP}, ("pmi", 5, 8)),
    "Open MPI in Slurm": ({**OPENMPI, **PROXYS_STEP}, ("openmpi", 5, 8)),
    "torchrun in a batch script": ({**TORCHRUN, **SHELL}, ("torchrun", 5, 8)),
    # cray_shasta, Slurm's plug-in, sets PALS_* but no PMI_SIZE
    "PALS under Slurm": ({**SRUN, **PALS_PMIX}, ("slurm", 5, 8)),
    "PMI without a local rank in Slurm": (
        {**SRUN, "PMI_RANK": "5", "PMI_SIZE": "8"}, ("slurm", 5, 8)),
    "PMI without a local rank in Flux": (
        {**FLUX, "PMI_RANK": "5", "PMI_SIZE": "8"}, ("flux", 5, 8)),
    "torchrun below an MPI launcher": (
        {**OTHER_HYDRA, "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1", **TORCHRUN},
        ("torchrun", 5, 8)),
    "ezpz-launch, and leftovers": ({**LAUNCH, **HYDRA, "RANK": "0"}, ("ezpz", 5, 8)),
    "a world of one around the launch": (
        {**LAUNCH, **HYDRA, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1",
         "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, ("ezpz", 5, 8)),
    "PMIx on Aurora, the world size by hand": (
        {**PALS_PMIX, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, ("torchrun", 5, 8)),
    "PMIx on Aurora with ezpz-launch": (
        {**PALS_PMIX, **LAUNCH, "EZPZ_LAUNCHER": "pals", "WORLD_SIZE": "1"}, ("ezpz", 5, 8)),
    "Cray PMI alone": (
        {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"},
        ("pmi", 5, 8)),
    **{f"PMIX_RANK beside {name}": ({**ROWS[name][0], "PMIX_RANK": "5"}, (name, 5, 8))
       for name in ("openmpi", "pals", "slurm")},
    "all of them agree": (
        {**HYDRA, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, ("pmi", 5, 8)),
}  # fmt: skip


@pytest.mark.parametrize("case", MISLEADING)
def test_combinations_that_mislead(case):
    env, expected = MISLEADING[case]
    info = get_rank_info(env)
    assert (info.launcher, info.rank, info.world_size) == expected


@pytest.mark.parametrize(
    "leftover", [{"RANK": "0", "WORLD_SIZE": "1"}, BY_HAND, {"LOCAL_RANK": "0"}]
)
@pytest.mark.parametrize("launcher", [name for name in ROWS if name not in ("ezpz", "torchrun")])
def test_leftover_export_never_outranks_a_launcher(leftover, launcher):
    info = get_rank_info({**ROWS[launcher][0], **leftover})
    assert (info.launcher, info.rank, info.world_size) == (launcher, 5, 8)
    assert any("set aside" in note for note in info.notes)


@pytest.mark.parametrize(("env", "facts"), [
    # which is not rank modulo ranks a node where Slurm deals them out in turn
    ({**SRUN, "SLURM_LOCALID": "2"}, {"local_rank": 2}),
    # DeepSpeed's word
    ({**BY_HAND, "WORLD_SIZE": "8", "LOCAL_SIZE": "4"}, {"local_world_size": 4}),
    ({**HYDRA, "MPI_LOCALNRANKS": "8"}, {"node_rank": 0, "num_nodes": 1}),
    (BY_HAND, {"local_world_size": 1, "node_rank": 0, "num_nodes": 1}),
    # Open MPI's is the rank on the node, not the node's index.
    ({**OPENMPI, "OMPI_COMM_WORLD_NODE_RANK": "3"}, {"node_rank": None, "local_rank": 1}),
    ({"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"},
     {"local_rank": 1, "local_world_size": 4}),
])  # fmt: skip
def test_where_a_launcher_has_its_own_words(env, facts):
    info = get_rank_info(env)
    assert {key: getattr(info, key) for key in facts} == facts


# Where variables cannot decide, the nearest launching process above does.

PROXY = Ancestor("pmi", "hydra_pmi_proxy (pid 12)")
STEP = Ancestor("slurm", "slurmstepd (pid 11)")
AGENT = Ancestor("torchrun", "torchrun (pid 13)")
DAEMON = Ancestor("openmpi", "prted (pid 14)")
DEEPSPEED = {"RANK": "3", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_SIZE": "8"}


@pytest.mark.parametrize(("env", "above", "expected", "note"), [
    ({**OPENMPI, **OTHER_HYDRA}, [PROXY, DAEMON], ("pmi", 1, 2), "pmi before openmpi"),
    ({**OPENMPI, **OTHER_HYDRA}, [DAEMON, PROXY], ("openmpi", 5, 8), "openmpi is nearer"),
    # srun inside a rank of mpiexec, also with its numbers on more nodes; and mpiexec inside a step
    ({**OTHER_HYDRA, "PMI_RANK": "0", "MPI_LOCALRANKID": "0", **PROXYS_STEP}, [STEP, PROXY],
     ("slurm", 0, 2), "slurm before pmi"),
    ({**HYDRA_OF_ONE, **SRUN}, [STEP, PROXY], ("slurm", 5, 8), "slurmstepd (pid 11) is"),
    ({**OTHER_HYDRA, **SRUN}, [PROXY, STEP], ("pmi", 1, 2), "set aside, pmi is nearer"),
    ({**HYDRA, **PROXYS_STEP}, [], ("pmi", 5, 8), "slurm says 0 of 2, local rank 0: set aside"),
    # inside a launch of one rank by ezpz-launch
    ({**LAUNCH_OF_ONE, **HYDRA_OF_ONE, **SRUN}, [STEP, PROXY], ("slurm", 5, 8), "before ezpz"),
    ({**LAUNCH_OF_ONE, **HYDRA_OF_ONE, **SRUN}, [PROXY, STEP], ("ezpz", 0, 1), "nearer"),
    ({**LAUNCH_OF_ONE, **HYDRA}, [PROXY, PROXY], ("pmi", 5, 8), "before ezpz"),
    ({**LAUNCH, **TORCHRUN, "EZPZ_RANK": "0", "EZPZ_WORLD_SIZE": "2", "EZPZ_LOCAL_RANK": "0",
      "EZPZ_LOCAL_WORLD_SIZE": "2"}, [], ("torchrun", 5, 8), "below rank 0"),
    # mp.spawn and the like: the shim had set the three as ezpz-launch has them
    *(({**LAUNCH_OF_ONE, **HYDRA_OF_ONE, **other, "RANK": "1", "WORLD_SIZE": "2",
        "LOCAL_RANK": "1"},
       above, ("torchrun", 1, 2), "below rank 0 of an ezpz-launch")
      for other in ({}, {"LOCAL_WORLD_SIZE": "1", "LOCAL_SIZE": "2"})
      for above in ([], [PROXY])),
    # DeepSpeed's agent below srun; mpiexec inside a worker of torchrun
    ({**SRUN, **DEEPSPEED}, [AGENT, STEP], ("torchrun", 3, 16), "torchrun before slurm"),
    ({**TORCHRUN, **OTHER_HYDRA}, [PROXY, AGENT], ("pmi", 1, 2), "pmi before torchrun"),
    ({**TORCHRUN, **OTHER_HYDRA}, [AGENT, PROXY], ("torchrun", 5, 8), "torchrun is nearer"),
])  # fmt: skip
def test_the_nearest_launcher_above_decides(env, above, expected, note):
    info = get_rank_info(env, ancestors=above)
    assert (info.launcher, info.rank, info.world_size) == expected
    assert any(note in each for each in info.notes)
    assert info.local_world_size == 2 or "LOCAL_SIZE" not in env or env["LOCAL_SIZE"] == "8"


@pytest.mark.parametrize(("env", "above", "message"), [
    ({**OPENMPI, **OTHER_HYDRA}, [], r"openmpi says rank 5.*pmi says 1"),
    ({**OPENMPI, **OTHER_HYDRA}, [STEP], r"openmpi says rank 5.*pmi says 1"),
    # Eight tasks cannot be the proxies of two ranks.
    ({**OTHER_HYDRA, **SRUN}, [], r"pmi says rank 1 of 2.*slurm says 5 of 8"),
    ({**LAUNCH, **HYDRA, **BY_HAND}, [], r"ezpz says rank 5 of 8.*torchrun says 0 of 1"),
    ({**LAUNCH, **OTHER_HYDRA}, [], r"ezpz says rank 5 of 8.*pmi says 1 of 2"),
    *(({**LAUNCH_OF_ONE, **inner}, [], r"ezpz says rank 0 of 1.*says 5 of 8")
      for inner in (OPENMPI, MVAPICH2, JSRUN)),
    ({**OPENMPI, **BY_HAND, "TORCHELASTIC_RUN_ID": "none"}, [],
     r"torchrun says rank 0 of 1.*openmpi says 5 of 8"),
])  # fmt: skip
def test_launchers_that_disagree_are_an_error(env, above, message):
    with pytest.raises(LauncherConflictError, match=message):
        get_rank_info(env, ancestors=above)


def test_variables_that_agree_need_no_ancestors():
    def never():
        raise AssertionError
        yield

    assert get_rank_info({**OPENMPI, **HYDRA}, ancestors=never()).launcher == "openmpi"


# Half a set is never an answer.


@pytest.mark.parametrize("launcher", ROWS)
@pytest.mark.parametrize("field", ["rank", "world_size", "local_rank"])
def test_half_set_family_names_what_is_missing(launcher, field):
    # Cray PMI's own variables beside those of PALS are a whole set again.
    row = {**PALS_PMIX, "PMI_SIZE": "8"} if launcher == "pals" else ROWS[launcher][0]
    missing = getattr(family(launcher), field)[0]
    env = {name: value for name, value in row.items() if name != missing}
    env.pop("TORCHELASTIC_RUN_ID", None)
    said = f"half-set {launcher} environment: .*{missing}.*; start the ranks with ezpz-launch"
    with pytest.raises(IncompleteLauncherError, match=said):
        get_rank_info(env)


@pytest.mark.parametrize(
    "half",
    [PALS_PMIX, {"PMI_RANK": "5", "PMI_SIZE": "8"},
     {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, {"PMIX_RANK": "5"},
     {"PALS_RANKID": "5"}, {"PALS_LOCAL_RANKID": "1"}],
    ids="+".join,
)  # fmt: skip
@pytest.mark.parametrize("other", [BY_HAND, PROXYS_STEP], ids=["by hand", "a proxy's step"])
def test_a_half_set_launcher_is_never_outvoted_by_what_contradicts_it(half, other):
    with pytest.raises(IncompleteLauncherError, match="half-set"):
        get_rank_info({**half, **other})


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


@pytest.mark.parametrize(("env", "message"), [
    ({"PMIX_RANK": "5"}, "PMIX_RANK=5 without a world size"),  # all that prterun tells
    (PALS_PMIX, "PMI_SIZE"),
    ({"TORCHELASTIC_RUN_ID": "x"}, "TORCHELASTIC_RUN_ID is set"),
    # a name that does not exist
    ({**SRUN, "SLURM_LOCALID": "", "SLURM_LOCAL_ID": "1"}, "SLURM_LOCALID"),
    (FLUX, "LOCAL_WORLD_SIZE"),
])  # fmt: skip
def test_what_is_missing_is_said(env, message):
    with pytest.raises(IncompleteLauncherError, match=message):
        get_local_world_size(env)


@pytest.mark.parametrize("bad", ["", "-1", "1.0", "٣", "99999999999"])
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


def test_the_environment_is_never_changed():
    for first, second in itertools.permutations(ROWS, 2):
        env = {**ROWS[first][0], **ROWS[second][0]}
        before = dict(env)
        get_rank_info(env)
        assert env == before


LAUNCHED = {
    "EZPZ_RANK": "3", "EZPZ_WORLD_SIZE": "4", "EZPZ_LOCAL_RANK": "1", "EZPZ_LOCAL_WORLD_SIZE": "2",
    "EZPZ_NODE_RANK": "1", "EZPZ_NUM_NODES": "2", "EZPZ_LAUNCHER": "pmi",
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1",
    "PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2",
}  # fmt: skip


STEP_OF_8 = {
    "SLURM_JOB_ID": "8", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip


@pytest.mark.parametrize(("of_job", "expected"), [
    *((ours, (3, 4, "ezpz")) for ours in (
        {"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8", "SLURM_HET_JOB_ID": "7"}, {"PBS_JOBID": "7"},
        {})),
    # submitted by a rank, which it is not
    *((other, (0, 1, "none")) for other in ({"SLURM_JOB_ID": "8"}, {"PBS_JOBID": "8.pbs"})),
    (STEP_OF_8, (1, 2, "slurm")),
])  # fmt: skip
def test_launch_variables_of_this_job_are_believed_and_those_of_another_are_not(of_job, expected):
    info = get_rank_info({**LAUNCHED, "EZPZ_JOB_ID": "7", **of_job})
    assert (info.rank, info.world_size, info.launcher) == expected
    assert bool(info.notes) is (info.launcher != "ezpz")
    assert not info.notes or "the variables of ezpz-launch are of job 7" in info.notes[0]


def test_local_rank_is_the_index_of_a_device_where_ezpz_launch_says_so():
    env = {**LAUNCHED, "LOCAL_RANK": "0", "EZPZ_LOCAL_DEVICE": "0"}
    assert get_rank_info(env).local_rank == 1
    assert get_rank_info(env).notes == ()
    assert get_local_device(env) == 0
    assert get_local_device(LAUNCHED) == 1
    with pytest.raises(LauncherConflictError):
        get_rank_info({**env, "LOCAL_RANK": "1", "EZPZ_LOCAL_DEVICE": "0", "RANK": "1"})
    with pytest.raises(InvalidVariableError, match="EZPZ_LOCAL_DEVICE='x'"):
        get_local_device({**LAUNCHED, "LOCAL_RANK": "x", "EZPZ_LOCAL_DEVICE": "x"})


# The launching processes above, by /proc.


@pytest.fixture
def proc(tmp_path):
    """A /proc in which process 7 is below 6, a program of that name and command line."""

    def make(name, command=""):
        for pid, parent, its_name in ((7, 6, "a) b) (c)"), (6, 1, name)):
            folder = tmp_path / str(pid)
            folder.mkdir()
            (folder / "stat").write_text(f"{pid} ({its_name}) S {parent} 7 7 0")
            (folder / "comm").write_text(f"{its_name}\n")
        (tmp_path / "6" / "cmdline").write_text("\0".join(command.split()))
        return str(tmp_path)

    return make


@pytest.mark.parametrize(("name", "command", "found"), [
    ("hydra_pmi_proxy", "", Ancestor("pmi", "hydra_pmi_proxy (pid 6)")),
    ("prted", "", Ancestor("openmpi", "prted (pid 6)")),
    ("prterun", "", Ancestor("openmpi", "prterun (pid 6)")),
    ("flux-shell", "", Ancestor("flux", "flux-shell (pid 6)")),
    ("mpispawn", "", Ancestor("mvapich2", "mpispawn (pid 6)")),
    ("slurmstepd", "slurmstepd:[7.batch]", Ancestor("slurm", "slurmstepd:[7.batch] (pid 6)")),
    # torchrun's agent is a Python, known by what it runs
    ("python3.11", "/usr/bin/python3.11 /opt/bin/torchrun train.py",
     Ancestor("torchrun", "torchrun (pid 6)")),
    *(("python", f"python -u -W ignore {run} train.py",
       Ancestor("torchrun", "torch.distributed.run (pid 6)"))
      for run in ("-m torch.distributed.run", "/lib/torch/distributed/run.py")),
    # and not by its arguments
    ("python", "python train.py torchrun", None),
    ("sh", "sh -c torchrun", None),
])  # fmt: skip
def test_a_launchers_process_is_known_by_its_name(proc, name, command, found):
    assert list(launching_ancestors(7, proc=proc(name, command))) == ([found] if found else [])


def test_without_proc_no_process_is_known(tmp_path):
    assert list(launching_ancestors(7, proc=str(tmp_path))) == []


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="the kernel shows no /proc")
def test_real_ones_are_nearest_first_and_shells_between_do_not_count(tmp_path):
    words = []
    for name in ("slurmstepd", "a shell", "hydra_pmi_proxy"):
        path = tmp_path / name
        shutil.copy(os.path.realpath(shutil.which("sh")), path)
        # "$@" and not the last command: else the shell would become it.
        words += [str(path), "-c", '"$@"; exit $?', name]
    code = "from ezpz_topo._rank import launching_ancestors as a; print(*[x.family for x in a()])"
    said = subprocess.run(
        [*words, sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    # Above the test itself there may be real launchers.
    mine = [ancestor.family for ancestor in launching_ancestors()]
    assert said.stdout.split() == ["pmi", "slurm", *mine]
