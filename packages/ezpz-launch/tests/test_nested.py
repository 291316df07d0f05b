"""A launch inside a rank of another: what it is cut off from, and what it keeps."""

import json
import os
import signal
import sys
from importlib.util import find_spec

import pytest

from ezpz_launch._agent import is_running
from ezpz_launch._identify import outside_of_launch
from ezpz_topo import FAMILIES, get_rank_info

RANKS = {
    "ezpz": {
        "EZPZ_RANK": "1",
        "EZPZ_WORLD_SIZE": "2",
        "EZPZ_LOCAL_RANK": "1",
        "EZPZ_LOCAL_WORLD_SIZE": "2",
        "EZPZ_NODE_RANK": "0",
        "EZPZ_NUM_NODES": "1",
    },
    "torchrun": {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "LOCAL_SIZE": "2",
    },
    "hydra": {
        "PMI_RANK": "1",
        "PMI_SIZE": "2",
        "PMI_FD": "9",
        "PMI_PORT": "a:1",
        "PMI_ID": "1",
        "MPI_LOCALRANKID": "1",
        "MPI_LOCALNRANKS": "2",
        "HYDI_CONTROL_FD": "8",
    },
    "openmpi": {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_ARGV": "x",
        "PMIX_RANK": "1",
        "PMIX_NAMESPACE": "n",
        "PMIX_SERVER_URI41": "u",
        "PRTE_LAUNCHED": "1",
    },
    "pals": {"PALS_RANKID": "1", "PALS_LOCAL_RANKID": "1", "PALS_NODEID": "0", "PALS_APID": "x"},
    "mvapich2": {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"},
    "flux": {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "1"},
    "jsrun": {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2"},
    "slurm": {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"},
}
"""What launchers tell their ranks. Source: the table of their rank variables; PMI_FD, PMI_PORT,
PMI_ID and HYDI_CONTROL_FD as MPICH 5.0.2 sets them, PMIX_* and PRTE_* as Open MPI 5.0.11."""

STAYS = {
    "PATH": "/bin",
    "HOME": "/home/a",
    "LANG": "C",
    "CUDA_VISIBLE_DEVICES": "0,1",
    # settings, of the user or the site
    "OMPI_MCA_btl": "tcp",
    "PMIX_MCA_gds": "hash",
    "PRTE_MCA_plm": "ssh",
    "MPICH_GPU_SUPPORT_ENABLED": "1",
    "FI_PROVIDER": "tcp",
    "NCCL_DEBUG": "INFO",
    # the job's, and where the step's cores are
    "SLURM_JOB_ID": "7",
    "SLURM_JOBID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_CPUS_ON_NODE": "8",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "2",
    "PBS_JOBID": "7.pbs",
    "PBS_NODEFILE": "/var/spool/7.pbs",
    "FLUX_URI": "local:///run/flux",
    # ours, that say nothing of a rank
    "EZPZ_STATE_DIR": "/home/a/state",
    "EZPZ_MACHINE": "aurora",
}


@pytest.mark.parametrize("launcher", RANKS)
def test_what_makes_a_rank_goes(launcher):
    env = {**STAYS, **RANKS[launcher]}
    assert outside_of_launch(env) == STAYS
    assert env == {**STAYS, **RANKS[launcher]}


def test_all_of_them_at_once():
    everything = {name: value for told in RANKS.values() for name, value in told.items()}
    assert outside_of_launch({**everything, **STAYS}) == STAYS


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name != "slurm"], ids=lambda f: f.name)
def test_every_name_of_the_table_goes(family):
    names = [
        *(*family.rank, *family.world_size, *family.local_rank),
        *(*family.local_world_size, *family.node_rank, *family.num_nodes),
    ]
    assert names
    assert outside_of_launch(dict.fromkeys(names, "1")) == {}


def test_what_is_left_is_no_rank():
    env = {**STAYS, **RANKS["slurm"], **RANKS["hydra"], **RANKS["ezpz"], **RANKS["torchrun"]}
    assert get_rank_info(env).rank == 1
    left = get_rank_info({**outside_of_launch(env), "SLURM_STEP_ID": ""})
    assert (left.rank, left.world_size) == (0, 1)


def test_names_that_only_look_like_it_stay():
    env = {"MY_PMI_RANK": "1", "RANKING": "1", "PMIRROR": "1", "WORLD_SIZE_MAX": "3"}
    assert outside_of_launch(env) == env


SHOW = "import os, json; print(json.dumps(dict(os.environ)) + '\\n', end='', flush=True)"
OURS = [sys.executable, "-m", "ezpz_launch"]


def worlds(done):
    """Return what each inner rank says, by the launch that it belongs to."""
    assert done.returncode == 0, done.stderr
    found = {}
    for line in done.stdout.splitlines():
        env = json.loads(line)
        found.setdefault(env["EZPZ_LAUNCH_ID"], []).append(env)
    return list(found.values())


@pytest.mark.parametrize("inner", ["spawn", "mpiexec"])
@pytest.mark.parametrize("outer", ["spawn", "mpiexec"])
def test_every_rank_has_a_world_of_its_own(launch, outer, inner):
    done = launch(
        *("--launcher", outer, "-n", "2"),
        *(*OURS, "--launcher", inner, "--nested", "-n", "2", sys.executable, "-c", SHOW),
        env={"OMPI_MCA_btl": "tcp"},
    )
    found = worlds(done)
    assert len(found) == 2
    for world in found:
        places = sorted((env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) for env in world)
        assert places == [("0", "2", "0"), ("1", "2", "1")]
        assert {env["LOCAL_WORLD_SIZE"] for env in world} == {"2"}
        assert len({env["MASTER_PORT"] for env in world}) == 1
        assert {env["OMPI_MCA_btl"] for env in world} == {"tcp"}
        if inner == "spawn":
            # its ranks are those of no MPI
            assert [name for env in world for name in env if name.startswith("PMI_")] == []
        else:
            told = sorted((env["PMI_RANK"], env["PMI_SIZE"]) for env in world)
            assert told == [("0", "2"), ("1", "2")]


def test_its_mpi_joins_the_inner_world(launch):
    if find_spec("mpi4py") is None:
        pytest.skip("no mpi4py here: pip install mpi4py")
    code = (
        "from mpi4py import MPI; world = MPI.COMM_WORLD; total = world.allreduce(world.rank)\n"
        "print(f'{total} {world.size}\\n', end='')"
    )
    words = (*OURS, "--launcher", "mpiexec", "--nested", "-n", "3", sys.executable, "-c", code)
    done = launch("--launcher", "mpiexec", "-n", "2", *words)
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["3"] * 12), done.stderr


