"""Real ranks for tests: processes with torchrun's variables, forked where torch is loaded once."""

import importlib.util
import json
import logging
import multiprocessing
import os
import socket
import subprocess
import sys
import textwrap

import pytest

from ezpz_obs._context import NOW

LAUNCHERS = ("SLURM_", "PBS_", "PMI", "OMPI_", "MPI_LOCAL", "EZPZ_", "TORCHELASTIC", "LOG_FROM")
RANK_VARIABLES = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
    "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip


# Without them there is nothing to test in that folder; test_extras.py says so.
EXTRAS = ("jinja2", "matplotlib", "plotext", "pyarrow", "xarray")
collect_ignore = [] if all(map(importlib.util.find_spec, EXTRAS)) else ["reports"]

PRELUDE = """
import json, os, sys, traceback
os.environ.update({env!r})
os.dup2(os.open({out!r} + ".err", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
import torch, torch.distributed as dist
torch.set_num_threads(1)
said = []
names = {{"RANK": {rank}, "SIZE": {size}, "say": said.append, "torch": torch, "dist": dist}}
try:
    exec(compile({code!r}, "program.py", "exec"), names)
except BaseException:
    os.write(2, traceback.format_exc().encode())
    raise
finally:
    with open({out!r}, "w") as file:
        json.dump(said, file)
"""


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """Whoever starts the tests from a job: they are one process, and say what they always say."""
    for name in list(os.environ):
        if name.startswith(LAUNCHERS) or name in RANK_VARIABLES:
            monkeypatch.delenv(name)
    monkeypatch.setattr(NOW, "step", None)


@pytest.fixture
def rank_1(monkeypatch):
    """Be the second rank of two."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def python(tmp_path):
    """Run a program in a process of its own, which ends with this status."""

    def run(code, *words, status=0, shell="", **given):
        """In a shell such as ``2>&-``, it has no standard error."""
        command = [sys.executable, "-c", textwrap.dedent(code), *map(str, words)]
        if shell:
            command = ["sh", "-c", f'exec "$@" {shell}', "sh", *command]
        env = {**os.environ, **given.pop("env", {})}
        done = subprocess.run(
            command, cwd=tmp_path, env=env, text=True, check=False,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **given},
        )  # fmt: skip
        assert done.returncode == status, done.stderr
        return done

    return run


@pytest.fixture
def warned(caplog):
    """Return what was logged from WARNING upward, as texts."""
    return lambda: [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


@pytest.fixture(scope="session")
def fork_server():
    pytest.importorskip("torch", reason="torch is not installed")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "ezpz_obs._across"])
    return context


@pytest.fixture
def ranks(fork_server, tmp_path):
    """Start ranks of a program, and return what each said, with their exit statuses and errors."""
    started = []

    def start(code, size, *, set_up=True, wait=None):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if set_up:
            begin = "from datetime import timedelta\n"
            begin += "dist.init_process_group('gloo', timeout=timedelta(seconds=30))\n"
        else:
            begin = ""
        code = begin + textwrap.dedent(code)
        processes = []
        for rank in range(size):
            env = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }  # fmt: skip
            out = str(tmp_path / f"said-{rank}")
            program = PRELUDE.format(code=code, env=env, out=out, rank=rank, size=size)
            process = fork_server.Process(target=exec, args=(program, {}))
            process.start()
            processes.append(process)
        started.extend(processes)
        for process in [processes[rank] for rank in wait] if wait else processes:
            process.join(300)  # a busy machine has its time
            assert process.exitcode is not None, "it still runs"
        return [Rank(tmp_path, rank, process) for rank, process in enumerate(processes)]

    yield start
    for process in started:
        if process.is_alive():
            process.kill()
        process.join()


class Rank:
    """What became of one rank."""

    def __init__(self, folder, rank, process):
        self.process, self.status = process, process.exitcode
        said, error = folder / f"said-{rank}", folder / f"said-{rank}.err"
        self.said = json.loads(said.read_text()) if said.exists() else None
        self.err = error.read_text() if error.exists() else ""
