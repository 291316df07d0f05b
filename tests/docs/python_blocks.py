"""Run a page's Python in one process, and its scripts as they are without ezpz."""

import contextlib
import io
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import traceback
from pathlib import Path

_ON_CPUS = {
    "accelerate": ("--multi_gpu --main_process_port {port}", {"ACCELERATE_USE_CPU": "1"}),
    "torchrun": ("--master-port {port}", {}),
}
"""What lets another's launcher start ranks on CPUs, beside others of its kind. DeepSpeed's is left
out: on CPUs it compiles C++, and takes half a minute of two cores."""

_MARKS_ITS_RANK = "import os; open(f'rank-{os.environ[\"RANK\"]}', 'x').close()\n"
_ENDS_AT_ITS_LAST_LINE = "import sys; sys.stdout.flush(); os._exit(0)\n"
"""Without the interpreter's end, in which torch 2.13 alone may abort: a thread of gloo that still
holds the last step's tensors asks for a GIL that is gone (pytorch/pytorch#179291)."""


class BlockError(AssertionError):
    """A block of a page raised, or a script of it failed."""


def run_in_order(fork_server, blocks, folder):
    """Run (place, code) one after another in a namespace of their own; return what each printed."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = fork_server.Process(target=_run, args=(blocks, str(folder), dict(os.environ), theirs))
    child.start()
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
    # The classes of a block find their module, as those of a script do, also in other processes.
    names = vars(sys.modules["__main__"])
    names["__file__"] = os.path.abspath("page.py")
    with open("page.py", "w", encoding="utf-8") as file:
        file.write(_program_of(blocks))
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


def _program_of(blocks):
    """Join the blocks of a page, each at its line."""
    program = ""
    for place, code in blocks:
        line = int(place.rpartition(":")[2])
        program += "\n" * (line - program.count("\n")) + code.rstrip("\n") + "\n"
    return program


def command_before(code):
    """The words of a shell's line that ends with ``# before``; none where there is no such line."""
    line = re.search(r"^(.+?) +# before$", code, re.MULTILINE)
    return shlex.split(line[1]) if line else []


def run_before(words, code, folder):
    """Run a script without ezpz by words that end with its name; None: not started here."""
    program = shutil.which(words[0], path=sysconfig.get_path("scripts"))
    if program is None or words[0] not in _ON_CPUS:
        return None
    options, variables = _ON_CPUS[words[0]]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        options = options.format(port=probe.getsockname()[1])
    (folder / words[-1]).write_text(
        _MARKS_ITS_RANK + code + _ENDS_AT_ITS_LAST_LINE, encoding="utf-8"
    )
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
