"""Machines: which of them this host belongs to, and the files with their facts."""

from __future__ import annotations

import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, NoReturn

from ._allocation import detect_scheduler
from ._cpus import parse_cores
from ._devices import DEVICE_TYPES
from ._env import FAMILIES
from ._errors import MachineError, did_you_mean
from ._hostfile import read_regular
from ._nodelist import get_hostname, short_name

PACKAGED = os.path.join(os.path.dirname(__file__), "machines")

GENERIC = {"slurm": "generic-slurm", "pbs": "generic-pbs", "none": "workstation"}
"""Which file serves where no named machine matches, by the scheduler of the job variables."""

SCHEDULERS = ("slurm", "pbs", "none")
LAUNCHERS = (*filter(None, (each.launcher for each in FAMILIES)), "spawn", "mpiexec")
BACKENDS = ("nccl", "xccl", "ccl", "gloo", "mpi")

_CHOICES = {
    "scheduler": SCHEDULERS, "launcher": LAUNCHERS, "device_type": DEVICE_TYPES,
    "backends": BACKENDS, "backend": BACKENDS, "submit_required": ("account", "queue", "time"),
}  # fmt: skip
_REQUIRED = ("site", "source", "scheduler", "launcher", "why", "start", "stop", "mount")


@dataclass(frozen=True, slots=True)
class Option:
    """Flags, variables and modules of a machine that are used only when requested."""

    why: str
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    backend: str = ""
    cpu_bind: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts of one machine, as its file has them; docs/machines.md explains every key.

    Attributes:
        name: The file's name without ``.toml``.
        site: The site that runs it.
        scheduler: ``"slurm"``, ``"pbs"`` or ``"none"``.
        launcher: ``"pals"``, ``"srun"``, ...; ``"mpiexec"`` where its ``--version`` decides.
        source: Addresses or titles of what the facts were read from.
        date: When, as ``"2026-08"``.
        nodes: Number of nodes of the machine.
        devices_per_node: As torch counts them (tiles, GCDs); None where the host decides.
        cores_per_node: CPU cores of a node, where the source has it.
        device_type: torch's word (ROCm is ``"cuda"``); ``""`` where the host decides.
        backends: torch.distributed backends, best first; the next one is for a torch without.
        cpu_bind: Bind lists by name: one range of cores such as ``"4-7"`` a local rank.
        default_cpu_bind: Which of them; ``""`` without any.
        reserved_cores: Cores that no rank may use.
        launcher_flags: Flags beyond counts, hostfile and binding, which the launcher adds.
        submit_flags: Words for qsub or sbatch that a job of this machine needs.
        submit_required: What it refuses jobs without: ``"account"``, ``"queue"``, ``"time"``.
        queue_flag: The flag that names a queue there, where it is not the scheduler's own.
        environment: Variables that each rank needs.
        options: Flags, variables and modules used when requested, by name.
        hsn_suffix: Makes a short host name the one on the high-speed network.
        module_paths: Arguments of ``module use``.
        modules: Arguments of ``module load``.
        conda_environment: Argument of ``conda activate``, after the modules.
        proxy: HTTP proxy of the compute nodes.
        local_disk: A folder on each node's own disk or in its memory; ``""`` where none is known.
        advice: What people should know.
        inferred: Dotted keys of values that we inferred.
        predecessor: Dotted keys of values that only the predecessor project gives; ``"*"`` for all.
        path: The file.
        matched_by: The rule that chose this machine, with its value.
        notes: What was found and ignored, in plain text.
    """

    name: str
    site: str
    scheduler: str
    launcher: str
    source: tuple[str, ...]
    date: str
    nodes: int | None = None
    devices_per_node: int | None = None
    cores_per_node: int | None = None
    device_type: str = ""
    backends: tuple[str, ...] = ()
    cpu_bind: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    default_cpu_bind: str = ""
    reserved_cores: tuple[int, ...] = ()
    launcher_flags: tuple[str, ...] = ()
    submit_flags: tuple[str, ...] = ()
    submit_required: tuple[str, ...] = ()
    queue_flag: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Option] = field(default_factory=dict)
    hsn_suffix: str = ""
    module_paths: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    conda_environment: str = ""
    proxy: str = ""
    local_disk: str = ""
    advice: tuple[str, ...] = ()
    inferred: tuple[str, ...] = ()
    predecessor: tuple[str, ...] = ()
    path: str = field(default="", compare=False)
    matched_by: str = field(default="", compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)


def get_machine_info(
    env: Mapping[str, str] | None = None, *, hostname: str | None = None
) -> Machine:
    """Return the machine that this host belongs to, or the generic one of its scheduler.

    ``EZPZ_MACHINE`` decides if set. Else the files' match rules are compared with the job's
    server or cluster and the kernel's host name with domain. Next come variables that a shell
    may have inherited (``NERSC_HOST``, ``PBS_O_HOST``, ...), then the short host name. A
    machine is set aside if the job's scheduler or a variable of that standing contradicts it,
    and two machines of the same standing are none. No name is looked up.

    Args:
        env: The environment to read; default ``os.environ``.
        hostname: This host's name; default, the kernel's.

    Raises:
        MachineError: ``EZPZ_MACHINE`` names no machine, a folder of ``EZPZ_MACHINES`` is
            missing, or a file that matters here is wrong.
    """
    env = os.environ if env is None else env
    files = _machine_files(env)
    scheduler = detect_scheduler(env)
    name = env.get("EZPZ_MACHINE", "")
    if name and name.lower() not in files:
        raise MachineError(
            f"EZPZ_MACHINE={name}: no such machine; expected one of {', '.join(sorted(files))}; "
            f"{did_you_mean(name.lower(), files) or 'or add that file'}"
        )
    if name:
        machine = _read_machine(files[name.lower()])
        rule = f"EZPZ_MACHINE={name}"
        contradiction = _contradict(machine, scheduler)
        if contradiction:
            machine = replace(machine, notes=(f"{rule}, but {contradiction}",))
        return replace(machine, matched_by=rule)
    if hostname is None:
        hostname = get_hostname()
    best, notes = _find_best(files, scheduler, env, hostname)
    if len(best) == 1:
        return replace(best[0], notes=tuple(notes))
    if best:
        both = ", ".join(f"{machine.name} ({machine.matched_by})" for machine in best)
        notes.append(f"{both}: cannot tell which; set EZPZ_MACHINE to the right one")
    job = {"slurm": "SLURM_JOB_ID is set", "pbs": "PBS_JOBID is set"}.get(scheduler, "no job")
    machine = _read_machine(files[GENERIC.get(scheduler, "workstation")])
    return replace(machine, matched_by=f"no known machine matched; {job}", notes=tuple(notes))


def get_machine(env: Mapping[str, str] | None = None) -> str:
    """Return the name of the machine that this host belongs to (see `get_machine_info`)."""
    return get_machine_info(env).name


def known_machines(env: Mapping[str, str] | None = None) -> dict[str, Machine]:
    """Read every machine file; return the machines by name. Raises MachineError for a wrong one."""
    files = _machine_files(os.environ if env is None else env)
    return {name: _read_machine(files[name]) for name in sorted(files)}


def _find_best(
    files: Mapping[str, str], scheduler: str, env: Mapping[str, str], hostname: str
) -> tuple[list[Machine], list[str]]:
    """Return the machines that match with the highest standing, and notes on others."""
    candidates: list[tuple[_Match, Machine]] = []
    notes: list[str] = []
    for name, path in files.items():
        match = _match(_Reader(path, _read_document(path)).rules(), env, hostname)
        if match is None:
            continue
        machine = _read_machine(path)
        contradiction = _contradict(machine, scheduler) or match.contradiction
        if contradiction:
            notes.append(f"{match.rule} set aside for {name}: {contradiction}")
        else:
            candidates.append((match, machine))
    highest = max((match.standing for match, _ in candidates), default=0)
    best = []
    for match, machine in candidates:
        if match.standing == highest:
            best.append(replace(machine, matched_by=match.rule))
        else:
            notes.append(f"{match.rule} set aside for {machine.name}")
    return best, notes


def _contradict(machine: Machine, scheduler: str) -> str:
    """Return why a job of this scheduler cannot run on the machine; empty if it can."""
    if scheduler in ("none", machine.scheduler):
        return ""
    return f"this is a {scheduler} job and {machine.name} has {machine.scheduler}"


# Match rules: how far a file's rules are believed here.

_OF_THE_JOB = 3
_INHERITED = 2
_SHORT_NAME = 1
"""How far a match is believed: the scheduler's or kernel's own word, then variables that a
shell may have inherited from elsewhere, then short host names, which several sites use."""


class _Match(NamedTuple):
    """How a machine's rules match this process."""

    standing: int
    rule: str
    contradiction: str  # a rule of that standing that does not hold; empty without one


