"""What `ezpz doctor` checks of hosts, networks and schedulers."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from . import _commands
from ._allocation import Allocation, detect_scheduler
from ._errors import CheckError, SchedulerError, TopoError
from ._hosts import Hosts, get_allocation, get_hosts, import_scheduler
from ._machine import Machine, get_machine_info
from ._nodelist import fold_nodelist, host_key, short_name
from ._pbs import get_pbs_folder

# The result of a check of ``ezpz doctor``, and the remedy.

STATUSES = ("ok", "warning", "error")


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check: every warning and error comes with its remedy.

    A check is a callable that takes the seconds that it has and returns one of these. A package
    contributes it by an entry point of the group ``ezpz.checks`` with the check's name.

    >>> CheckResult.warning("1 GiB free in /tmp", "remove what is old there").status
    'warning'

    Attributes:
        status: ``"ok"``; ``"warning"``: it works, with a loss; ``"error"``: it will not work.
        message: The finding with its values, in a sentence or two.
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
        """Return the result of a check that passed."""
        return cls("ok", message, details=details)

    @classmethod
    def warning(cls, message: str, remedy: str, /, **details: object) -> CheckResult:
        """Return the result of a check that passed with a loss."""
        return cls("warning", message, remedy, details)

    @classmethod
    def error(cls, message: str, remedy: str, /, **details: object) -> CheckResult:
        """Return the result of a check that failed."""
        return cls("error", message, remedy, details)

    @classmethod
    def of(cls, error: Exception, status: str = "error", /, **details: object) -> CheckResult:
        """Return the result for an error of one of these packages: its last part is the remedy.

        >>> CheckResult.of(ValueError("n is 3; expected 2; start two")).remedy
        'start two'
        """
        message, separator, remedy = str(error).rpartition("; ")
        if not separator:
            message = str(error) or type(error).__name__
            remedy = "see the message"
        return cls(status, message, remedy, {**details, "error": type(error).__name__})


# The check ``hostfile``: it names hosts that the scheduler gave us.

_NODE_VARIABLES = {"slurm": "Slurm's variables", "pbs": "PBS_NODEFILE"}


def check_hostfile(seconds: float, env: Mapping[str, str] | None = None) -> CheckResult:
    """Compare the hosts that ezpz would use with those of the job, as its scheduler knows it."""
    env = os.environ if env is None else env
    try:
        used = get_hosts(None, env)
        scheduler = detect_scheduler(env)
        if scheduler == "none":
            return _describe_hosts(used)
        return _compare_with_job(used, scheduler, 0.35 * seconds, env)
    except TopoError as error:
        return CheckResult.of(error)


def _describe_hosts(used: Hosts) -> CheckResult:
    """Return the result where no job is running."""
    hosts = [entry.host for entry in used.entries]
    if used.path is None:
        return CheckResult.ok("none is named; ranks are started on this host", hosts=hosts)
    return CheckResult.ok(
        f"{used.source}={used.path}: {len(hosts)} hosts ({_abbreviate(hosts)}); no job to compare "
        "with",
        hosts=hosts,
        source=used.source,
    )


def _compare_with_job(
    used: Hosts, scheduler: str, seconds: float, env: Mapping[str, str]
) -> CheckResult:
    hosts = [entry.host for entry in used.entries]
    job = get_allocation(env, ask=False)
    job_hosts = job.hosts
    source = job.sources["hosts"]
    remark = ""
    try:
        job_hosts = _query_job(scheduler, job.job_id or "", seconds, env).hosts
        source = f"{scheduler}'s server"
    except SchedulerError as error:
        # The check "scheduler" reports it too, and whether that is an error.
        remark = f" ({source}; its server did not tell: {str(error).partition('; ')[0]})"
    foreign = _list_foreign(job.hosts, job_hosts)
    if foreign:
        return CheckResult.error(
            f"{_NODE_VARIABLES[scheduler]} name {_abbreviate(foreign)}, which job {job.job_id} "
            f"does not have: {_abbreviate(job_hosts)} ({source})",
            "unset the variables that another job left in this shell, or open a new one",
            hosts=list(job.hosts),
            job_hosts=list(job_hosts),
        )
    facts = {"hosts": hosts, "job_hosts": list(job_hosts), "source": used.source}
    foreign = _list_foreign(hosts, job_hosts)
    if foreign:
        return CheckResult.error(
            f"{used.source}={used.path} names {_abbreviate(foreign)}, which job {job.job_id} does "
            f"not have: {_abbreviate(job_hosts)} ({source})",
            f"unset {used.source}, or write the job's hosts into another file and name that",
            **facts,
        )
    origin = f"no hostfile is needed: {used.source}"
    if used.path:
        origin = f"{used.source}={used.path}"
    return CheckResult.ok(
        f"{origin}: {len(hosts)} of the {len(job_hosts)} hosts of job {job.job_id}{remark}", **facts
    )


def _list_foreign(hosts: Iterable[str], job_hosts: Iterable[str]) -> list[str]:
    """Return the hosts that the job does not have."""
    known = set(map(host_key, job_hosts))
    return [host for host in hosts if host_key(host) not in known]


def _abbreviate(hosts: Sequence[str]) -> str:
    shown = list(hosts[:4])
    if len(hosts) > 4:
        shown.append("...")
    return ", ".join(shown)


# Which interfaces a variable chooses: each library has another form.

VARIABLES = {
    "NCCL_SOCKET_IFNAME": "prefixes", "GLOO_SOCKET_IFNAME": "names", "TP_SOCKET_IFNAME": "names",
    "CCL_KVS_IFACE": "names", "FI_TCP_IFACE": "names",
}  # fmt: skip
"""Variable to its form: NCCL's documentation, "Environment variables"; torch.distributed's,
"Common environment variables"; oneCCL's; libfabric's fi_tcp(7)."""


def choose_interfaces(
    form: str, text: str, interfaces: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the interfaces here that a variable chooses, and those it names that are missing."""
    chosen = []
    if form == "names":
        missing = []
        for part in text.split(","):
            word = part.strip()
            if word in interfaces:
                chosen.append(word)
            elif word:
                missing.append(word)
        return chosen, missing
    # NCCL: a list of prefixes, "=" before it for whole names, "^" for all but these. The first that
    # are here do; so only where none is here, all are missing.
    words = tuple(filter(None, text.lstrip("^=").split(",")))
    is_exact = text.lstrip("^").startswith("=")
    others = []
    for name in interfaces:
        if name in words or (not is_exact and name.startswith(words)):
            chosen.append(name)
        else:
            others.append(name)
    if text.startswith("^"):
        return others, []
    if chosen:
        return chosen, []
    return [], list(words)


