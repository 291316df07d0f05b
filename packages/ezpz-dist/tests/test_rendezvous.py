"""How ranks meet under each launcher that can run here, and what is said when they cannot."""

import shutil
import socket
import subprocess
import sys
from datetime import timedelta

import pytest

from ezpz_dist import SetupError
from ezpz_dist._meeting.rendezvous import meet
from ezpz_topo import RankInfo

SCRIPT = """
import logging, sys
logging.basicConfig(level=logging.INFO)
import ezpz_dist
rank = ezpz_dist.setup_torch(timeout=60)
assert ezpz_dist.all_reduce(rank + 1) == 3
ezpz_dist.barrier()
if sys.argv[1] == "exit" and rank == 1:
    sys.exit(3)
if sys.argv[1] == "raise" and rank == 1:
    raise ValueError("boo")
ezpz_dist.barrier()
"""


def under(launcher, clean_env, tmp_path, mode):
    path = shutil.which(launcher[0], path=clean_env["PATH"])
    if path is None:
        pytest.skip(f"no {launcher[0]} here")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return subprocess.run(
        [path, *launcher[1:], str(script), mode],
        env=clean_env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip


MPIEXEC = ["mpiexec", "-n", "2", sys.executable]
TORCHRUN = ["torchrun", "--nproc-per-node", "2"]


def test_bare_mpiexec_broadcasts_the_address(clean_env, tmp_path):
    done = under(MPIEXEC, clean_env, tmp_path, "run")
    assert done.returncode == 0, done.stderr
    assert "ranks by pmi, address by bound by rank 0, broadcast over MPI" in done.stderr


def test_torchrun(clean_env, tmp_path):
    done = under(TORCHRUN, clean_env, tmp_path, "run")
    assert done.returncode == 0, done.stderr
    assert "ranks by torchrun, address by MASTER_ADDR and MASTER_PORT" in done.stderr


def test_an_exception_under_bare_mpiexec_ends_all_with_its_traceback(clean_env, tmp_path):
    done = under(MPIEXEC, clean_env, tmp_path, "raise")
    assert done.returncode != 0
    assert "ValueError: boo" in done.stderr


def test_a_rank_that_leaves_ends_all_under_bare_mpiexec(clean_env, tmp_path):
    # without it, the rank would wait in MPI_Finalize for peers that wait for it
    assert under(MPIEXEC, clean_env, tmp_path, "exit").returncode != 0


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_never_comes_under_bare_mpiexec(clean_env, tmp_path, absent):
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, sys, time\nif os.environ['PMI_RANK'] == '{absent}': sys.exit(3)\n"
        "import ezpz_dist\nezpz_dist.setup_torch(timeout=4)\n"
    )
    path = shutil.which("mpiexec", path=clean_env["PATH"])
    done = subprocess.run(
        [path, "-n", "2", sys.executable, str(script)], env=clean_env, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "Timeout (0:00:04)!" in done.stderr
    assert "in broadcast_once" in done.stderr


def info(launcher, rank=1, world_size=2, local_world_size=2):
    return RankInfo(rank, world_size, 0, local_world_size, None, launcher)


SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("env", "missing"),
    [
        ({}, "MASTER_ADDR and MASTER_PORT"),
        ({"MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT"),
        ({"MASTER_PORT": "29500"}, "MASTER_ADDR"),
    ],
)
def test_no_address(env, missing):
    with pytest.raises(SetupError, match=rf"rank 1 of 2 \(torchrun\) has no {missing};"):
        meet(info("torchrun"), SECOND, env)


@pytest.mark.parametrize("port", ["x", "0", "65536", "-1"])
def test_a_port_that_is_none(port):
    with pytest.raises(SetupError, match=f"MASTER_PORT='{port}'; expected a port number"):
        meet(info("torchrun"), SECOND, {"MASTER_ADDR": "h", "MASTER_PORT": port})


STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}


def test_a_slurm_steps_ranks_derive_the_same_address():
    first = meet(info("slurm", rank=0, world_size=1), SECOND, STEP)
    assert first.source == "a world of one"
    zero = meet(info("slurm", rank=0, local_world_size=1), SECOND, STEP)
    one = meet(info("slurm", rank=1, local_world_size=1), SECOND, STEP)
    assert (zero.master_addr, zero.master_port) == (one.master_addr, one.master_port)
    assert zero.master_addr == "localhost"
    zero.store.set("k", "v")
    assert one.store.get("k") == b"v"


def test_another_step_takes_another_port():
    ports = {
        meet(info("slurm", rank=0), SECOND, {**STEP, "SLURM_STEP_ID": str(step)}).master_port
        for step in range(5)
    }
    assert len(ports) == 5


def test_a_slurm_host_that_does_not_resolve():
    step = {**STEP, "SLURM_STEP_NODELIST": "no-such-host.invalid,b"}
    with pytest.raises(SetupError, match=r"'no-such-host.invalid', does not resolve here"):
        meet(info("slurm", local_world_size=1), SECOND, step)


def test_a_slurm_port_that_is_taken():
    step = {**STEP, "SLURM_STEP_ID": "99"}
    port = meet(info("slurm", rank=0), SECOND, step).master_port
    with socket.socket() as foreign:
        foreign.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        foreign.bind(("0.0.0.0", port))  # a foreign listener, for this test only
        foreign.listen()
        with pytest.raises(SetupError, match=f"step 7.99 cannot meet the others.*{port}"):
            meet(info("slurm", rank=0), SECOND, step)


@pytest.mark.parametrize("n", [2])
def test_a_rank_that_never_comes_is_an_error_with_the_address(ranks, n):
    (code, _, stderr), _ = ranks(
        n,
        """
        if os.environ["RANK"] == "1":
            sys.exit(0)
        setup_torch(timeout=3)
        """,
        check=False,
    )
    assert code == 1
    assert "rank 0 of 2 could not meet the others at 127.0.0.1:" in stderr
