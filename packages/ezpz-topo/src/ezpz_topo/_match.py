"""On which machine: match this host to one of the machine files, the user's own included."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from ._allocation import scheduler_of
from ._errors import MachineError
from ._hosts import get_hostname, short_name
from ._machine import Machine, read_machine
from ._machine_file import machine_files, read_rules, read_text

GENERIC = {"slurm": "generic-slurm", "pbs": "generic-pbs", "none": "workstation"}
"""Which file serves where no named machine matches, by the scheduler of the job variables."""

_OF_THE_JOB, _INHERITED, _SHORT_NAME = 3, 2, 1
"""How far a match is believed: the scheduler's or kernel's own word, then variables that a
shell may have inherited from elsewhere, then short host names, which several sites use."""


def get_machine_info(
    env: Mapping[str, str] | None = None, *, hostname: str | None = None
) -> Machine:
    """Return the machine that this host belongs to, or the generic one of its scheduler.

    ``EZPZ_MACHINE`` decides if set. Else the files' match rules are held against the job's
    server or cluster and the kernel's host name with domain; then against variables that a
    shell may have inherited (``NERSC_HOST``, ``PBS_O_HOST``, ...); then against the short
    host name. What the job's scheduler or a variable of that standing contradicts is set
    aside, and two machines of the same standing are none. No name is looked up.

    Args:
        env: The environment to read; default ``os.environ``.
        hostname: This host's name; default, the kernel's.

    Raises:
        MachineError: ``EZPZ_MACHINE`` names no machine, a folder of ``EZPZ_MACHINES`` is
            missing, or a file that matters here is wrong.
    """
    env = os.environ if env is None else env
    files = machine_files(env)
    scheduler = scheduler_of(env)
    asked = env.get("EZPZ_MACHINE", "")
    if asked and asked.lower() not in files:
        names = ", ".join(sorted(files))
        raise MachineError(f"EZPZ_MACHINE={asked!r}; expected one of {names}; or add that file")
    if asked:
        machine, why = read_machine(asked.lower(), files), f"EZPZ_MACHINE={asked}"
        odd = _odd(machine, scheduler)
        return replace(machine, matched_by=why, notes=(f"{why}, but {odd}",) if odd else ())
    hostname = get_hostname() if hostname is None else hostname
    found: list[tuple[int, str, Machine]] = []
    notes: list[str] = []
    for name, path in files.items():
        rules = read_rules(read_text(path), path)
        standing, why, against = _match(rules, env, hostname)
        if not standing:
            continue
        machine = read_machine(name, files)
        against = _odd(machine, scheduler) or against
        if against:
            notes.append(f"{why} set aside for {name}: {against}")
        else:
            found.append((standing, why, machine))
    best = max((standing for standing, _, _ in found), default=0)
    first = [(why, machine) for standing, why, machine in found if standing == best]
    notes += [f"{why} set aside for {m.name}" for standing, why, m in found if standing < best]
    if len(first) == 1:
        return replace(first[0][1], matched_by=first[0][0], notes=tuple(notes))
    if first:
        both = ", ".join(f"{machine.name} ({why})" for why, machine in first)
        notes.append(f"{both}: cannot tell which; set EZPZ_MACHINE to the right one")
    job = {"slurm": "SLURM_JOB_ID is set", "pbs": "PBS_JOBID is set"}.get(scheduler, "no job")
    why = f"no machine is certain; {job}"
    return replace(
        read_machine(GENERIC.get(scheduler, "workstation"), files),
        matched_by=why,
        notes=tuple(notes),
    )


def get_machine(env: Mapping[str, str] | None = None) -> str:
    """Return the name of the machine that this host belongs to (see `get_machine_info`)."""
    return get_machine_info(env).name


def known_machines(env: Mapping[str, str] | None = None) -> dict[str, Machine]:
    """Read every machine file; return the machines by name. Raises MachineError for a wrong one."""
    files = machine_files(os.environ if env is None else env)
    return {name: read_machine(name, files) for name in sorted(files)}


def _odd(machine: Machine, scheduler: str) -> str:
    odd = scheduler not in ("none", machine.scheduler)
    return f"this is a {scheduler} job and {machine.name} has {machine.scheduler}" if odd else ""


def _match(
    rules: Mapping[str, list[str]], env: Mapping[str, str], hostname: str
) -> tuple[int, str, str]:
    """Return how far these rules hold (0: not), by which, and what speaks against them."""
    found: list[tuple[int, str]] = []
    against: list[tuple[int, str]] = []
    in_slurm = bool(env.get("SLURM_JOB_ID"))
    domains, hostnames = rules.get("domains", []), rules.get("hostnames", [])
    for variable, values in rules.items():
        value = env.get(variable)
        if variable in ("domains", "hostnames") or not value:
            continue
        # Slurm sets the cluster's name for its jobs; any other variable may be inherited.
        own = in_slurm and variable == "SLURM_CLUSTER_NAME"
        standing, shown = _OF_THE_JOB if own else _INHERITED, f"{variable}={value}"
        if value not in values:
            against.append((standing, shown))
            continue
        found.append((standing, shown))
        if domains and "." in hostname and not _under(hostname, domains):
            against.append((_INHERITED, f"the host is {hostname}"))
    # The id of a PBS job is 123.server, or 123[4].server in an array.
    job_id = env.get("PBS_JOBID", "")
    for standing, host, shown in (
        (_OF_THE_JOB, job_id.partition(".")[2], f"PBS_JOBID={job_id}"),
        (_INHERITED, env.get("PBS_O_HOST", ""), f"PBS_O_HOST={env.get('PBS_O_HOST')}"),
    ):
        if _under(host, domains) or _called(host, hostnames):
            found.append((standing, shown))
    if _under(hostname, domains):
        found.append((_OF_THE_JOB, f"the domain of host {hostname}"))
    elif _called(hostname, hostnames):
        found.append((_SHORT_NAME, f"the name of host {hostname}"))
    if not found:
        return 0, "", ""
    standing, why = max(found, key=lambda rule: rule[0])
    return standing, why, next((what for level, what in against if level >= standing), "")


def _under(host: str, domains: list[str]) -> bool:
    return any(f".{host}".endswith(f".{domain}") for domain in domains)


def _called(host: str, patterns: list[str]) -> bool:
    """Return whether a host's short name is one of these; ``#`` at the end is any number."""
    name = short_name(host)
    digits = name[len(name.rstrip("0123456789")) :]
    stem = name[: len(name) - len(digits)]
    return bool(name) and (name in patterns or (bool(digits) and f"{stem}#" in patterns))