# The check ``network``: variables of NCCL, libfabric, oneCCL and gloo, against this host.

_PREFIXES = ("NCCL_", "RCCL_", "CCL_", "FI_", "GLOO_", "UCX_", "MPICH_", "PALS_", "TORCH_NCCL_")
"""Beginnings of the variables that say how ranks reach each other."""


def check_network(_seconds: float, env: Mapping[str, str] | None = None) -> CheckResult:
    """Compare the variables of the high-speed network with the machine's file and this host."""
    # Only the resolver takes time, and knows no limit.
    env = os.environ if env is None else env
    job = None
    try:
        machine = get_machine_info(env)
        with contextlib.suppress(SchedulerError):  # the check "scheduler" reports it
            job = get_allocation(env, ask=False)
    except TopoError as error:
        return CheckResult.of(error)
    set_here = {name: env[name] for name in sorted(env) if name.startswith(_PREFIXES)}
    facts: dict[str, object] = {"machine": machine.name, "variables": set_here}
    names = [name for _, name in socket.if_nameindex()]
    several = job is not None and job.num_nodes > 1
    for variable, form in VARIABLES.items():
        if not env.get(variable):
            continue
        problem = _find_problem(*choose_interfaces(form, env[variable], names), several)
        if problem:
            return CheckResult.error(
                f"{variable}={env[variable]}: {problem}; this host has {', '.join(names)}",
                f"unset {variable}, or name an interface that every host has",
                interfaces=names,
                **facts,
            )
    if job is not None and several:
        error_and_remedy = _look_up_fast_name(machine, job)
        if error_and_remedy is not None:
            return CheckResult.error(*error_and_remedy, **facts)
    warning_and_remedy = _compare_environment(machine, env)
    if warning_and_remedy is not None:
        return CheckResult.warning(*warning_and_remedy, **facts)
    return CheckResult.ok(_describe_variables(machine, set_here), **facts)


def _describe_variables(machine: Machine, set_here: Mapping[str, str]) -> str:
    message = "nothing is set"
    if set_here:
        message = f"{len(set_here)} variables of the network are set"
    recommended = [name for name in machine.environment if name.startswith(_PREFIXES)]
    missing = ", ".join(name for name in recommended if name not in set_here)
    if not recommended:
        return f"{message}, and {machine.name} asks for none"
    if missing:
        return f"{message}; ezpz-launch sets {missing} ({machine.name}.toml) for each rank"
    return f"{message}, all that {machine.name}.toml asks for among them"


def _find_problem(names: Sequence[str], missing: Sequence[str], several: bool) -> str:
    if missing:
        return f"no interface {', '.join(missing)}"
    if not names:
        return "no interface is left"
    if several and all(name in ("lo", "lo0") for name in names):
        return "loopback alone does not reach the other hosts of the job"
    return ""


def _look_up_fast_name(machine: Machine, job: Allocation) -> tuple[str, str] | None:
    """Return error and remedy if the name at which the ranks would meet is unknown."""
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


def _compare_environment(machine: Machine, env: Mapping[str, str]) -> tuple[str, str] | None:
    """Return warning and remedy if a variable is not as the machine's file has it."""
    for name, value in machine.environment.items():
        options = [each.environment.get(name) for each in machine.options.values()]
        if name.startswith(_PREFIXES) and env.get(name, value) not in (value, *options):
            return (
                f"{name}={env[name]}, where {machine.name}.toml has {value}",
                f"unset {name}, unless it is set on purpose: ezpz-launch then leaves it as it is",
            )
    return None


