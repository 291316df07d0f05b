"""What `ezpz doctor` checks of hosts, networks and schedulers."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from . import _commands
from ._allocation import Allocation, scheduler_of
from ._errors import CheckError, SchedulerError, TopoError
from ._hosts import get_allocation, get_hosts, module_of
from ._machine import Machine, get_machine_info
from ._nodelist import fold_nodelist, host_key, short_name
from ._pbs import get_pbs_folder

# What a check of ``ezpz doctor`` found, and what to do about it.

STATUSES = ("ok", "warning", "error")


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check: every warning and error comes with its remedy.

    A check is a callable that takes the seconds that it has and returns one of these. A package
    contributes it by an entry point of the group ``ezpz.checks``, whose name is the check's.

    >>> CheckResult.warning("1 GiB free in /tmp", "remove what is old there").status
    'warning'

    Attributes:
        status: ``"ok"``; ``"warning"``: it works, with a loss; ``"error"``: it will not work.
        message: What was found, with the values that tell, in a sentence or two.
        remedy: What to do; empty where there is nothing to be done.
        details: The same for programs: texts, numbers, lists and mappings of these.
        name: The check's; ``ezpz doctor`` fills it in.
        source: The distribution and the object that checked; ``ezpz doctor`` fills it in.
        seconds: How long it took; ``ezpz doctor`` fills it in.
    """

    status: str
    message: str
    remedy: str = ""
    details: Mapping[str, object] = field(default_factory=dict)
    name: str = ""
    source: str = ""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise CheckError(
                f"a check's status is {self.status!r}; expected one of {', '.join(STATUSES)}"
            )
        for name in ("message", "remedy"):
            value: object = getattr(self, name)
            if not isinstance(value, str):
                raise CheckError(f"a check's {name} is {value!r}; expected text")
        if not self.message.strip():
            raise CheckError("a check's message is empty; expected what was found")
        if self.status != "ok" and not self.remedy.strip():
            raise CheckError(
                f"{self.status} without a remedy ({self.message[:60]!r}); expected what to do"
            )

    @classmethod
    def ok(cls, message: str, /, **details: object) -> CheckResult:
        """Return the result of what is as it should be."""
        return cls("ok", message, details=details)

    @classmethod
    def warning(cls, message: str, remedy: str, /, **details: object) -> CheckResult:
        """Return the result of what works, with a loss."""
        return cls("warning", message, remedy, details)

    @classmethod
    def error(cls, message: str, remedy: str, /, **details: object) -> CheckResult:
        """Return the result of what will not work."""
        return cls("error", message, remedy, details)

    @classmethod
    def of(cls, error: Exception, status: str = "error", /, **details: object) -> CheckResult:
        """Return the result that one of these packages' errors tells: its end is the remedy.

        >>> CheckResult.of(ValueError("n is 3; expected 2; start two")).remedy
        'start two'
        """
        message, separator, remedy = str(error).rpartition("; ")
        if not separator:
            message, remedy = str(error) or type(error).__name__, "see the message"
        return cls(status, message, remedy, {**details, "error": type(error).__name__})


# The check ``hostfile``: it names hosts that the scheduler gave us.

_NODE_VARIABLES = {"slurm": "Slurm's variables", "pbs": "PBS_NODEFILE"}


def check_hostfile(seconds: float, env: Mapping[str, str] | None = None) -> CheckResult:
    """Compare the hosts that ezpz would use with those of the job, as its scheduler knows it."""
    env = os.environ if env is None else env
    try:
        used, scheduler = get_hosts(None, env), scheduler_of(env)
        hosts = [entry.host for entry in used.entries]
        if scheduler == "none" and used.path is None:
            return CheckResult.ok("none is named; ranks are started on this host", hosts=hosts)
        if scheduler == "none":
            return CheckResult.ok(
                f"{used.source}={used.path}: {len(hosts)} hosts ({_some(hosts)}); no job to "
                "compare with",
                hosts=hosts, source=used.source,
            )  # fmt: skip
        job = get_allocation(env, ask=False)
        given, by, silent = job.hosts, job.sources["hosts"], ""
        try:
            given = _job_of_server(scheduler, job.job_id or "", 0.35 * seconds, env).hosts
            by = f"{scheduler}'s server"
        except SchedulerError as error:
            # The check "scheduler" says so too, and whether that is an error.
            silent = f" ({by}; its server did not tell: {str(error).partition('; ')[0]})"
        if strangers := _strangers(job.hosts, given):
            return CheckResult.error(
                f"{_NODE_VARIABLES[scheduler]} name {_some(strangers)}, which job {job.job_id} "
                f"does not have: {_some(given)} ({by})",
                "unset the variables that another job left in this shell, or open a new one",
                hosts=list(job.hosts), job_hosts=list(given),
            )  # fmt: skip
    except TopoError as error:
        return CheckResult.of(error)
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
        f"{what}: {len(hosts)} of the {len(given)} hosts of job {job.job_id}{silent}", **facts
    )


