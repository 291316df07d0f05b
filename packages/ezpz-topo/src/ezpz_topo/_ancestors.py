"""Which launchers stand above this process: the tie-break where variables cannot decide.

Variables are inherited, so those of a launcher further up stay visible below another one;
of the processes above us the nearest launcher is the one that started us.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ._env import FAMILIES

_FAMILY_OF = {
    # The kernel keeps 15 bytes of a process's name.
    known: family.name
    for family in FAMILIES
    for name in family.processes
    for known in (name, name[:15])
}

_SHELL_STEP = re.compile(r"\[[0-9+]+\.(batch|extern|interactive)\]")
_DEEPEST = 256


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A process above this one that starts ranks.

    Attributes:
        family: The launcher, in the table's words.
        process: Its name and process id, for people.
    """

    family: str
    process: str

    @property
    def runs_a_shell(self) -> bool:
        """Whether it is a slurmstepd of no ranks: of a batch script, or an interactive shell."""
        return _SHELL_STEP.search(self.process) is not None


def launching_ancestors(pid: int | None = None, *, proc: str = "/proc") -> Iterator[Ancestor]:
    """Yield the launching processes above ``pid`` (default: this process), nearest first.

    Yields nothing where the kernel does not tell (macOS, a PID namespace of its own).

    Source: ``proc_pid_stat(5)``.
    """
    pid = os.getpid() if pid is None else pid
    for _ in range(_DEEPEST):
        pid = _parent(pid, proc)
        if pid <= 0:
            return
        for name in _names(pid, proc):
            if name in _FAMILY_OF:
                # slurmstepd writes its step there: "slurmstepd: [7.batch]".
                title = _command(pid, proc)[0] if name == "slurmstepd" else name
                yield Ancestor(_FAMILY_OF[name], f"{title or name} (pid {pid})")
                break


def _parent(pid: int, proc: str) -> int:
    stat = _read(f"{proc}/{pid}/stat")
    # pid (name) state ppid ...: a name may hold spaces and brackets.
    fields = stat.rpartition(b")")[2].split()
    return int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else 0


def _names(pid: int, proc: str) -> Iterator[str]:
    """Yield the process's own name, then that of the script or module a Python runs."""
    yield _read(f"{proc}/{pid}/comm").decode("utf-8", "replace").strip()
    words = [
        word.decode("utf-8", "replace") for word in _read(f"{proc}/{pid}/cmdline").split(b"\0")
    ]
    if not os.path.basename(words[0]).startswith("python"):
        return
    arguments = iter(words[1:])
    for word in arguments:
        if word == "-m":
            yield next(arguments, "")
            return
        if word in ("-W", "-X"):
            next(arguments, "")
        elif not word.startswith("-"):
            yield os.path.basename(word)
            # .../torch/distributed/run.py, as `python path` has it
            yield ".".join(word.removesuffix(".py").split(os.sep)[-3:])
            return


def _command(pid: int, proc: str) -> list[str]:
    return _read(f"{proc}/{pid}/cmdline").decode("utf-8", "replace").split("\0")


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(65536)
    except OSError:
        # It ended meanwhile, belongs to another user, or there is no /proc: not known.
        return b""