def _match(rules: Mapping[str, list[str]], env: Mapping[str, str], hostname: str) -> _Match | None:
    """Compare a machine's rules with this process's variables and host; None if none holds."""
    holding, failing = _match_variables(rules, env, hostname)
    holding += _match_hosts(rules, env, hostname)
    if not holding:
        return None
    highest, rule = max(holding, key=operator.itemgetter(0))
    for standing, other in failing:
        if standing >= highest:
            return _Match(highest, rule, other)
    return _Match(highest, rule, "")


_Rules = list[tuple[int, str]]  # standing, and the rule with its value


def _match_variables(
    rules: Mapping[str, list[str]], env: Mapping[str, str], hostname: str
) -> tuple[_Rules, _Rules]:
    """Return which variables' rules hold here, and which do not."""
    domains = rules.get("domains", [])
    holding: _Rules = []
    failing: _Rules = []
    for variable, values in rules.items():
        value = env.get(variable)
        if variable in ("domains", "hostnames") or not value:
            continue
        standing = _INHERITED
        if variable == "SLURM_CLUSTER_NAME" and env.get("SLURM_JOB_ID"):
            standing = _OF_THE_JOB  # Slurm sets it for its jobs
        if value not in values:
            failing.append((standing, f"{variable}={value}"))
            continue
        holding.append((standing, f"{variable}={value}"))
        if domains and "." in hostname and not _is_in_domain(hostname, domains):
            failing.append((_INHERITED, f"the host is {hostname}"))
    return holding, failing


