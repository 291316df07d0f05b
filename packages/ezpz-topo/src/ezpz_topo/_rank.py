"""Who this process is: rank, world size, local rank, from the launcher's variables alone."""

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
from ._nodelist import expand_nodelist, tasks_on_node


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What one launcher says of one process.

    Attributes:
        rank: Global rank, 0 <= rank < world_size.
        world_size: Number of ranks in all.
        local_rank: Rank on this node, 0 <= local_rank.
        local_world_size: Ranks on this node (not devices), or None where the launcher
            does not tell.
        node_rank: Index of this node, or None where the launcher does not tell and the
            world spans several nodes.
        launcher: The family that decided (``"pmi"``, ``"slurm"``, ...), ``"ezpz"`` for the
            variables of ezpz-launch, ``"none"`` for one process without a launcher.
        num_nodes: Number of nodes that the ranks are on, or None where the launcher does
            not tell.
        sources: For each field the variable (or rule) that it was read from.
        notes: What was seen and set aside, in words for people.
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

_NAMES = frozenset(
    name for each in FAMILIES for key in _REQUIRED for name in getattr(each, key)
) | {TORCHRUN_PROOF}
"""Where none of these is set, there is nothing to decide."""


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
        ancestors: The launching processes above, nearest first; default: asked of the
            kernel for ``os.environ``, and none for any other environment.

    Raises:
        IncompleteLauncherError: A launcher's variables are half set.
        InvalidVariableError: A variable is not a number, or out of range.
        LauncherConflictError: Two launchers disagree about this process, and no process
            above it tells which of them started it.
    """
    if ancestors is None:
        ancestors = launching_ancestors() if env is None or env is os.environ else ()
    env = os.environ if env is None else env
    if not any(map(env.get, _NAMES)):
        return ONE_PROCESS
    env, note_on_job = _without_another_jobs_launch(env)
    note_on_step = ""
    if is_step(env):
        ancestors = list(ancestors)
        if why := why_another_step(env, ancestors):
            note_on_step = f"SLURM_STEP_ID={env['SLURM_STEP_ID']} set aside: {why}"
            env = {name: value for name, value in env.items() if name != "SLURM_STEP_ID"}
    best = _by_order_of_trust(env)
    if best.launcher == "slurm":
        _check_step(best, env)
    if conflicts := _find_conflicts(best, env):
        best = _resolve_conflict(best, conflicts, ancestors, env)
    for note in (note_on_job, note_on_step, _note_on_leftover(best, env)):
        best = _with_note(best, note)
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
    visible devices than ranks on the node); under it ``LOCAL_RANK`` says the same.

    Raises:
        TopoError: As `get_rank_info`.
        InvalidVariableError: ``EZPZ_LOCAL_DEVICE`` is no number.
    """
    env = os.environ if env is None else env
    info = get_rank_info(env)
    if info.launcher == EZPZ.name and env.get(EZPZ_LOCAL_DEVICE):
        return _number(env, EZPZ_LOCAL_DEVICE)
    return info.local_rank


def get_local_world_size(env: Mapping[str, str] | None = None) -> int:
    """Return the number of ranks on this node (not of devices).

    Raises:
        TopoError: As `get_rank_info`, and where the launcher does not tell.
    """
    info = get_rank_info(env)
    if info.local_world_size is None:
        raise IncompleteLauncherError(
            f"{info.launcher} does not tell how many ranks run on this node; "
            "expected LOCAL_WORLD_SIZE; start the ranks with ezpz-launch, or export it",
        )
    return info.local_world_size


def _by_order_of_trust(env: Mapping[str, str]) -> RankInfo:
    # Half of ezpz-launch's variables were not set by it: that is an error too.
    reading = read(EZPZ, env)
    launched = None if reading is None else _complete(reading)
    if env.get(TORCHRUN_PROOF):
        # torchrun may run below an MPI launcher (one agent a node): the agent is nearer. The
        # shim of ezpz-launch removes the proof, so that this one runs below ezpz-launch too.
        inner = _complete(read(TORCHRUN, env))
        note = launched and f"torchrun runs below rank {launched.rank} of an ezpz-launch"
        return _with_note(inner, note or "")
    if launched is not None:
        return launched
    half: IncompleteLauncherError | None = None
    for each in LAUNCHERS:
        reading = read(each, env)
        if isinstance(reading, RankInfo):
            return reading
        half = half or reading
    by_hand = read(TORCHRUN, env)
    if isinstance(by_hand, RankInfo):
        return by_hand
    if half is None and by_hand is None:
        return ONE_PROCESS
    return _complete(half or by_hand)


def _with_note(info: RankInfo, note: str) -> RankInfo:
    return replace(info, notes=(*info.notes, note)) if note else info


