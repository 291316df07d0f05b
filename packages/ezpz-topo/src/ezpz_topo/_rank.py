"""Rank, world size and local rank of this process, from the launcher's variables alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ._env import (
    EZPZ,
    EZPZ_JOB_ID,
    EZPZ_LAUNCHER,
    EZPZ_LOCAL_DEVICE,
    FAMILIES,
    LAUNCHERS,
    SLURM_SHELL_STEPS,
    TORCHRUN,
    TORCHRUN_PROOF,
    Family,
)
from ._errors import (
    IncompleteLauncherError,
    InvalidVariableError,
    LauncherConflictError,
    NodelistError,
)
from ._nodelist import expand_nodelist, get_tasks_on_node


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The rank of a process, by one launcher.

    Attributes:
        rank: Global rank, 0 <= rank < world_size.
        world_size: Number of ranks in all.
        local_rank: Rank on this node, 0 <= local_rank.
        local_world_size: Ranks on this node (not devices), or None where the launcher
            sets none.
        node_rank: Index of this node, or None where the launcher sets none and the
            world spans several nodes.
        launcher: The family that decided (``"pmi"``, ``"slurm"``, ...), ``"ezpz"`` for the
            variables of ezpz-launch, ``"none"`` for one process without a launcher.
        num_nodes: Number of nodes that the ranks are on, or None where the launcher sets
            none.
        sources: For each field the variable (or rule) that it was read from.
        notes: What was found and ignored, in plain text.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    node_rank: int | None
    launcher: str
    num_nodes: int | None = None
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)


_REQUIRED = ("rank", "world_size", "local_rank")
_FIELDS = (*_REQUIRED, "local_world_size", "node_rank", "num_nodes")

ONE_PROCESS = RankInfo(
    rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, num_nodes=1,
    launcher="none",
    sources=dict.fromkeys(_FIELDS, "no launcher's variables are set: one process"),
)  # fmt: skip

_NAMES = {TORCHRUN_PROOF}
"""Where none of these is set, there is nothing to decide."""
for _family in FAMILIES:
    _NAMES.update(_family.rank, _family.world_size, _family.local_rank)


def get_rank_info(
    env: Mapping[str, str] | None = None, *, ancestors: Iterable[Ancestor] | None = None
) -> RankInfo:
    """Read this process's place in the world from the launcher's variables.

    The order of trust: the variables of ezpz-launch, torchrun, then the launchers in the
    order of the table, then a complete ``RANK``/``WORLD_SIZE``/``LOCAL_RANK`` set by
    hand, then one process. Where two of them disagree, the nearest launching process above
    this one decides. Nothing is guessed and MPI is not imported.

    Args:
        env: The environment to read; default ``os.environ``.
        ancestors: The launching processes above, nearest first; default: by the
            kernel's /proc for ``os.environ``, and none for any other environment.

    Raises:
        IncompleteLauncherError: A launcher's variables are half set.
        InvalidVariableError: A variable is not a number, or out of range.
        LauncherConflictError: Two launchers disagree about this process, and no process
            above it shows which of them started it.
    """
    if ancestors is None:
        ancestors = ()
        if env is None or env is os.environ:
            ancestors = launching_ancestors()
    env = os.environ if env is None else env
    if not any(map(env.get, _NAMES)):
        return ONE_PROCESS
    env, note_on_job = _drop_launch_of_other_job(env)
    note_on_step = ""
    if is_step(env):
        ancestors = list(ancestors)
        reason = explain_other_step(env, ancestors)
        if reason:
            note_on_step = f"SLURM_STEP_ID={env['SLURM_STEP_ID']} set aside: {reason}"
            env = {name: value for name, value in env.items() if name != "SLURM_STEP_ID"}
    best = _choose_most_trusted(env)
    if best.launcher == "slurm":
        _check_step(best, env)
    conflicts = _find_conflicts(best, env)
    if conflicts:
        best = _resolve_conflict(best, conflicts, ancestors, env)
    for note in (note_on_job, note_on_step, _note_on_leftover(best, env)):
        best = _add_note(best, note)
    return best


def get_rank(env: Mapping[str, str] | None = None) -> int:
    """Return the global rank of this process; 0 for one process without a launcher.

    Raises:
        TopoError: The environment is half set or contradicts itself (see `get_rank_info`).
    """
    return get_rank_info(env).rank


def get_local_rank(env: Mapping[str, str] | None = None) -> int:
    """Return this process's rank on its node; 0 for one process without a launcher.

    Raises:
        TopoError: The environment is half set or contradicts itself (see `get_rank_info`).
    """
    return get_rank_info(env).local_rank


def get_local_device(env: Mapping[str, str] | None = None) -> int:
    """Return which of the devices that this process sees is its own, from 0.

    The local rank, unless ezpz-launch gave this rank another one (``--one-device``, or fewer
    visible devices than ranks on the node); under it ``LOCAL_RANK`` is the same.

    Raises:
        TopoError: As `get_rank_info`.
        InvalidVariableError: ``EZPZ_LOCAL_DEVICE`` is no number.
    """
    env = os.environ if env is None else env
    info = get_rank_info(env)
    if info.launcher == EZPZ.name and env.get(EZPZ_LOCAL_DEVICE):
        return _read_number(env, EZPZ_LOCAL_DEVICE)
    return info.local_rank


def get_local_world_size(env: Mapping[str, str] | None = None) -> int:
    """Return the number of ranks on this node (not of devices).

    Raises:
        TopoError: As `get_rank_info`, and where the launcher sets none.
    """
    info = get_rank_info(env)
    if info.local_world_size is None:
        raise IncompleteLauncherError(
            f"{info.launcher} does not tell how many ranks run on this node; "
            "expected LOCAL_WORLD_SIZE; start the ranks with ezpz-launch, or export it",
        )
    return info.local_world_size


def _choose_most_trusted(env: Mapping[str, str]) -> RankInfo:
    # Half of ezpz-launch's variables were not set by it: that is an error too.
    reading = read(EZPZ, env)
    launched = None if reading is None else _require_complete(reading)
    if env.get(TORCHRUN_PROOF):
        # torchrun may run below an MPI launcher (one agent a node): the agent is nearer. The
        # shim of ezpz-launch removes the proof, so that this one runs below ezpz-launch too.
        inner = _require_complete(read(TORCHRUN, env))
        note = ""
        if launched is not None:
            note = f"torchrun runs below rank {launched.rank} of an ezpz-launch"
        return _add_note(inner, note)
    if launched is not None:
        return launched
    half_set: IncompleteLauncherError | None = None
    for each in LAUNCHERS:
        reading = read(each, env)
        if isinstance(reading, RankInfo):
            return reading
        half_set = half_set or reading
    by_hand = read(TORCHRUN, env)
    if isinstance(by_hand, RankInfo):
        return by_hand
    if half_set is None and by_hand is None:
        return ONE_PROCESS
    return _require_complete(half_set or by_hand)


def _add_note(info: RankInfo, note: str) -> RankInfo:
    if not note:
        return info
    return replace(info, notes=(*info.notes, note))


def _note_on_leftover(best: RankInfo, env: Mapping[str, str]) -> str:
    if best.launcher in ("none", EZPZ.name, TORCHRUN.name):
        return ""
    expected = {"RANK": best.rank, "WORLD_SIZE": best.world_size, "LOCAL_RANK": best.local_rank}
    wrong = []
    for name, number in expected.items():
        if env.get(name, "") not in ("", str(number)):
            wrong.append(f"{name}={env[name]}")
    if not wrong:
        return ""
    return (
        f"set aside: {' '.join(wrong)} of the environment, because {best.launcher} started this "
        "process"
    )


# One launcher's variables, read into a `RankInfo`, or the error to raise where they are half set.


def read(family: Family, env: Mapping[str, str]) -> RankInfo | IncompleteLauncherError | None:
    """Read one family; None when it is absent. An error is returned: another may be complete."""
    chosen = _choose_variables(family, env)
    if chosen is None:
        return None
    if None in chosen.values():
        return _describe_half_set(family, chosen, env)
    values: dict[str, int | None] = {}
    sources: dict[str, str] = {}
    for key in _FIELDS:
        name = _find_set_variable(env, getattr(family, key))
        if name is None:
            values[key] = None
            sources[key] = f"not told by {family.name}"
        else:
            values[key] = _read_number(env, name)
            sources[key] = name
    _infer_local_size(family, env, values, sources)
    _check_node(values, sources)
    if values["local_world_size"] == values["world_size"]:
        for key, value in (("node_rank", 0), ("num_nodes", 1)):
            if values[key] is None:
                values[key] = value
                sources[key] = "every rank is on this node"
    info = RankInfo(**values, launcher=family.name, sources=sources)  # type: ignore[arg-type]
    _check_ranges(info)
    return info


def _describe_half_set(
    family: Family, chosen: Mapping[str, str | None], env: Mapping[str, str]
) -> IncompleteLauncherError:
    present = []
    missing = []
    for key, name in chosen.items():
        if name is None:
            missing.append("/".join(getattr(family, key)) or f"a {key.replace('_', ' ')}")
        else:
            present.append(name)
    present.sort()
    settings = ", ".join(f"{name}={env[name]}" for name in present)
    return IncompleteLauncherError(
        f"half-set {family.name} environment: {settings} without {' and '.join(missing)}; "
        "expected all of them or none; start the ranks with ezpz-launch, or unset "
        f"{' '.join(present)}",
    )


def _infer_local_size(
    family: Family, env: Mapping[str, str], values: dict[str, int | None], sources: dict[str, str]
) -> None:
    """Set the local world size where the tasks of each node, or a world of one, give it."""
    if values["local_world_size"] is not None:
        return
    tasks = env.get(family.tasks_per_node)
    node_rank = values["node_rank"]
    if tasks and node_rank is not None:
        size = get_tasks_on_node(tasks, node_rank, variable=family.tasks_per_node)
        values["local_world_size"] = size
        sources["local_world_size"] = f"{family.tasks_per_node} at {sources['node_rank']}"
    elif values["world_size"] == 1:
        values["local_world_size"] = 1
        sources["local_world_size"] = "a world of one"


def _check_node(values: Mapping[str, int | None], sources: Mapping[str, str]) -> None:
    node_rank = values["node_rank"]
    num_nodes = values["num_nodes"]
    if node_rank is not None and num_nodes is not None and node_rank >= num_nodes:
        raise InvalidVariableError(
            f"{sources['node_rank']}={node_rank} with {sources['num_nodes']}={num_nodes}; expected "
            "a node below the number of nodes; unset both, or start with ezpz-launch"
        )


def read_partial(family: Family, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables' texts of rank, world size and local rank, those that are set."""
    chosen = _choose_variables(family, env) or {}
    return {key: env[name] for key, name in chosen.items() if name is not None}