def test_a_failure_inside_is_the_outer_ones(launch):
    words = [*OURS, "--launcher", "spawn", "--nested", "-n", "2", "sh", "-c", "exit 9"]
    assert launch("--launcher", "spawn", "-n", "2", *words).returncode == 9


def test_a_world_of_one_needs_no_leave(launch):
    words = [*OURS, "--launcher", "spawn", "-n", "2", sys.executable, "-c", SHOW]
    ((first, second),) = worlds(launch("--launcher", "spawn", "-n", "1", *words))
    assert {first["RANK"], second["RANK"]} == {"0", "1"}


@pytest.fixture
def four(background, tmp_path, until):
    """Start two launches of two ranks each in another; return it and the four ranks' pids."""
    folder = tmp_path / "pids"
    folder.mkdir()
    script = f"echo $$ >{folder}/$$.new && mv {folder}/$$.new {folder}/$$ && exec sleep 600"

    def ready():
        return len(list(folder.glob("*[0-9]"))) == 4

    def start():
        inner = [*OURS, "--launcher", "spawn", "--nested", "-n", "2", "sh", "-c", script]
        outer = background("-n", "2", *inner, stderr=-1)
        until(ready)
        return outer, [int(path.name) for path in folder.iterdir()]

    yield start
    for path in folder.glob("*[0-9]"):
        if is_running(int(path.name)):
            os.kill(int(path.name), signal.SIGKILL)


def test_sigterm_ends_all_of_it(four, until):
    outer, pids = four()
    outer.send_signal(signal.SIGTERM)
    assert outer.wait(120) == 143
    until(lambda: not any(map(is_running, pids)))


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="the guardian finds them by /proc")
def test_kill_9_of_the_outer_one_ends_all_of_it(four, until):
    outer, pids = four()
    outer.kill()
    until(lambda: not any(map(is_running, pids)), 10)