def _note_on_leftover(best: RankInfo, env: Mapping[str, str]) -> str:
    if best.launcher in ("none", EZPZ.name, TORCHRUN.name):
        return ""
    right = {"RANK": best.rank, "WORLD_SIZE": best.world_size, "LOCAL_RANK": best.local_rank}
    wrong = [
        f"{name}={env[name]}" for name, n in right.items() if env.get(name, "") not in ("", str(n))
    ]
    if not wrong:
        return ""
    seen = " ".join(wrong)
    return f"set aside: {seen} of the environment, because {best.launcher} started this process"


# One launcher's variables, read into a `RankInfo`, or the error to raise where they are half set.


def read(family: Family, env: Mapping[str, str]) -> RankInfo | IncompleteLauncherError | None:
    """Read one family; None when it is absent. An error is returned: another may be complete."""
    chosen = _choose(family, env)
    if chosen is None:
        return None
    sources = {key: name for key, name in chosen.items() if name is not None}
    if len(sources) < len(chosen):
        missing = tuple(
            "/".join(getattr(family, key)) or f"a {key.replace('_', ' ')}"
            for key in chosen
            if key not in sources
        )
        present = sorted(sources.values())
        seen = ", ".join(f"{name}={env[name]}" for name in present)
        return IncompleteLauncherError(
            f"half-set {family.name} environment: {seen} without {' and '.join(missing)}; "
            "expected all of them or none; start the ranks with ezpz-launch, or unset "
            f"{' '.join(present)}",
        )

    told: dict[str, int | None] = {}
    for key in _FIELDS:
        name = _first_set(env, getattr(family, key))
        told[key] = None if name is None else _number(env, name)
        sources[key] = name or f"not told by {family.name}"
    tasks, node_rank, nodes = env.get(family.tasks_per_node), told["node_rank"], told["num_nodes"]
    if told["local_world_size"] is None and tasks and node_rank is not None:
        size = tasks_on_node(tasks, node_rank, variable=family.tasks_per_node)
        told["local_world_size"] = size
        sources["local_world_size"] = f"{family.tasks_per_node} at {sources['node_rank']}"
    if node_rank is not None and nodes is not None and not node_rank < nodes:
        raise InvalidVariableError(
            f"{sources['node_rank']}={node_rank} with {sources['num_nodes']}={nodes}; expected "
            "a node below the number of nodes; unset both, or start with ezpz-launch"
        )
    if told["local_world_size"] is None and told["world_size"] == 1:
        told["local_world_size"], sources["local_world_size"] = 1, "a world of one"
    if told["local_world_size"] == told["world_size"]:
        for key, value in (("node_rank", 0), ("num_nodes", 1)):
            if told[key] is None:
                told[key], sources[key] = value, "every rank is on this node"
    info = RankInfo(**told, launcher=family.name, sources=sources)  # type: ignore[arg-type]
    _check_ranges(info)
    return info


def read_partial(family: Family, env: Mapping[str, str]) -> dict[str, str]:
    """Return what a family tells of rank, world size and local rank, unchecked."""
    chosen = _choose(family, env) or {}
    return {key: env[name] for key, name in chosen.items() if name is not None}


def _choose(family: Family, env: Mapping[str, str]) -> dict[str, str | None] | None:
    """Return the variable that tells each required field; None where the family is absent."""
    if any(env.get(name, "") in ("", *family.disproof) for name in family.proof):
        return None
    chosen = {key: _first_set(env, getattr(family, key)) for key in _REQUIRED}
    # The world size's name may belong to another family too (PMI_SIZE): rank and local
    # rank, or for a family with names of its own any of the three, show that it is there.
    own = ("rank", "local_rank") if family.name == "pals" else _REQUIRED
    return chosen if any(chosen[key] for key in own) else None


def _first_set(env: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if env.get(name)), None)


def _complete(reading: RankInfo | IncompleteLauncherError | None) -> RankInfo:
    if isinstance(reading, RankInfo):
        return reading
    raise reading or IncompleteLauncherError(
        f"{TORCHRUN_PROOF} is set, but RANK, WORLD_SIZE and LOCAL_RANK are not; expected "
        f"torchrun to set all of them; unset {TORCHRUN_PROOF}, or start with torchrun",
    )


def _number(env: Mapping[str, str], name: str) -> int:
    text = env[name]
    # int() would take " 1_0 " and Arabic digits; a launcher writes plain decimals.
    if not re.fullmatch("[0-9]{1,9}", text):
        raise InvalidVariableError(
            f"{name}={text[:40]!r}; expected a whole number from 0; "
            f"unset {name}, or start the ranks with ezpz-launch"
        )
    return int(text)