def _choose_variables(family: Family, env: Mapping[str, str]) -> dict[str, str | None] | None:
    """Return the variable of each required field; None where the family is absent."""
    for name in family.proof:
        if env.get(name, "") in ("", *family.disproof):
            return None
    chosen = {key: _find_set_variable(env, getattr(family, key)) for key in _REQUIRED}
    # The world size's name may belong to another family too (PMI_SIZE): rank and local
    # rank, or for a family with separate names any of the three, show that it is there.
    proving: tuple[str, ...] = _REQUIRED
    if family.name == "pals":
        proving = ("rank", "local_rank")
    if any(chosen[key] for key in proving):
        return chosen
    return None


def _find_set_variable(env: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    for name in names:
        if env.get(name):
            return name
    return None


def _require_complete(reading: RankInfo | IncompleteLauncherError | None) -> RankInfo:
    if isinstance(reading, RankInfo):
        return reading
    raise reading or IncompleteLauncherError(
        f"{TORCHRUN_PROOF} is set, but RANK, WORLD_SIZE and LOCAL_RANK are not; expected "
        f"torchrun to set all of them; unset {TORCHRUN_PROOF}, or start with torchrun",
    )


def _read_number(env: Mapping[str, str], name: str) -> int:
    text = env[name]
    # int() would take " 1_0 " and Arabic digits; a launcher writes plain decimals.
    if not re.fullmatch("[0-9]{1,9}", text):
        raise InvalidVariableError(
            f"{name}={text[:40]!r}; expected a whole number from 0; "
            f"unset {name}, or start the ranks with ezpz-launch"
        )
    return int(text)


def _check_ranges(info: RankInfo) -> None:
    size = info.world_size
    local_size = info.local_world_size
    if info.rank >= size:
        raise InvalidVariableError(
            f"{info.sources['rank']}={info.rank} with {info.sources['world_size']}={size}; "
            f"expected a rank below the world size; unset both, or start with ezpz-launch"
        )
    upper = local_size
    if upper is None:
        upper = size
    if not info.local_rank < upper <= size:
        raise InvalidVariableError(
            f"{info.sources['local_rank']}={info.local_rank} with "
            f"{info.sources['local_world_size']}={local_size} and "
            f"{info.sources['world_size']}={size}; expected local rank < local world size "
            f"<= world size; unset them, or start with ezpz-launch"
        )


# What belongs to another job or step: handed on with the environment of what submitted this job.

_JOB_IDS = ("SLURM_JOB_ID", "SLURM_HET_JOB_ID", "PBS_JOBID")


def _drop_launch_of_other_job(env: Mapping[str, str]) -> tuple[Mapping[str, str], str]:
    """Return the environment without launch variables of another job, and a note on them."""
    launch_job = env.get(EZPZ_JOB_ID, "")
    jobs = [env[name] for name in _JOB_IDS if env.get(name)]
    if not launch_job or not jobs or launch_job in jobs:
        return env, ""
    launched = read_partial(EZPZ, env)
    leftover = {*_list_variables(EZPZ), EZPZ_JOB_ID, EZPZ_LOCAL_DEVICE, EZPZ_LAUNCHER}
    # The shim exports torchrun's names too, and reads those of its launcher; Slurm's own are of
    # this job.
    for each in (TORCHRUN, *LAUNCHERS):
        if each is not TORCHRUN and (each.name == "slurm" or each.name != env.get(EZPZ_LAUNCHER)):
            continue
        texts = read_partial(each, env)
        if all(texts.get(key) in (None, launched.get(key)) for key in ("rank", "world_size")):
            leftover |= _list_variables(each)
    note = f"the variables of ezpz-launch are of job {launch_job}, and this is {jobs[0]}: set aside"
    return {name: value for name, value in env.items() if name not in leftover}, note


def _list_variables(family: Family) -> set[str]:
    variables: set[str] = set()
    for key in _FIELDS:
        variables.update(getattr(family, key))
    return variables


def is_step(env: Mapping[str, str]) -> bool:
    """Return whether the variables name a Slurm step of ranks, and not one that runs a shell."""
    return env.get("SLURM_STEP_ID", "") not in ("", *SLURM_SHELL_STEPS)


def explain_other_step(env: Mapping[str, str], ancestors: Iterable[Ancestor]) -> str:
    """Return why this process is not in the step that its variables name; empty if it may be."""
    for ancestor in ancestors:
        if ancestor.family == "slurm":
            if _SHELL_STEP.search(ancestor.process):
                return f"{ancestor.process} started this"
            break
    step = env.get("SLURM_STEP_NODELIST", "")
    job = env.get("SLURM_JOB_NODELIST", "")
    # Most steps are as wide as their job, and ten thousand names need not be made for that.
    if not step or not job or step == job:
        return ""
    try:
        others = set(expand_nodelist(step)) - set(expand_nodelist(job))
    except NodelistError:
        return ""  # an error to whoever needs the hosts
    if not others:
        return ""
    return f"its node {min(others)} is none of the job's, {job[:60]}"


def _check_step(best: RankInfo, env: Mapping[str, str]) -> None:
    """Refuse another job's step where only the variables can show it."""
    ids = env.get("SLURM_GTIDS", "")
    if ids and len(ids.split(",")) != best.local_world_size:
        raise InvalidVariableError(
            f"SLURM_GTIDS={ids[:40]} beside {best.local_world_size} tasks of this node "
            f"({best.sources['local_world_size']}); expected one id a task; unset SLURM_STEP_ID, "
            "which is left over from the step that submitted this job"
        )


# Where launchers disagree about this process: which of them started it.


@dataclass(frozen=True, slots=True)
class Conflict:
    """A launcher whose variables give another rank or world than the one that was chosen."""

    family: Family
    texts: Mapping[str, str]  # of its variables for rank, world size, local rank

    def __str__(self) -> str:
        rank = self.texts.get("rank", "?")
        size = self.texts.get("world_size", "?")
        local_rank = self.texts.get("local_rank", "?")
        return f"{self.family.name} says {rank} of {size}, local rank {local_rank}"


def _find_conflicts(best: RankInfo, env: Mapping[str, str]) -> list[Conflict]:
    conflicts = []
    for other in (*LAUNCHERS, TORCHRUN):
        if other.name == best.launcher:
            continue
        texts = read_partial(other, env)
        is_complete = len(texts) == len(_REQUIRED)
        # A few of torchrun's variables are a leftover of the user's shell, and noted as such.
        if not texts or (other is TORCHRUN and not is_complete):
            continue
        device = env.get(EZPZ_LOCAL_DEVICE)
        if other is TORCHRUN and best.launcher == EZPZ.name and texts["local_rank"] == device:
            # The shim exports the index of the rank's device as LOCAL_RANK.
            texts["local_rank"] = str(best.local_rank)
        contradicts = any(text != str(getattr(best, key)) for key, text in texts.items())
        if contradicts or (is_complete and _has_other_local_size(best, other, env)):
            conflicts.append(Conflict(other, texts))
    return conflicts


def _has_other_local_size(best: RankInfo, family: Family, env: Mapping[str, str]) -> bool:
    """Return whether the same rank of the same world is of a launch inside, over other nodes."""
    try:
        reading = read(family, env)
    except InvalidVariableError:
        return False  # it is not believed yet, so it may be anything
    if not isinstance(reading, RankInfo):
        return False
    known = (best.local_world_size, reading.local_world_size)
    return None not in known and known[0] != known[1]


def _resolve_conflict(
    best: RankInfo,
    conflicts: Sequence[Conflict],
    ancestors: Iterable[Ancestor],
    env: Mapping[str, str],
) -> RankInfo:
    """Let the nearest launching process decide; without one, refuse an unknown nesting."""
    by_name = {conflict.family.name: conflict for conflict in conflicts}
    started_by = best.launcher
    if best.launcher == EZPZ.name:
        started_by = env.get(EZPZ_LAUNCHER, "")
    decided = False
    for ancestor in ancestors:
        if ancestor.family in by_name:
            nearest = _require_complete(read(by_name[ancestor.family].family, env))
            note = (
                f"{nearest.launcher} before {best.launcher}, which says {best.rank} of "
                f"{best.world_size}: {ancestor.process} is the nearest launcher above"
            )
            return _add_note(nearest, note)
        if ancestor.family == started_by:
            decided = True
            break
    if TORCHRUN.name in by_name and best.launcher == EZPZ.name:
        # The shim exports torchrun's three as its own: whoever changed them runs below it.
        if best.world_size > 1:
            _refuse(best, by_name[TORCHRUN.name], env)
        note = f"RANK, WORLD_SIZE and LOCAL_RANK were set below rank {best.rank} of an ezpz-launch"
        return _add_note(_require_complete(read(TORCHRUN, env)), note)
    for conflict in conflicts:
        if not decided and not _is_known_nesting(best, conflict, started_by, env):
            _refuse(best, conflict, env)
        best = _add_note(best, f"{conflict}: set aside, {best.launcher} is nearer")
    return best


def _is_known_nesting(
    best: RankInfo, conflict: Conflict, started_by: str, env: Mapping[str, str]
) -> bool:
    """Return whether the numbers can be those of an outer launcher, as far as variables show."""
    if conflict.family is TORCHRUN:
        return True  # a leftover of the user's shell
    size = conflict.texts.get("world_size", "")
    if conflict.family.name == "slurm" or env.get(TORCHRUN_PROOF):
        # Ranks of MPI carry the SLURM_PROCID of their proxy, and torchrun's workers whatever
        # their agent is: there are never more proxies or agents than ranks.
        return not size.isdigit() or int(size) <= best.world_size
    # A world of one around ezpz-launch (a launch inside `mpiexec -n 1`) contradicts nothing.
    return best.launcher == EZPZ.name and conflict.family.name != started_by and size == "1"


def _refuse(best: RankInfo, conflict: Conflict, env: Mapping[str, str]) -> None:
    _require_complete(read(conflict.family, env))
    raise LauncherConflictError(
        f"{best.launcher} says rank {best.rank} of {best.world_size} ({best.sources['rank']}), "
        f"{conflict}; expected one launcher; unset the variables of the one that did not start "
        "this process"
    )


# The launching processes above this one: they decide where variables cannot.

_FAMILY_OF_PROCESS: dict[str, str] = {}
for _family in FAMILIES:
    for _name in _family.processes:
        _FAMILY_OF_PROCESS[_name] = _family.name
        _FAMILY_OF_PROCESS[_name[:15]] = _family.name  # all that the kernel keeps of a name
_SHELL_STEP = re.compile(r"\[[0-9+]+\.(batch|extern|interactive)\]")  # of a slurmstepd of no ranks
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


def launching_ancestors(pid: int | None = None, *, proc: str = "/proc") -> Iterator[Ancestor]:
    """Yield the launching processes above ``pid`` (default: this process), nearest first."""
    # None where the kernel shows none (macOS, a separate PID namespace): proc_pid_stat(5).
    pid = os.getpid() if pid is None else pid
    for _ in range(_DEEPEST):
        # pid (name) state ppid ...: a name may hold spaces and brackets.
        fields = _read(f"{proc}/{pid}/stat").rpartition(")")[2].split()
        if len(fields) < 2 or not fields[1].isdigit() or fields[1] == "0":
            return
        pid = int(fields[1])
        words = _read(f"{proc}/{pid}/cmdline").split("\0")
        for name in (_read(f"{proc}/{pid}/comm").strip(), *_find_python_program(words)):
            if name in _FAMILY_OF_PROCESS:
                title = name
                if name == "slurmstepd" and words[0]:
                    title = words[0]  # with its step: "slurmstepd: [7.batch]"
                yield Ancestor(_FAMILY_OF_PROCESS[name], f"{title} (pid {pid})")
                break


def _find_python_program(words: list[str]) -> list[str]:
    """Return the names of the module or script that a Python's command line runs."""
    if not os.path.basename(words[0]).startswith("python"):
        return []
    arguments = iter(words[1:])
    for word in arguments:
        if word == "-m":
            return [next(arguments, "")]
        if word in ("-W", "-X"):
            next(arguments, "")
        elif not word.startswith("-"):
            # .../torch/distributed/run.py, as `python path` has it
            module = ".".join(word.removesuffix(".py").split(os.sep)[-3:])
            return [os.path.basename(word), module]
    return []


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(65536)
    except OSError:
        # It ended meanwhile, belongs to another user, or there is no /proc: not known.
        return ""