def _match_hosts(rules: Mapping[str, list[str]], env: Mapping[str, str], hostname: str) -> _Rules:
    """Return which names of this host, and of PBS's server and submission host, are a rule's."""
    domains = rules.get("domains", [])
    hostnames = rules.get("hostnames", [])
    holding: _Rules = []
    # The id of a PBS job is 123.server, or 123[4].server in an array.
    job_id = env.get("PBS_JOBID", "")
    server = job_id.partition(".")[2]
    submitted_on = env.get("PBS_O_HOST", "")
    if _is_in_domain(server, domains) or _has_name(server, hostnames):
        holding.append((_OF_THE_JOB, f"PBS_JOBID={job_id}"))
    if _is_in_domain(submitted_on, domains) or _has_name(submitted_on, hostnames):
        holding.append((_INHERITED, f"PBS_O_HOST={submitted_on}"))
    if _is_in_domain(hostname, domains):
        holding.append((_OF_THE_JOB, f"the domain of host {hostname}"))
    elif _has_name(hostname, hostnames):
        holding.append((_SHORT_NAME, f"the name of host {hostname}"))
    return holding


def _is_in_domain(host: str, domains: list[str]) -> bool:
    return any(f".{host}".endswith(f".{domain}") for domain in domains)


def _has_name(host: str, patterns: list[str]) -> bool:
    """Return whether a host's short name is one of these; ``#`` at the end is any number."""
    name = short_name(host)
    return name in patterns or re.sub("[0-9]+$", "#", name) in patterns


# A file: read, and its facts checked.

_MAX_BYTES = 1 << 20
_KEYS = [each.name for each in fields(Machine) if each.compare and each.name != "name"]


def _read_machine(path: str) -> Machine:
    reader = _Reader(path, _read_document(path))
    reader.only([*_KEYS, "match"])
    devices = reader.count("devices_per_node")
    device_type = reader.text("device_type", DEVICE_TYPES)
    if devices is not None and (device_type in ("", "cpu")) != (devices == 0):
        reader.fail("devices_per_node", devices, "0 for cpu, more for cuda, xpu and mps")
    binds = reader.binds(devices)
    reader.rules()
    for mark in ("inferred", "predecessor"):
        for key in reader.texts(mark):
            if key != "*" and not _has_key(reader.document, key):
                reader.fail(mark, key, "keys of this file, such as environment.TMPDIR")
    facts = reader.facts(Machine)
    # TOML has dates too, but none without a day.
    date = str(reader.document.get("date", ""))
    facts["date"] = date
    if not re.fullmatch(r"20[0-9]{2}-(0[1-9]|1[0-2])(-(0[1-9]|[12][0-9]|3[01]))?", date):
        reader.fail("date", date, 'when the source was read, such as "2026-08"')
    choices = tuple(binds)
    facts["default_cpu_bind"] = reader.text("default_cpu_bind", choices, required=bool(binds))
    facts["options"] = {}
    for key in reader.table("options").document:
        table = reader.table("options").table(key)
        table.only(Option.__slots__)
        option = table.facts(Option)
        option["cpu_bind"] = table.text("cpu_bind", (*binds, "none"))
        facts["options"][key] = Option(**option)
    name = os.path.basename(path).removesuffix(".toml")
    return Machine(name=name, cpu_bind=binds, path=path, **facts)


