"""The check ``scheduler``: whose job this is, and whether its scheduler answers.

Run on Slurm 22.05.8; PBS's part is not run on hardware.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ezpz_topo import _commands
from ezpz_topo._allocation import Allocation, get_allocation, scheduler_of
from ezpz_topo._errors import SchedulerError, TopoError
from ezpz_topo._match import get_machine_info
from ezpz_topo._nodelist import fold_nodelist
from ezpz_topo._qstat import get_pbs_folder

from .result import CheckResult

_PING = {"slurm": ("scontrol", "ping"), "pbs": ("qstat", "-B")}
"""What asks the server itself something small (manual pages of Slurm and OpenPBS)."""

_TITLES = {"slurm": "Slurm", "pbs": "PBS"}
_LATER = "try again later: ezpz doctor --timeout=60 --only=scheduler"


def check(seconds: float, env: Mapping[str, str] | None = None) -> CheckResult:
    """Say whose job this is, and whether the scheduler's commands answer.

    Args:
        seconds: How long it may take.
        env: The environment to read; default ``os.environ``.
    """
    env = os.environ if env is None else env
    try:
        scheduler, machine = scheduler_of(env), get_machine_info(env)
        if scheduler != "none":
            return _in_job(scheduler, get_allocation(env, ask=False), seconds, env)
        return _outside(machine.scheduler, machine.name, seconds, env)
    except TopoError as error:
        return CheckResult.of(error)


def ask_server(scheduler: str, seconds: float, env: Mapping[str, str]) -> str:
    """Return why the scheduler's server does not answer; empty where it does."""
    try:
        answer = _commands.ask(
            _PING[scheduler], env=env, time_limit=seconds, attempts=1, place=_places(env)[scheduler]
        )
    except SchedulerError as error:
        return str(error).partition("; ")[0]
    # `scontrol ping` of 22.05 says so for a controller of several, with exit status 0.
    if scheduler == "slurm" and "is UP" not in answer.stdout:
        return f"scontrol ping says {answer.stdout.strip()!r}"
    return ""


def job_of_server(
    scheduler: str, job_id: str, seconds: float, env: Mapping[str, str]
) -> Allocation:
    """Return the job as the scheduler's server knows it.

    Raises:
        TopoError: It knows no such job that runs, or does not answer.
    """
    asked = {**env, _commands.TIME_LIMIT: f"{max(seconds, 0.001):.3f}"}
    if scheduler == "slurm":
        from ezpz_topo import _scontrol  # noqa: PLC0415  # only a job pays

        return _scontrol.job_by_id(job_id, asked)
    from ezpz_topo import _pbs_jobs  # noqa: PLC0415

    return _pbs_jobs.job_by_id(job_id, asked)


def _in_job(scheduler: str, job: Allocation, seconds: float, env: Mapping[str, str]) -> CheckResult:
    title, job_id = _TITLES[scheduler], job.job_id or ""
    facts: dict[str, object] = {"scheduler": scheduler, "job_id": job_id, "hosts": list(job.hosts)}
    if why := ask_server(scheduler, 0.4 * seconds, env):
        return CheckResult.warning(
            f"job {job_id} of {title}, by its variables; but {why}",
            _remedy(scheduler, env),
            **facts,
        )
    try:
        # Twice at most, with a pause between.
        known = job_of_server(scheduler, job_id, 0.2 * seconds, env)
    except TopoError as error:
        return CheckResult.of(error, **facts)
    ends = "" if known.ends_at is None else f", ends at {known.ends_at:%Y-%m-%d %H:%M} UTC"
    count = f"{len(job.hosts)} host" + ("s" if len(job.hosts) != 1 else "")
    return CheckResult.ok(
        f"{title} answers; job {job_id} has {count}: {_short(job.hosts)}{ends}", **facts
    )


def _outside(expected: str, machine: str, seconds: float, env: Mapping[str, str]) -> CheckResult:
    # The machine's own first: another one's client may be installed beside it, and not set up.
    here = [name for name in _PING if name == expected or _is_here(name, env)]
    here.sort(key=lambda name: name != expected)
    if not here:
        return CheckResult.ok("none, and no job: ranks are started on this host", scheduler="none")
    why = {}
    for asked in here:
        why[asked] = ask_server(asked, 0.8 * seconds / len(here), env)
        if not why[asked]:
            what = f"{_TITLES[asked]} answers; no job in this shell"
            return CheckResult.ok(what, scheduler=asked)
    asked = here[0]
    if asked == expected:
        reason = f"{machine} has {_TITLES[asked]}, and {why[asked]}"
        remedy = _remedy(asked, env)
    else:
        reason = f"{_TITLES[asked]}'s commands are here, but {why[asked]}"
        remedy = "nothing, if you start ranks on this host only; else ask the site"
    return CheckResult.warning(reason, remedy, scheduler=asked)


def _is_here(scheduler: str, env: Mapping[str, str]) -> bool:
    return bool(_commands.find(_PING[scheduler][0], env, _places(env)[scheduler]))


def _remedy(scheduler: str, env: Mapping[str, str]) -> str:
    folder = _places(env)[scheduler] or "/usr/bin"
    return f"add {folder} to PATH if the command is missing; else {_LATER}"


def _places(env: Mapping[str, str]) -> dict[str, str]:
    return {"slurm": "", "pbs": get_pbs_folder(env)}


def _short(hosts: tuple[str, ...]) -> str:
    folded = fold_nodelist(hosts)
    return folded if len(folded) <= 60 else f"{folded[:57]}..."
