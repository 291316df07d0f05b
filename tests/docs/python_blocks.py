"""Run a page's Python: in one process, or on ranks."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

PRELOADED = ["torch", "torch.distributed", "ezpz_dist", "ezpz_tp", "ezpz_obs"]


class BlockError(AssertionError):
    """A block of a page raised, or a script of it failed."""


def run_in_order(blocks: Sequence[tuple[str, str]], folder: Path) -> list[str]:
    """Run (place, code) one after another in a namespace of their own; return what each printed.

    The process is forked from one that has imported torch: a page costs no second import.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(blocks, str(folder), dict(os.environ), theirs))
    child.start()
    theirs.close()
    try:
        if not ours.poll(120):
            raise BlockError(f"{blocks[0][0]}: not done within 120 s")
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


def _run(
    blocks: Sequence[tuple[str, str]], folder: str, env: Mapping[str, str], answer: Connection
) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    # The classes of a block find their module, as those of a script do.
    names = vars(sys.modules["__main__"])
    printed: list[str] = []
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


def run_on_ranks(name: str, code: str, folder: Path, *, ranks: int = 2) -> str:
    """Save a script and run it by ezpz-launch; return its output."""
    (folder / name).write_text(code, encoding="utf-8")
    words = [sys.executable, "-m", "ezpz_launch", "-n", str(ranks), sys.executable, name]
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    if done.returncode:
        raise BlockError(f"{name} on {ranks} ranks: status {done.returncode}\n{done.stderr}")
    return done.stdout


def sides_of(diff: str) -> tuple[str, str, int]:
    """What a diff is made from, what it makes, and how many lines it adds."""
    lines = diff.splitlines()
    before = [line[1:] for line in lines if not line.startswith("+")]
    after = [line[1:] for line in lines if not line.startswith("-")]
    added = sum(line.startswith("+") for line in lines)
    return "\n".join(before) + "\n", "\n".join(after) + "\n", added