def _machine_files(env: Mapping[str, str]) -> dict[str, str]:
    """Return name → path of every machine file; the user's hide the packaged ones."""
    files: dict[str, str] = {}
    folders = [folder for folder in env.get("EZPZ_MACHINES", "").split(os.pathsep) if folder]
    default = ""
    if not folders:
        default = _find_default_folder(env)
        folders = [default]
    for folder in filter(None, (*folders, PACKAGED)):
        for entry in _list_folder(folder, may_be_absent=folder == default):
            name, extension = os.path.splitext(entry)
            if extension != ".toml" or entry.startswith("."):
                continue
            if not re.fullmatch("[a-z0-9][a-z0-9_-]*", name):
                raise MachineError(
                    f"{os.path.join(folder, entry)}: {name!r} names no machine; expected "
                    "lower-case letters, digits, - and _; rename the file"
                )
            files.setdefault(name, os.path.join(folder, entry))
    return files


def _list_folder(folder: str, *, may_be_absent: bool) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (OSError, ValueError) as error:  # a folder's name with a NUL
        if may_be_absent and isinstance(error, FileNotFoundError | NotADirectoryError):
            return []
        raise MachineError(
            f"{folder!r} cannot be listed ({error}); expected a folder of machine "
            "files; mend EZPZ_MACHINES or make the folder"
        ) from error


def _find_default_folder(env: Mapping[str, str]) -> str:
    """Return the default folder of the user's machines; empty without a home."""
    # Without a home there is no folder: asking the user database may hang on its server.
    config = env.get("XDG_CONFIG_HOME")
    home = env.get("HOME")
    if config:
        return os.path.join(config, "ezpz", "machines")
    if home and sys.platform == "darwin":
        return os.path.join(home, "Library/Application Support", "ezpz", "machines")
    if home:
        return os.path.join(home, ".config", "ezpz", "machines")
    return ""


def _read_document(path: str) -> dict[str, Any]:
    """Return a file's keys and values, those of the packaged machine that it extends included."""
    document = _parse_file(path)
    base = document.pop("extends", None)
    if base is None:
        return document
    names = sorted(_machine_files({}))
    if base not in names:
        expected = f"one of {', '.join(names)}"
        _Reader(path, document).fail("extends", base, expected, str(base), names)
    return _extend(path, document, base)


def _parse_file(path: str) -> dict[str, Any]:
    try:
        text = read_regular(path, _MAX_BYTES).decode()
    except (OSError, ValueError) as error:
        raise MachineError(
            f"{path}: cannot be read ({error}); expected a readable UTF-8 file; mend or remove it"
        ) from error
    import tomllib  # noqa: PLC0415 - 5 ms, and a rank reads no machine

    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of a number with 5,000 digits
        raise MachineError(f"{path}: {error}; expected TOML; mend that line") from error


def _extend(path: str, document: dict[str, Any], base: str) -> dict[str, Any]:
    """Return a document with the values of the packaged machine that it does not give itself."""
    below = _read_document(os.path.join(PACKAGED, f"{base}.toml"))
    if os.path.basename(path) != f"{base}.toml":
        # Another machine like it has its own hosts.
        for key in ("match", "nodes", "hsn_suffix"):
            below.pop(key, None)
    merged = {**below, **document}
    for key, value in document.items():
        # Rules are replaced as a whole.
        if key != "match" and isinstance(value, dict) and isinstance(below.get(key), dict):
            merged[key] = {**below[key], **value}
    for mark in ("inferred", "predecessor"):
        merged[mark] = []
        for key in below.get(mark, ()):
            if _has_key(merged, key) and not _has_key(document, key):
                merged[mark].append(key)
        merged[mark] += _Reader(path, document).texts(mark)
    return merged


def _has_key(document: Mapping[str, Any], dotted: str) -> bool:
    value: Any = document
    for part in dotted.split("."):
        if not isinstance(value, dict) or part not in value:
            return False
        value = value[part]
    return True


