"""Real ranks that meet over loopback, forked from a server that has imported torch once."""

import multiprocessing
import os
import socket
import textwrap
from pathlib import Path

import pytest

PRELUDE = """
import os, sys
for fd, path in ((1, {out!r}), (2, {err!r})):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), fd)
os.environ.clear()
os.environ.update({env!r})
os.chdir({cwd!r})
import torch, ezpz_dist, ezpz_tp
torch.set_num_threads(1)
"""
PRELOADED = [
    "torch.distributed", "ezpz_dist", "ezpz_tp",
    # What some tests import on each rank, for seconds.
    "ezpz._test.rank", "ezpz.models._llama", "ezpz.models._llama_pipeline", "fire", "numpy",
    "plotext", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.optim",
    "torch.distributed.pipelining",
]  # fmt: skip
LAUNCHERS = ("SLURM_", "PBS_", "PMI", "OMPI_", "EZPZ_", "TORCHELASTIC", "MASTER_")
PLACE = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"}


@pytest.fixture(scope="session")
def fork_server():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@pytest.fixture
def clean_env():
    """The environment of a user outside of any job."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHERS) and name not in PLACE
    }
    return {**clean, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


@pytest.fixture
def ranks(fork_server, clean_env, tmp_path):
    """Run a script on n ranks, evenly on nodes; return what each printed, or (status, out, err)."""
    started = []

    def run(n, script, *, check=True, timeout=240, nodes=1, cwd=None):
        with socket.socket() as probe:
            # Held, without listening, so that no test beside this one is given the same port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", 0))
            port, local, mine = probe.getsockname()[1], n // nodes, []
            for rank in range(n):
                files = [str(tmp_path / f"{len(started)}.{name}") for name in ("out", "err")]
                env = {
                    **clean_env,
                    "RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_RANK": str(rank % local),
                    "LOCAL_WORLD_SIZE": str(local), "GROUP_RANK": str(rank // local),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                }  # fmt: skip
                where = {"out": files[0], "err": files[1], "cwd": str(cwd or os.getcwd())}
                text = PRELUDE.format(env=env, **where) + textwrap.dedent(script)
                process = fork_server.Process(target=exec, args=(text, {"__name__": "__rank__"}))
                process.start()
                started.append(process)
                mine.append((process, files))
            done = []
            for process, files in mine:
                process.join(timeout)
                out, err = (Path(file).read_text() for file in files)
                assert process.exitcode is not None, f"still running after {timeout} s: {err}"
                assert not check or process.exitcode == 0, err
                done.append(out if check else (process.exitcode, out, err))
            return done

    yield run
    for process in started:
        process.kill()
        process.join()
