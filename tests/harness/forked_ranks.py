"""Real ranks for the tests of every package: processes that meet over loopback.

They are forked from a server that has imported torch once, because the import takes longer
than most tests. What depends on how a process ends is tested with real launchers instead.
"""

import multiprocessing
import os
import socket
import sysconfig
import textwrap
from typing import NamedTuple

import pytest
from surroundings import clean

BEGIN = """
import os, sys
for fd, path in ((1, {out!r}), (2, {err!r})):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
os.environ.clear()
os.environ.update({env!r})
os.chdir({cwd!r})
import torch
torch.set_num_threads(1)
"""
INTERPRETER = """
import atexit, linecache
sys.modules["__main__"].__file__ = {path!r}
status = 0
try:
    with open({path!r}) as file:
        exec(compile(file.read(), {path!r}, "exec"), {{"__name__": "__main__"}})
except SystemExit as error:
    status = error.code or 0
except BaseException:
    kind, value, trace = sys.exc_info()
    sys.excepthook(kind, value, trace.tb_next)
    status = 1
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
"""
"""Ends a forked rank as an interpreter ends: its hooks are called, which multiprocessing skips."""


class Ended(NamedTuple):
    """What became of a rank; its status is None where it still ran."""

    status: int | None
    out: str
    err: str


@pytest.fixture(scope="session")
def user_env():
    """The environment of a user outside of any job, with this environment's commands first."""
    env = clean(os.environ)
    path = os.pathsep.join([sysconfig.get_path("scripts"), env["PATH"]])
    # On the CPU, also beside a GPU: there may be one, and several ranks.
    return {**env, "PATH": path, "TORCH_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="session")
def clean_env(user_env):
    """The environment of that user's ranks, of which each has one thread."""
    # torch looks up the name of every address that it connects to; glibc's own wait is 5 s.
    return {**user_env, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}


@pytest.fixture(scope="session")
def preloaded():
    """What the server imports beside torch, because ranks would for seconds."""
    return ()


@pytest.fixture(scope="session")
def prelude():
    """What the scripts of a package begin with."""
    return ""


@pytest.fixture(scope="session", autouse=True)
def fork_server(preloaded):
    # Before any test: there is one server a process, and code under test may start it, too; without
    # these modules every later rank would import torch.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", *preloaded])
    return context


@pytest.fixture
def ranks(fork_server, prelude, clean_env, tmp_path):
    """Run a script on n real ranks and return what each printed; a failing rank fails the test.

    With ``check=False`` what is returned is how each `Ended`. ``program`` is a file to run instead
    of a script, as an interpreter would; ``each`` has variables for single ranks; the ranks stand
    evenly on ``nodes``; ``wait`` are those whose end is waited for, for all by default.
    """
    started, held = [], []

    def run(
        n, script, *, check=True, env=None, each=None, timeout=550, nodes=1, cwd=".", program=None,
        wait=None,
    ):  # fmt: skip
        # Held, without listening, so that no test beside this one is given the same port.
        probe = socket.socket()
        held.append(probe)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        mine, local = [], n // nodes
        for rank in range(n):
            place = {
                "RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_RANK": str(rank % local),
                "LOCAL_WORLD_SIZE": str(local), "GROUP_RANK": str(rank // local),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]),
            }  # fmt: skip
            own = {**(place if n > 1 else {}), **(env or {}), **(each or {}).get(rank, {})}
            out, err = (tmp_path / f"{len(started)}.{name}" for name in ("out", "err"))
            out.touch()
            err.touch()
            begin = BEGIN.format(
                out=str(out), err=str(err), env={**clean_env, **own}, cwd=os.path.abspath(cwd)
            )
            end = INTERPRETER.format(path=str(program)) if program else textwrap.dedent(script)
            # exec is a function that a fresh process can import; one of ours would not be.
            process = fork_server.Process(
                target=exec, args=(begin + prelude + end, {"__name__": "__rank__"})
            )
            process.start()
            started.append(process)
            mine.append((process, out, err))
        for rank in wait or range(n):
            process, _, err = mine[rank]
            process.join(timeout)
            late = f"still running after {timeout} s: {err.read_text()}"
            assert process.exitcode is not None, late
        done = [
            Ended(process.exitcode, out.read_text(), err.read_text()) for process, out, err in mine
        ]
        if not check:
            return done
        failed = [f"rank {n} ended with {one.status}: {one.err}" for n, one in enumerate(done)]
        assert [one.status for one in done] == [0] * n, "\n".join(failed)
        return [one.out for one in done]

    yield run
    for process in started:
        process.kill()
        process.join()
    for probe in held:
        probe.close()


@pytest.fixture
def programs(ranks, tmp_path):
    """Run ``train.py`` on n real ranks to whatever end; return how each `Ended`."""

    def run(n, text, **options):
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text).lstrip("\n"))
        return ranks(n, "", check=False, program=path, **options)

    return run
