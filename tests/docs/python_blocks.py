"""Run a page's Python: in one process, or on ranks."""

import atexit
import contextlib
import io
import multiprocessing.connection
import os
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import traceback
from pathlib import Path

# torch._dynamo: what an optimizer imports at its first step, for seconds on each rank.
PRELOADED = ["torch.distributed", "torch._dynamo", "ezpz_dist", "ezpz_tp", "ezpz_obs"]

_ON_CPUS = {
    "accelerate": ("--multi_gpu --main_process_port {port}", {"ACCELERATE_USE_CPU": "1"}),
    "torchrun": ("--master-port {port}", {}),
}
"""What lets another's launcher start ranks on CPUs, beside others of its kind. DeepSpeed's is left
out: on CPUs it compiles C++, and takes half a minute of two cores."""

_MARKS_ITS_RANK = "import os; open(f'rank-{os.environ[\"RANK\"]}', 'x').close()\n"


class BlockError(AssertionError):
    """A block of a page raised, or a script of it failed."""


def _start(target, *given):
    """Fork a process from one that has imported torch, which takes longer than most pages."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=target, args=given)
    process.start()
    return process


def run_in_order(blocks, folder):
    """Run (place, code) one after another in a namespace of their own; return what each printed."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = _start(_run, blocks, str(folder), dict(os.environ), theirs)
    theirs.close()
    try:
        if not ours.poll(240):
            raise BlockError(f"{blocks[0][0]}: not done within 240 s")
        printed, trouble = ours.recv()
    except EOFError:
        raise BlockError(f"{blocks[0][0]}: the process ended") from None
    finally:
        child.kill()
        child.join()
        ours.close()
    if trouble:
        raise BlockError(trouble)
    return printed


def _run(blocks, folder, env, answer):
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    # The classes of a block find their module, as those of a script do.
    names = vars(sys.modules["__main__"])
    printed = []
    for place, code in blocks:
        try:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                # Line numbers of the page in tracebacks.
                page, _, line = place.rpartition(":")
                exec(compile("\n" * int(line) + code, page, "exec"), names)
        except BaseException:  # noqa: BLE001  # a page may exit; its traceback is the answer
            answer.send((printed, f"{place}\n{traceback.format_exc()}"))
            return
        printed.append(out.getvalue())
    answer.send((printed, ""))


def run_on_ranks(name, code, folder, *, ranks=2):
    """Save a script, run it on forked ranks with ezpz-launch's variables, and return its output."""
    (folder / name).write_text(code, encoding="utf-8")
    with socket.socket() as probe, tempfile.TemporaryDirectory() as said:
        # Held, without listening, so that no test beside this one is given the same port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        job |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
        job |= dict.fromkeys(("NODE_RANK", "GROUP_RANK"), "0")
        started = []
        for rank in range(ranks):
            env = {**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(_start(_run_rank, name, str(folder), env, f"{said}/{rank}"))
        try:
            # The first that fails ends the others, which may wait for it.
            left = list(started)
            while left and multiprocessing.connection.wait([one.sentinel for one in left], 240):
                left = [one for one in left if one.exitcode is None]
                if any(one.exitcode for one in started):
                    break
        finally:
            for one in started:
                one.kill()
                one.join()
        out, err = (
            "".join(path.read_text() for path in sorted(Path(said).glob(f"*.{kind}")))
            for kind in ("out", "err")
        )
    status = next((one.exitcode for one in started if one.exitcode and one not in left), bool(left))
    if status:
        raise BlockError(f"{name} on {ranks} ranks: status {status}\n{err}")
    return out


def _run_rank(name, folder, env, said):
    for number, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{said}.{kind}", os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.argv = [name]
    try:
        runpy.run_path(name, run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def command_before(code):
    """The words of a shell's line that ends with ``# before``; none where there is no such line."""
    line = re.search(r"^(.+?) +# before$", code, re.MULTILINE)
    return shlex.split(line[1]) if line else []


def run_before(words, code, folder):
    """Run a script without ezpz by words that end with its name; None: not started here."""
    try:
        return _run_before(words, code, folder)
    except BlockError as error:
        # torch 2.13 alone, without a line of ours, aborts at a rank's end now and then.
        if "terminate called without an active exception" not in str(error):
            raise
        return _run_before(words, code, folder)


def _run_before(words, code, folder):
    program = shutil.which(words[0], path=sysconfig.get_path("scripts"))
    if program is None or words[0] not in _ON_CPUS:
        return None
    options, variables = _ON_CPUS[words[0]]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        options = options.format(port=probe.getsockname()[1])
    (folder / words[-1]).write_text(_MARKS_ITS_RANK + code, encoding="utf-8")
    process = subprocess.Popen(
        [program, *words[1:-1], *options.split(), words[-1]],
        env={**os.environ, **variables, "PATH": f"{Path(program).parent}:{os.environ['PATH']}"},
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        printed, said = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        # A launcher that is told to end takes its ranks along.
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=30)
        process.kill()
        raise
    ranks = sorted(path.name for path in folder.glob("rank-*"))
    if process.returncode or ranks != ["rank-0", "rank-1"]:
        raise BlockError(f"{' '.join(words)}: status {process.returncode}, {ranks}\n{said}")
    return printed


def sides_of(diff):
    """What a diff is made from, what it makes, and how many lines it adds."""
    lines = diff.splitlines()
    before = [line[1:] for line in lines if not line.startswith("+")]
    after = [line[1:] for line in lines if not line.startswith("-")]
    added = sum(line.startswith("+") for line in lines)
    return "\n".join(before) + "\n", "\n".join(after) + "\n", added
