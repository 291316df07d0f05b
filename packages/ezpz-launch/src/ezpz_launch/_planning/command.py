"""The user's command: whether it is there, before any rank is started for it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ezpz_launch._errors import CommandNotExecutableError, CommandNotFoundError


def require_command(program: str, env: Mapping[str, str]) -> None:
    """Check that the command exists here and can be executed.

    Raises:
        CommandNotFoundError: It is not there.
        CommandNotExecutableError: It cannot be executed.
    """
    has_directory = os.sep in program
    directories = [""] if has_directory else env.get("PATH", "").split(os.pathsep)
    candidates = [os.path.join(directory, program) for directory in directories]
    found = [path for path in candidates if os.path.isfile(path)]
    if any(os.access(path, os.X_OK) for path in found):
        return
    if found:
        hint = (
            f"ezpz-launch python {program}" if program.endswith(".py") else f"chmod +x {found[0]}"
        )
        raise CommandNotExecutableError(f"{found[0]} is not executable; try: {hint}")
    where, hint = "not found on PATH", ""
    if has_directory:
        where = "no such file"
        if not os.path.isabs(program):
            where += f" in {os.getcwd()}"
            # A job of PBS begins in the home.
            folder = env.get("PBS_O_WORKDIR") or env.get("SLURM_SUBMIT_DIR") or ""
            is_there = folder and os.path.isfile(os.path.join(folder, program))
            hint = (
                f"; try: cd {folder}" if is_there else "; give its path from there, or a whole one"
            )
    elif program.endswith(".py") and os.path.isfile(program):
        hint = f"; try: ezpz-launch python {program}"
    elif os.path.isfile(program):
        hint = f"; try: ezpz-launch ./{program}"
    raise CommandNotFoundError(f"{program!r}: {where}{hint}")
