"""Real ranks of a test: processes that meet over loopback, as a launcher's would.

They are forked from a server that has imported torch once, because the import takes longer than
most tests.
"""

import json
import multiprocessing
import os
import socket

import pytest

PROGRAM = """
import os, sys
for fd, path in ((1, {out!r}), (2, {err!r})):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), fd)
os.environ.clear()
os.environ.update({env!r})
os.chdir({cwd!r})
import torch
torch.set_num_threads(1)
{script}
"""
PRELOADED = [
    "ezpz._test.rank", "ezpz.models._llama.model", "ezpz.models._llama.pipeline", "fire", "numpy",
    "plotext", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.optim",
    "torch.distributed.pipelining",
]  # fmt: skip
TEST = "from ezpz._test.rank import run; sys.exit(run({words!r}))"
LAUNCHERS = ("SLURM_", "PBS_", "PMI", "OMPI_", "EZPZ_", "TORCHELASTIC", "MASTER_")
PLACE = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"}


@pytest.fixture(scope="session")
def fork_server():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@pytest.fixture
def clean_env(tmp_path):
    """The environment of a user outside of any job, whose records and temporary files are ours."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHERS) and name not in PLACE
    }
    return {
        **clean, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "80",
        "EZPZ_STATE_DIR": str(tmp_path / "state"), "TMPDIR": str(folder),
    }  # fmt: skip


@pytest.fixture
def ranks(fork_server, clean_env, tmp_path):
    """Run a script on n real ranks; return (status, output, errors) of each."""
    started = []
    (tmp_path / "cwd").mkdir()

    def run(n, script, *, nodes=1, timeout=120):
        with socket.socket() as probe:
            # Held, without listening, so that no test beside this one is given the same port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            mine = []
            for rank in range(n):
                files = [tmp_path / f"{len(started)}.{name}" for name in ("out", "err")]
                local = n // nodes
                env = {
                    **clean_env,
                    "RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_RANK": str(rank % local),
                    "LOCAL_WORLD_SIZE": str(local), "GROUP_RANK": str(rank // local),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                }  # fmt: skip
                text = PROGRAM.format(
                    out=str(files[0]), err=str(files[1]), env=env, script=script,
                    cwd=str(tmp_path / "cwd"),
                )  # fmt: skip
                process = fork_server.Process(target=exec, args=(text, {"__name__": "__rank__"}))
                process.start()
                started.append(process)
                mine.append((process, files))
            done = []
            for process, files in mine:
                process.join(timeout)
                out, err = (path.read_text() for path in files)
                assert process.exitcode is not None, f"still running after {timeout} s: {err}"
                done.append((process.exitcode, out, err))
            return done

    yield run
    for process in started:
        process.kill()
        process.join()


@pytest.fixture
def tested(ranks):
    """Run a test on n ranks, which all end with 0, and return what it found."""

    def run(n, *words, **kwargs):
        done = ranks(n, TEST.format(words=["--json", *words]), **kwargs)
        assert [status for status, _, _ in done] == [0] * n, done[0][2]
        assert all(not out for _, out, _ in done[1:]), "rank 0 alone speaks"
        return json.loads(done[0][1])

    return run