def _check_ranges(info: RankInfo) -> None:
    size, local_size = info.world_size, info.local_world_size
    if not info.rank < size:
        raise InvalidVariableError(
            f"{info.sources['rank']}={info.rank} with {info.sources['world_size']}={size}; "
            f"expected a rank below the world size; unset both, or start with ezpz-launch"
        )
    upper = size if local_size is None else local_size
    if not info.local_rank < upper <= size:
        raise InvalidVariableError(
            f"{info.sources['local_rank']}={info.local_rank} with "
            f"{info.sources['local_world_size']}={local_size} and "
            f"{info.sources['world_size']}={size}; expected local rank < local world size "
            f"<= world size; unset them, or start with ezpz-launch"
        )


# What belongs to another job or step: handed on with the environment of what submitted this job.

_JOB_IDS = ("SLURM_JOB_ID", "SLURM_HET_JOB_ID", "PBS_JOBID")


def _without_another_jobs_launch(env: Mapping[str, str]) -> tuple[Mapping[str, str], str]:
    """Return the environment without launch variables of another job, and a note on them."""
    theirs = env.get(EZPZ_JOB_ID, "")
    ours = [env[name] for name in _JOB_IDS if env.get(name)]
    if not theirs or not ours or theirs in ours:
        return env, ""
    launched = read_partial(EZPZ, env)
    leftover = {*_variables(EZPZ), EZPZ_JOB_ID, EZPZ_LOCAL_DEVICE, EZPZ_LAUNCHER}
    # The shim exports torchrun's names too, and reads those of its launcher; Slurm's own are of
    # this job.
    for each in (TORCHRUN, *LAUNCHERS):
        told = read_partial(each, env)
        same = all(told.get(key) in (None, launched.get(key)) for key in ("rank", "world_size"))
        if each is TORCHRUN or each.name == env.get(EZPZ_LAUNCHER) != "slurm":
            leftover |= _variables(each) if same else set()
    note = f"the variables of ezpz-launch are of job {theirs}, and this is {ours[0]}: set aside"
    return {name: value for name, value in env.items() if name not in leftover}, note


def _variables(family: Family) -> set[str]:
    return {name for key in _FIELDS for name in getattr(family, key)}


def is_step(env: Mapping[str, str]) -> bool:
    """Return whether the variables name a Slurm step of ranks, and not one that runs a shell."""
    return env.get("SLURM_STEP_ID", "") not in ("", *SLURM_SHELL_STEPS)


def why_another_step(env: Mapping[str, str], above: Iterable[Ancestor]) -> str:
    """Return why this process is not in the step that its variables name; empty if it may be."""
    started_by = next((each for each in above if each.family == "slurm"), None)
    if started_by is not None and _SHELL_STEP.search(started_by.process):
        return f"{started_by.process} started this"
    step, job = env.get("SLURM_STEP_NODELIST", ""), env.get("SLURM_JOB_NODELIST", "")
    # Most steps are as wide as their job, and ten thousand names need not be made for that.
    if not step or not job or step == job:
        return ""
    try:
        others = set(expand_nodelist(step)) - set(expand_nodelist(job))
    except NodelistError:
        return ""  # an error to whoever needs the hosts
    return f"its node {min(others)} is none of the job's, {job[:60]}" if others else ""


def _check_step(best: RankInfo, env: Mapping[str, str]) -> None:
    """Refuse another job's step where only the variables can show it."""
    here = env.get("SLURM_GTIDS", "")
    if here and len(here.split(",")) != best.local_world_size:
        raise InvalidVariableError(
            f"SLURM_GTIDS={here[:40]} beside {best.local_world_size} tasks of this node "
            f"({best.sources['local_world_size']}); expected one id a task; unset SLURM_STEP_ID, "
            "which is left over from the step that submitted this job"
        )


# Where launchers disagree about this process: which of them started it.


@dataclass(frozen=True, slots=True)
class Conflict:
    """A launcher that tells of another rank or world than the one that was chosen."""

    family: Family
    told: Mapping[str, str]

    def __str__(self) -> str:
        rank, size, local = (self.told.get(key, "?") for key in _REQUIRED)
        return f"{self.family.name} says {rank} of {size}, local rank {local}"


def _find_conflicts(best: RankInfo, env: Mapping[str, str]) -> list[Conflict]:
    conflicts = []
    for other in (*LAUNCHERS, TORCHRUN):
        told = read_partial(other, env) if other.name != best.launcher else {}
        # A few of torchrun's variables are a leftover of the user's shell, and noted as such.
        if not told or (other is TORCHRUN and len(told) < len(_REQUIRED)):
            continue
        device = env.get(EZPZ_LOCAL_DEVICE)
        if other is TORCHRUN and best.launcher == EZPZ.name and told["local_rank"] == device:
            # The shim exports the index of the rank's device as LOCAL_RANK.
            told = {**told, "local_rank": str(best.local_rank)}
        contradicts = any(text != str(getattr(best, key)) for key, text in told.items())
        if contradicts or (len(told) == len(_REQUIRED) and _is_spread_otherwise(best, other, env)):
            conflicts.append(Conflict(other, told))
    return conflicts