class _Reader:
    """Takes typed values out of one document; an error names the key and its value."""

    def __init__(self, path: str, document: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.document = document
        self.prefix = prefix

    def fail(
        self, key: str, value: object, expected: str, word: str = "", known: Iterable[str] = ()
    ) -> NoReturn:
        shown = repr(value)
        if len(shown) > 60:
            shown = f"{shown[:57]}..."
        hint = did_you_mean(word, known) or "mend this key"
        raise MachineError(
            f"{self.path}: {self.prefix}{key} = {shown}; expected {expected}; {hint}"
        )

    def only(self, known: Iterable[str]) -> None:
        for key, value in self.document.items():
            if key not in known:
                self.fail(key, value, f"no such key, but {', '.join(known)}", key, known)

    def facts(self, kind: type[Machine | Option]) -> dict[str, Any]:
        """Return the values of the fields of a class, each read by its annotation."""
        readers: dict[Any, Callable[[str], object]] = {
            "str": self.text, "tuple[str, ...]": self.texts, "int | None": self.count,
            "tuple[int, ...]": self.counts, "Mapping[str, str]": self.variables,
        }  # fmt: skip
        values = {}
        for each in fields(kind):
            if each.compare and each.name not in ("name", "date") and each.type in readers:
                values[each.name] = readers[each.type](each.name)
        return values

    def text(self, key: str, choices: tuple[str, ...] = (), *, required: bool = False) -> str:
        value = self.document.get(key, "")
        choices = choices or _CHOICES.get(key, ())
        expected = "a string"
        if choices:
            expected = f"one of {', '.join(choices)}"
        self._require(key, required or key in _REQUIRED, expected)
        if not isinstance(value, str):
            self.fail(key, value, expected)
        if choices and value and value not in choices:
            self.fail(key, value, expected, value, choices)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.document.get(key, [])
        choices = _CHOICES.get(key, ())
        self._require(key, key in _REQUIRED, "a list of strings")
        if not isinstance(value, list):
            self.fail(key, value, "a list of strings")
        for item in value:
            if not isinstance(item, str) or not item:
                self.fail(key, value, "a list of strings")
            if not item.isprintable():  # they become arguments of a command
                self.fail(key, value, "strings without line ends and control characters")
            if choices and item not in choices:
                self.fail(key, value, f"a list of {', '.join(choices)}", item, choices)
        return tuple(value)

    def _require(self, key: str, required: bool, expected: str) -> None:
        if required and not self.document.get(key):
            raise MachineError(f"{self.path}: no {self.prefix}{key}; expected {expected}; add it")

    def count(self, key: str) -> int | None:
        value = self.document.get(key)
        if value is not None and (type(value) is not int or value < 0):
            self.fail(key, value, "a number of 0 or more")
        return value

    def counts(self, key: str) -> tuple[int, ...]:
        value = self.document.get(key, [])
        if not isinstance(value, list):
            self.fail(key, value, "a list of numbers of 0 or more")
        for item in value:
            if type(item) is not int or item < 0:
                self.fail(key, value, "a list of numbers of 0 or more")
        return tuple(value)

    def table(self, key: str) -> _Reader:
        value = self.document.get(key, {})
        if not isinstance(value, dict):
            self.fail(key, value, f"a table, [{self.prefix}{key}]")
        return _Reader(self.path, value, f"{self.prefix}{key}.")

    def variables(self, key: str) -> dict[str, str]:
        table = self.table(key)
        for name, value in table.document.items():
            if not name.isidentifier() or not isinstance(value, str) or "\0" in value:
                table.fail(name, value, "a variable and its value as a string")
        return dict(table.document)

    def rules(self) -> dict[str, list[str]]:
        """Return ``[match]``: domains, hostnames, and variables with their values."""
        table = self.table("match")
        known = ("domains", "hostnames")
        rules = {}
        for key, value in table.document.items():
            is_variable = key.isidentifier() and key.isupper()
            if key not in known and not is_variable:
                table.fail(key, value, "domains, hostnames or a VARIABLE", key, known)
            if is_variable and isinstance(value, str) and value:
                rules[key] = [value]
            else:
                rules[key] = list(table.texts(key))
            for item in rules[key]:
                if key == "domains" and item.startswith("."):
                    table.fail(key, item, "a domain without the dot before it")
                if key == "hostnames" and "#" in item[:-1]:
                    table.fail(key, item, "a short name, with # at its end for any number")
        return rules

    def binds(self, devices: int | None) -> dict[str, tuple[str, ...]]:
        """Return ``[cpu_bind]``: under each name one range of cores for each local rank."""
        table = self.table("cpu_bind")
        reserved = self.counts("reserved_cores")
        binds = {}
        for name in table.document:
            ranges = table.texts(name)
            if len(ranges) != (devices or 0):
                table.fail(name, list(ranges), f"{devices or 'no'} ranges, as devices_per_node has")
            taken = set(reserved)
            for text in ranges:
                cores = parse_cores(text)
                if not cores:
                    table.fail(name, text, "cores low-high, such as 4-7 or 0-7,104-111")
                if not taken.isdisjoint(cores):
                    table.fail(name, text, "cores that no other rank has and none is reserved")
                taken |= cores
            binds[name] = ranges
        return binds