def _strangers(hosts: Iterable[str], given: Iterable[str]) -> list[str]:
    known = {host_key(host) for host in given}
    return [host for host in hosts if host_key(host) not in known]


def _some(hosts: Sequence[str]) -> str:
    return ", ".join([*hosts[:4], *(["..."] if len(hosts) > 4 else [])])


# Which interfaces a variable chooses: each library has a form of its own.

VARIABLES = {
    "NCCL_SOCKET_IFNAME": "prefixes", "GLOO_SOCKET_IFNAME": "names", "TP_SOCKET_IFNAME": "names",
    "CCL_KVS_IFACE": "names", "FI_TCP_IFACE": "names",
}  # fmt: skip
"""Variable to its form: NCCL's documentation, "Environment variables"; torch.distributed's,
"Common environment variables"; oneCCL's; libfabric's fi_tcp(7)."""


def chosen(form: str, text: str, interfaces: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the interfaces here that a variable chooses, and those it names that are missing."""
    if form == "names":
        words = [word.strip() for word in text.split(",") if word.strip()]
        missing = [word for word in words if word not in interfaces]
        return [word for word in words if word in interfaces], missing
    # NCCL: a list of prefixes, "=" before it for whole names, "^" for all but these. The first that
    # are here do; so only where none is here, all are missing.
    excluded, exact = text.startswith("^"), text.lstrip("^").startswith("=")
    words = [word for word in text.lstrip("^=").split(",") if word]
    fits = str.__eq__ if exact else str.startswith
    hit = [name for name in interfaces if any(fits(name, word) for word in words)]
    if excluded:
        return [name for name in interfaces if name not in hit], []
    return hit, [] if hit else words


# The check ``network``: variables of NCCL, libfabric, oneCCL and gloo, against this host.

_PREFIXES = ("NCCL_", "RCCL_", "CCL_", "FI_", "GLOO_", "UCX_", "MPICH_", "PALS_", "TORCH_NCCL_")
"""Beginnings of the variables that say how ranks reach each other."""


def check_network(_seconds: float, env: Mapping[str, str] | None = None) -> CheckResult:
    """Compare the variables of the high-speed network with the machine's file and this host."""
    # Only the resolver takes time, and knows no limit.
    env = os.environ if env is None else env
    try:
        machine, job = get_machine_info(env), None
        with contextlib.suppress(SchedulerError):  # the check "scheduler" says so
            job = get_allocation(env, ask=False)
    except TopoError as error:
        return CheckResult.of(error)
    set_here = {name: env[name] for name in sorted(env) if name.startswith(_PREFIXES)}
    facts: dict[str, object] = {"machine": machine.name, "variables": set_here}
    names = [name for _, name in socket.if_nameindex()]
    several = job is not None and job.num_nodes > 1
    for variable, form in VARIABLES.items():
        if env.get(variable) and (wrong := _wrong(*chosen(form, env[variable], names), several)):
            return CheckResult.error(
                f"{variable}={env[variable]}: {wrong}; this host has {', '.join(names)}",
                f"unset {variable}, or name an interface that every host has",
                interfaces=names, **facts,
            )  # fmt: skip
    if job is not None and several and (found := _fast_name(machine, job)):
        return CheckResult.error(*found, **facts)
    if warned := _differing(machine, env):
        return CheckResult.warning(*warned, **facts)
    said = f"{len(set_here)} variables of the network are set" if set_here else "nothing is set"
    told = [name for name in machine.environment if name.startswith(_PREFIXES)]
    missing = ", ".join(name for name in told if name not in set_here)
    if not told:
        said += f", and {machine.name} asks for none"
    elif missing:
        said += f"; ezpz-launch sets {missing} ({machine.name}.toml) for each rank"
    else:
        said += f", all that {machine.name}.toml asks for among them"
    return CheckResult.ok(said, **facts)


def _wrong(names: Sequence[str], missing: Sequence[str], several: bool) -> str:
    if missing:
        return f"no interface {', '.join(missing)}"
    if not names:
        return "no interface is left"
    if several and all(name in ("lo", "lo0") for name in names):
        return "loopback alone does not reach the other hosts of the job"
    return ""


def _fast_name(machine: Machine, job: Allocation) -> tuple[str, str] | None:
    """Say where the name at which the ranks would meet is none."""
    first = job.hosts[0]
    if not machine.hsn_suffix or not job.on_node or first.replace(".", "").isdigit():
        return None
    name = short_name(first) + machine.hsn_suffix
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        return (
            f"{name}, the first host on the fast network, cannot be looked up: {error}",
            f"ask the site; until then name another: --env MASTER_ADDR={first}",
        )
    return None


def _differing(machine: Machine, env: Mapping[str, str]) -> tuple[str, str] | None:
    for name, value in machine.environment.items():
        also = [each.environment.get(name) for each in machine.options.values()]
        if name.startswith(_PREFIXES) and env.get(name, value) not in (value, *also):
            return (
                f"{name}={env[name]}, where {machine.name}.toml has {value}",
                f"unset {name}, unless it is set on purpose: ezpz-launch then leaves it as it is",
            )
    return None


# The check ``scheduler``: whose job this is, and whether its scheduler answers.

_PING = {"slurm": ("scontrol", "ping"), "pbs": ("qstat", "-B")}
"""What asks the server itself something small (manual pages of Slurm and OpenPBS)."""

_TITLES = {"slurm": "Slurm", "pbs": "PBS"}
_TRY_LATER = "try again later: ezpz doctor --timeout=60 --only=scheduler"


def check_scheduler(seconds: float, env: Mapping[str, str] | None = None) -> CheckResult:
    """Say whose job this is, and whether the scheduler's commands answer."""
    env = os.environ if env is None else env
    try:
        scheduler, machine = scheduler_of(env), get_machine_info(env)
        if scheduler != "none":
            return _in_job(scheduler, get_allocation(env, ask=False), seconds, env)
        return _outside(machine.scheduler, machine.name, seconds, env)
    except TopoError as error:
        return CheckResult.of(error)


def _why_silent(scheduler: str, seconds: float, env: Mapping[str, str]) -> str:
    """Return why the scheduler's server does not answer; empty where it does."""
    if scheduler == "slurm":
        env = module_of("slurm").env_of_own_cluster(env)
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


def _job_of_server(
    scheduler: str, job_id: str, seconds: float, env: Mapping[str, str]
) -> Allocation:
    limit = {_commands.TIME_LIMIT: f"{max(seconds, 0.001):.3f}"}
    job: Allocation = module_of(scheduler).job_by_id(job_id, {**env, **limit})
    return job


def _in_job(scheduler: str, job: Allocation, seconds: float, env: Mapping[str, str]) -> CheckResult:
    title, job_id = _TITLES[scheduler], job.job_id or ""
    facts: dict[str, object] = {"scheduler": scheduler, "job_id": job_id, "hosts": list(job.hosts)}
    if why := _why_silent(scheduler, 0.4 * seconds, env):
        return CheckResult.warning(
            f"job {job_id} of {title}, by its variables; but {why}",
            _remedy(scheduler, env),
            **facts,
        )
    try:
        # Twice at most, with a pause between.
        known = _job_of_server(scheduler, job_id, 0.2 * seconds, env)
    except TopoError as error:
        return CheckResult.of(error, **facts)
    ends = "" if known.ends_at is None else f", ends at {known.ends_at:%Y-%m-%d %H:%M} UTC"
    count = f"{len(job.hosts)} host" + ("s" if len(job.hosts) != 1 else "")
    hosts = fold_nodelist(job.hosts)
    hosts = hosts if len(hosts) <= 60 else f"{hosts[:57]}..."
    return CheckResult.ok(f"{title} answers; job {job_id} has {count}: {hosts}{ends}", **facts)


def _outside(expected: str, machine: str, seconds: float, env: Mapping[str, str]) -> CheckResult:
    # The machine's own first: another one's client may be installed beside it, and not set up.
    here = [
        name
        for name, argv in _PING.items()
        if name == expected or _commands.find(argv[0], env, _places(env)[name])
    ]
    here.sort(key=lambda name: name != expected)
    if not here:
        return CheckResult.ok("none, and no job: ranks are started on this host", scheduler="none")
    why = {}
    for name in here:
        why[name] = _why_silent(name, 0.8 * seconds / len(here), env)
        if not why[name]:
            what = f"{_TITLES[name]} answers; no job in this shell"
            return CheckResult.ok(what, scheduler=name)
    name = here[0]
    if name == expected:
        reason, remedy = f"{machine} has {_TITLES[name]}, and {why[name]}", _remedy(name, env)
    else:
        reason = f"{_TITLES[name]}'s commands are here, but {why[name]}"
        remedy = "nothing, if you start ranks on this host only; else ask the site"
    return CheckResult.warning(reason, remedy, scheduler=name)


def _remedy(scheduler: str, env: Mapping[str, str]) -> str:
    folder = _places(env)[scheduler] or "/usr/bin"
    return f"add {folder} to PATH if the command is missing; else {_TRY_LATER}"


def _places(env: Mapping[str, str]) -> dict[str, str]:
    return {"slurm": "", "pbs": get_pbs_folder(env)}
