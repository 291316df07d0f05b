"""From a plan to a launch: its hostfile, its environment, its command line."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from ezpz_launch._errors import LaunchError
from ezpz_launch._plan.launchers import build_argv, build_hostfile, needs_hostfile
from ezpz_launch._plan.plan import LaunchPlan
from ezpz_launch._plan.shim import SHIM, pack_env
from ezpz_launch._run.launch import VARIABLE, Launch


@contextmanager
def prepare_launch(
    planned: LaunchPlan, env: Mapping[str, str], directory: str, shim: str = SHIM, **fields: Any
) -> Iterator[tuple[LaunchPlan, Launch]]:
    """Yield the plan, its hostfile written, and the launch; ``fields`` are others of `Launch`."""
    environment = {name: value for name, value in env.items() if name not in planned.removed}
    environment |= planned.environment
    packed = pack_env(environment)
    with write_hostfile(replace(planned, control=(VARIABLE, *packed)), directory) as ready:
        placement = ready.placement
        yield ready, Launch(
            argv=tuple(shim if word == SHIM else word for word in build_argv(ready)),
            nproc=placement.nproc, hosts=placement.hosts, ppn=placement.ppn,
            on_this_host=ready.on_this_host, environment=environment | packed,
            scratch="" if ready.hostfile == planned.hostfile else ready.hostfile, **fields,
        )  # fmt: skip


@contextmanager
def write_hostfile(planned: LaunchPlan, directory: str) -> Iterator[LaunchPlan]:
    """Write the hostfile that the launcher reads, if it reads one, for as long as it may."""
    if not needs_hostfile(planned):
        yield planned
        return
    path = os.path.join(directory, f"ezpz-hosts-{os.urandom(8).hex()}")
    lines = build_hostfile(planned)  # none: the launcher makes a folder there
    try:
        if lines:
            with open(path, "x", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
    except OSError as error:
        raise LaunchError(
            f"cannot make a file in {directory} ({error.strerror}); expected a directory for the "
            "launcher's hostfile; set TMPDIR to one"
        ) from error
    try:
        yield replace(planned, hostfile=path)
    finally:
        if lines:
            with suppress(FileNotFoundError):  # what cleans /tmp found it old
                os.unlink(path)
        else:
            shutil.rmtree(path, ignore_errors=True)
