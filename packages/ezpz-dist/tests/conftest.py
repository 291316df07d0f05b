"""Real ranks for tests: processes that meet over loopback, as torchrun's would.

They are forked from a server that has imported torch once, because the import takes longer
than most tests. What depends on how a process ends is tested with real launchers instead.
"""

import contextlib
import multiprocessing
import os
import socket
import struct
import sysconfig
import textwrap
import threading

import pytest

PRELUDE = """
import os, sys
for fd, path in ((1, {out!r}), (2, {err!r})):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), fd)
os.environ.clear()
os.environ.update({env!r})
import torch, torch.distributed as dist, ezpz_dist
torch.set_num_threads(1)
from ezpz_dist import *
def raises(kind, words, call, *args, **options):
    try:
        call(*args, **options)
    except kind as error:
        assert words in str(error), (words, error)
        return error
    raise AssertionError(f"not raised: {{words}}")
"""
"""What each rank begins with; ``raises`` returns the error that a call raises with these words."""
INTERPRETER = """
import atexit, linecache
sys.modules["__main__"].__file__ = {path!r}
status = 0
try:
    with open({path!r}) as file:
        exec(compile(file.read(), {path!r}, "exec"), {{"__name__": "__main__", "raises": raises}})
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

PRELOADED = [
    "torch.distributed", "ezpz_dist",
    # What some tests import on each rank, for seconds.
    "torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
    "torch.distributed.optim", "torch.distributed.tensor",
]  # fmt: skip
LAUNCHERS = ("SLURM_", "PBS_", "PMI", "OMPI_", "MPI_LOCAL", "EZPZ_", "TORCHELASTIC")
RANK_VARIABLES = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
    "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip


@pytest.fixture(scope="session")
def clean_env():
    """The environment without any launcher's variables, this environment's commands first."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHERS) and name not in RANK_VARIABLES
    }
    scripts = sysconfig.get_path("scripts")
    path = os.pathsep.join([scripts, env["PATH"]])
    # torch looks up the name of every address that it connects to; glibc's own wait is 5 s.
    return {**env, "PATH": path, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}


@pytest.fixture(scope="session")
def fork_server():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@pytest.fixture
def ranks(fork_server, clean_env, tmp_path):
    """Run a script on n real ranks and return what each printed; a failing rank fails the test.

    With ``check=False`` what is returned is (exit status, output, errors) of each. ``each``
    has variables for single ranks. ``program`` is a file to run instead of a script, as an
    interpreter would.
    """
    started, held = [], []

    def run(n, script, *, check=True, env=None, timeout=180, program=None, each=None):
        # Held, without listening, so that no test beside this one is given the same port.
        probe = socket.socket()
        held.append(probe)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        mine = []
        for rank in range(n):
            place = {
                "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
            files = [tmp_path / f"{len(started)}.{name}" for name in ("out", "err")]
            own = {**(place if n > 1 else {}), **(env or {}), **(each or {}).get(rank, {})}
            out, err = map(str, files)
            prelude = PRELUDE.format(out=out, err=err, env={**clean_env, **own})
            if program is not None:
                script = INTERPRETER.format(path=str(program))
            # exec is a function that a fresh process can import; one of ours would not be.
            process = fork_server.Process(
                target=exec, args=(prelude + textwrap.dedent(script), {"__name__": "__rank__"})
            )
            process.start()
            started.append(process)
            mine.append((process, files))
        done = []
        for process, files in mine:
            process.join(timeout)
            out, err = (path.read_text() for path in files)
            assert process.exitcode is not None, f"still running after {timeout} s: {err}"
            assert not check or process.exitcode == 0, "\n".join(
                f"{files[1].name}: {files[1].read_text()}" for _, files in mine
            )
            done.append(out if check else (process.exitcode, out, err))
        return done

    yield run
    for process in started:
        process.kill()
        process.join()
    for probe in held:
        probe.close()


@pytest.fixture
def listener():
    """Listen as a foreign program does, that is no store, and return the port."""
    listening, accepted = [], []

    def serve(server, kind):
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            if kind == "silent":
                accepted.append(connection)
                continue
            with connection, contextlib.suppress(OSError):  # who asked may have gone
                if kind == "http":
                    connection.recv(1000)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                if kind == "resets":
                    gone = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, gone)

    def listen(kind):
        server = socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=serve, args=(server, kind), daemon=True)
        thread.start()
        listening.append((server, thread))
        return server.getsockname()[1]

    yield listen
    for server, thread in listening:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()
    for connection in accepted:
        connection.close()


@pytest.fixture
def programs(ranks, tmp_path):
    """Run ``train.py`` on n real ranks to whatever end; return (status, output, errors) of each."""

    def run(n, text, **options):
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text).lstrip("\n"))
        return ranks(n, "", check=False, program=path, **options)

    return run
