"""Checks of the user's command, before any rank is started for it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ezpz_launch._errors import CommandNotExecutableError, CommandNotFoundError, UsageError
from ezpz_launch._plan.options import PYTHON

# Whether it can be executed.


def require_command(program: str, env: Mapping[str, str]) -> None:
    """Refuse a program that cannot be executed, with a hint at the right command."""
    if os.sep in program:
        candidates = [program]
    else:
        folders = env.get("PATH", "").split(os.pathsep)
        candidates = [os.path.join(folder, program) for folder in folders]
    files = [path for path in candidates if os.path.isfile(path)]
    for path in files:
        if os.access(path, os.X_OK):
            return
    if files:
        hint = f"chmod +x {files[0]}"
        if program.endswith(".py"):
            hint = f"ezpz-launch python {program}"
        raise CommandNotExecutableError(f"{files[0]} is not executable; try: {hint}")
    if os.sep in program:
        reason = _explain_absent_path(program, env)
    else:
        reason = _explain_absent_name(program)
    raise CommandNotFoundError(f"{program!r}: {reason}")


def _explain_absent_path(program: str, env: Mapping[str, str]) -> str:
    if os.path.isabs(program):
        return "no such file"
    reason = f"no such file in {os.getcwd()}"
    # A job of PBS begins in the home.
    folder = env.get("PBS_O_WORKDIR") or env.get("SLURM_SUBMIT_DIR")
    if folder and os.path.isfile(os.path.join(folder, program)):
        return f"{reason}; try: cd {folder}"
    return f"{reason}; give its path from there, or a whole one"


def _explain_absent_name(program: str) -> str:
    reason = "not found on PATH"
    if not os.path.isfile(program):
        return reason
    if program.endswith(".py"):
        return f"{reason}; try: ezpz-launch python {program}"
    return f"{reason}; try: ezpz-launch ./{program}"


# Whether an interpreter has a program: its standard input, the null device, brings none.

_SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
_STANDARD_INPUT = ("-", "-s", "/dev/stdin")


def require_program(command: Sequence[str]) -> None:
    """Refuse a Python or a shell that would read its program from standard input."""
    name = os.path.basename(command[0])
    if name not in _SHELLS and not PYTHON.fullmatch(name):
        return
    arguments = command[1:]
    if arguments and arguments[-1] not in _STANDARD_INPUT:
        return
    for word in arguments[:-1]:
        if not word.startswith("-") or word.startswith("-c"):
            return
    raise UsageError(
        f"{' '.join(command)[:80]!r}: {name} without a program; expected one, such as: "
        f"{name} -c CODE, or: {name} FILE; every rank reads {os.devnull}, and nothing of "
        "standard input"
    )
