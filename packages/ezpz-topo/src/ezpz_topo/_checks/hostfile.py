"""The check ``hostfile``: it names hosts that the scheduler gave us.

Run on Slurm 22.05.8; PBS's part is not run on hardware.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from ezpz_topo._allocation import get_allocation, scheduler_of
from ezpz_topo._errors import SchedulerError, TopoError
from ezpz_topo._fallback import Hosts, get_hosts
from ezpz_topo._hosts import host_key

from .result import CheckResult
from .scheduler import job_of_server

_NODE_VARIABLES = {"slurm": "Slurm's variables", "pbs": "PBS_NODEFILE"}


def check(seconds: float, env: Mapping[str, str] | None = None) -> CheckResult:
    """Compare the hosts that ezpz would use with those of the job, as its scheduler knows it.

    Args:
        seconds: How long it may take.
        env: The environment to read; default ``os.environ``.
    """
    env = os.environ if env is None else env
    try:
        used, scheduler = get_hosts(None, env), scheduler_of(env)
        if scheduler == "none":
            return _without_job(used)
        job = get_allocation(env, ask=False)
        given, by, unheard = job.hosts, job.sources["hosts"], ""
        try:
            given = job_of_server(scheduler, job.job_id or "", 0.35 * seconds, env).hosts
            by = f"{scheduler}'s server"
        except SchedulerError as error:
            # The check "scheduler" says so too, and whether that is an error.
            unheard = f" ({by}; its server did not tell: {str(error).partition('; ')[0]})"
        if strangers := _strangers(job.hosts, given):
            return CheckResult.error(
                f"{_NODE_VARIABLES[scheduler]} name {_some(strangers)}, which job {job.job_id} "
                f"does not have: {_some(given)} ({by})",
                "unset the variables that another job left in this shell, or open a new one",
                hosts=list(job.hosts), job_hosts=list(given),
            )  # fmt: skip
    except TopoError as error:
        return CheckResult.of(error)
    hosts = [entry.host for entry in used.entries]
    facts = {"hosts": hosts, "job_hosts": list(given), "source": used.source}
    if strangers := _strangers(hosts, given):
        return CheckResult.error(
            f"{used.source}={used.path} names {_some(strangers)}, which job {job.job_id} does not "
            f"have: {_some(given)} ({by})",
            f"unset {used.source}, or write the job's hosts into another file and name that",
            **facts,
        )
    what = f"{used.source}={used.path}" if used.path else f"no hostfile is needed: {used.source}"
    return CheckResult.ok(
        f"{what}: {len(hosts)} of the {len(given)} hosts of job {job.job_id}{unheard}", **facts
    )


def _without_job(used: Hosts) -> CheckResult:
    hosts = [entry.host for entry in used.entries]
    if used.path is None:
        return CheckResult.ok("none is named; ranks are started on this host", hosts=hosts)
    return CheckResult.ok(
        f"{used.source}={used.path}: {len(hosts)} hosts ({_some(hosts)}); no job to compare with",
        hosts=hosts, source=used.source,
    )  # fmt: skip


def _strangers(hosts: Iterable[str], given: Iterable[str]) -> list[str]:
    known = {host_key(host) for host in given}
    return [host for host in hosts if host_key(host) not in known]


def _some(hosts: Iterable[str]) -> str:
    names = list(hosts)
    return ", ".join([*names[:4], *(["..."] if len(names) > 4 else [])])