# The check ``scheduler``: the job of this process, and whether its scheduler answers.

_PING = {"slurm": ("scontrol", "ping"), "pbs": ("qstat", "-B")}
"""What asks the server itself something small (manual pages of Slurm and OpenPBS)."""

_TITLES = {"slurm": "Slurm", "pbs": "PBS"}
_TRY_LATER = "try again later: ezpz doctor --timeout=60 --only=scheduler"


def check_scheduler(seconds: float, env: Mapping[str, str] | None = None) -> CheckResult:
    """Name the job of this process, and check that the scheduler's commands answer."""
    env = os.environ if env is None else env
    try:
        scheduler = detect_scheduler(env)
        machine = get_machine_info(env)
        if scheduler != "none":
            return _check_in_job(scheduler, get_allocation(env, ask=False), seconds, env)
        return _check_without_job(machine.scheduler, machine.name, seconds, env)
    except TopoError as error:
        return CheckResult.of(error)


def _ping(scheduler: str, seconds: float, env: Mapping[str, str]) -> str:
    """Return why the scheduler's server does not answer; empty where it does."""
    if scheduler == "slurm":
        env = import_scheduler("slurm").env_of_own_cluster(env)
    try:
        answer = _commands.ask(
            _PING[scheduler],
            env=env,
            time_limit=seconds,
            attempts=1,
            place=_get_folder(scheduler, env),
        )
    except SchedulerError as error:
        return str(error).partition("; ")[0]
    # `scontrol ping` of 22.05 prints it for a controller of several, with exit status 0.
    if scheduler == "slurm" and "is UP" not in answer.stdout:
        return f"scontrol ping says {answer.stdout.strip()!r}"
    return ""


def _query_job(scheduler: str, job_id: str, seconds: float, env: Mapping[str, str]) -> Allocation:
    limit = {_commands.TIME_LIMIT: f"{max(seconds, 0.001):.3f}"}
    job: Allocation = import_scheduler(scheduler).job_by_id(job_id, {**env, **limit})
    return job


def _check_in_job(
    scheduler: str, job: Allocation, seconds: float, env: Mapping[str, str]
) -> CheckResult:
    title = _TITLES[scheduler]
    job_id = job.job_id or ""
    facts: dict[str, object] = {"scheduler": scheduler, "job_id": job_id, "hosts": list(job.hosts)}
    problem = _ping(scheduler, 0.4 * seconds, env)
    if problem:
        message = f"job {job_id} of {title}, by its variables; but {problem}"
        return CheckResult.warning(message, _suggest(scheduler, env), **facts)
    try:
        # Twice at most, with a pause between.
        known = _query_job(scheduler, job_id, 0.2 * seconds, env)
    except TopoError as error:
        return CheckResult.of(error, **facts)
    count = f"{len(job.hosts)} hosts"
    if len(job.hosts) == 1:
        count = "1 host"
    hosts = fold_nodelist(job.hosts)
    if len(hosts) > 60:
        hosts = f"{hosts[:57]}..."
    message = f"{title} answers; job {job_id} has {count}: {hosts}"
    if known.ends_at is not None:
        message += f", ends at {known.ends_at:%Y-%m-%d %H:%M} UTC"
    return CheckResult.ok(message, **facts)


def _check_without_job(
    expected: str, machine: str, seconds: float, env: Mapping[str, str]
) -> CheckResult:
    # The machine's own first: another one's client may be installed beside it, and not set up.
    schedulers = [expected] if expected in _PING else []
    for name, argv in _PING.items():
        if name != expected and _commands.find(argv[0], env, _get_folder(name, env)):
            schedulers.append(name)
    if not schedulers:
        return CheckResult.ok("none, and no job: ranks are started on this host", scheduler="none")
    problems = []
    for name in schedulers:
        problem = _ping(name, 0.8 * seconds / len(schedulers), env)
        if not problem:
            message = f"{_TITLES[name]} answers; no job in this shell"
            return CheckResult.ok(message, scheduler=name)
        problems.append(problem)
    name = schedulers[0]
    if name == expected:
        message = f"{machine} has {_TITLES[name]}, and {problems[0]}"
        remedy = _suggest(name, env)
    else:
        message = f"{_TITLES[name]}'s commands are here, but {problems[0]}"
        remedy = "nothing, if you start ranks on this host only; else ask the site"
    return CheckResult.warning(message, remedy, scheduler=name)


def _suggest(scheduler: str, env: Mapping[str, str]) -> str:
    """Return the remedy for a scheduler that does not answer."""
    folder = _get_folder(scheduler, env) or "/usr/bin"
    return f"add {folder} to PATH if the command is missing; else {_TRY_LATER}"


def _get_folder(scheduler: str, env: Mapping[str, str]) -> str:
    """Return where a scheduler's commands are that may not be on PATH; empty if not known."""
    if scheduler == "pbs":
        return get_pbs_folder(env)
    return ""