def _is_spread_otherwise(best: RankInfo, family: Family, env: Mapping[str, str]) -> bool:
    """Return whether the same rank of the same world is of a launch inside, over other nodes."""
    try:
        reading = read(family, env)
    except InvalidVariableError:
        return False  # it is not believed yet, so it may be anything
    sizes = {best.local_world_size, getattr(reading, "local_world_size", None)} - {None}
    return len(sizes) > 1


def _resolve_conflict(
    best: RankInfo, conflicts: Sequence[Conflict], above: Iterable[Ancestor], env: Mapping[str, str]
) -> RankInfo:
    """Let the nearest launching process decide; without one, refuse what is no known nesting."""
    by_name = {conflict.family.name: conflict for conflict in conflicts}
    started_by = env.get(EZPZ_LAUNCHER, "") if best.launcher == EZPZ.name else best.launcher
    decided = False
    for ancestor in above:
        if ancestor.family in by_name:
            nearest = _complete(read(by_name[ancestor.family].family, env))
            note = (
                f"{nearest.launcher} before {best.launcher}, which says {best.rank} of "
                f"{best.world_size}: {ancestor.process} is the nearest launcher above"
            )
            return _with_note(nearest, note)
        if ancestor.family == started_by:
            decided = True
            break
    if TORCHRUN.name in by_name and best.launcher == EZPZ.name:
        # The shim exports torchrun's three as its own: whoever changed them runs below it.
        if best.world_size > 1:
            _refuse(best, by_name[TORCHRUN.name], env)
        note = f"RANK, WORLD_SIZE and LOCAL_RANK were set below rank {best.rank} of an ezpz-launch"
        return _with_note(_complete(read(TORCHRUN, env)), note)
    for conflict in conflicts:
        if not decided and not _is_known_nesting(best, conflict, started_by, env):
            _refuse(best, conflict, env)
        best = _with_note(best, f"{conflict}: set aside, {best.launcher} is nearer")
    return best


def _is_known_nesting(
    best: RankInfo, conflict: Conflict, started_by: str, env: Mapping[str, str]
) -> bool:
    """Return whether the numbers can be those of an outer launcher, as far as variables show."""
    if conflict.family is TORCHRUN:
        return True  # a leftover of the user's shell
    size = conflict.told.get("world_size", "")
    if conflict.family.name == "slurm" or env.get(TORCHRUN_PROOF):
        # Ranks of MPI carry the SLURM_PROCID of their proxy, and torchrun's workers whatever
        # their agent is: there are never more proxies or agents than ranks.
        return not size.isdigit() or int(size) <= best.world_size
    # A world of one around ezpz-launch (a launch inside `mpiexec -n 1`) contradicts nothing.
    return best.launcher == EZPZ.name and conflict.family.name != started_by and size == "1"


def _refuse(best: RankInfo, conflict: Conflict, env: Mapping[str, str]) -> None:
    _complete(read(conflict.family, env))
    raise LauncherConflictError(
        f"{best.launcher} says rank {best.rank} of {best.world_size} ({best.sources['rank']}), "
        f"{conflict}; expected one launcher; unset the variables of the one that did not start "
        "this process"
    )


# The launching processes above this one: they decide where variables cannot.

_FAMILY_OF = {
    # The kernel keeps 15 bytes of a process's name.
    known: each.name
    for each in FAMILIES
    for name in each.processes
    for known in (name, name[:15])
}
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
    # None where the kernel does not tell (macOS, a PID namespace of its own): proc_pid_stat(5).
    pid = os.getpid() if pid is None else pid
    for _ in range(_DEEPEST):
        # pid (name) state ppid ...: a name may hold spaces and brackets.
        fields = _read(f"{proc}/{pid}/stat").rpartition(")")[2].split()
        pid = int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else 0
        if pid == 0:
            return
        words = _read(f"{proc}/{pid}/cmdline").split("\0")
        for name in (_read(f"{proc}/{pid}/comm").strip(), *_run_by_python(words)):
            if name in _FAMILY_OF:
                # slurmstepd writes its step there: "slurmstepd: [7.batch]".
                title = words[0] if name == "slurmstepd" else name
                yield Ancestor(_FAMILY_OF[name], f"{title or name} (pid {pid})")
                break


def _run_by_python(words: list[str]) -> list[str]:
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
