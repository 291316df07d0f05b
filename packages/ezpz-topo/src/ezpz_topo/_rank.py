"""Who this process is: rank, world size, local rank, from the launcher's variables alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ._env import (
    FAMILIES,
    LAUNCHERS,
    SLURM_SHELL_STEPS,
    STAMP,
    STAMP_DEVICE,
    STAMP_JOB,
    STAMP_LAUNCHER,
    TORCHRUN,
    TORCHRUN_PROOF,
    Family,
    family,
)
from ._errors import (
    IncompleteLauncherError,
    InvalidVariableError,
    LauncherConflictError,
    NodelistError,
)
from ._nodelist import expand_nodelist, tasks_on_node

# One launcher's variables, read into a `RankInfo`, or told to be half set.


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
            stamp of ezpz-launch, ``"none"`` for one process without a launcher.
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


@dataclass(frozen=True, slots=True, eq=False)  # nobody compares them, and to make eq takes 0.3 ms
class Partial:
    """A family of which some variables are set and others are not."""

    family: Family
    present: dict[str, str]
    missing: tuple[str, ...]


ONE_PROCESS = RankInfo(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    node_rank=0,
    launcher="none",
    num_nodes=1,
    sources=dict.fromkeys(
        ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes"),
        "no launcher's variables are set: one process",
    ),
)


def read(family: Family, env: Mapping[str, str]) -> RankInfo | Partial | None:
    """Read one family: complete, partial, or None when it is absent.

    Raises:
        InvalidVariableError: A variable is not a number, or out of range.
    """
    if not _is_proven(family, env):
        return None
    fields = _fields(family)
    chosen = {key: first_set(env, names) for key, names in fields.items()}
    if _is_absent(family, chosen):
        return None
    absent = tuple(
        "/".join(fields[key]) or f"a {key.replace('_', ' ')}"
        for key, name in chosen.items()
        if name is None
    )
    if absent:
        present = {name: env[name] for name in chosen.values() if name is not None}
        return Partial(family, present, absent)

    sources = {key: name for key, name in chosen.items() if name is not None}
    values = {key: _number(env, name) for key, name in sources.items()}
    local_size, sources["local_world_size"] = _local_world_size(family, env)
    if local_size is None and values["world_size"] == 1:
        local_size, sources["local_world_size"] = 1, "a world of one"
    told: dict[str, int | None] = {}
    for key, names in (("node_rank", family.node_rank), ("num_nodes", family.num_nodes)):
        name = first_set(env, names)
        told[key] = None if name is None else _number(env, name)
        sources[key] = name or f"not told by {family.name}"
    node_rank, num_nodes = told["node_rank"], told["num_nodes"]
    if node_rank is not None and num_nodes is not None and not node_rank < num_nodes:
        raise InvalidVariableError(
            f"{sources['node_rank']}={node_rank} with {sources['num_nodes']}={num_nodes}; expected "
            "a node below the number of nodes; unset both, or start with ezpz-launch"
        )
    if local_size == values["world_size"]:
        for key, value in (("node_rank", 0), ("num_nodes", 1)):
            if told[key] is None:
                told[key], sources[key] = value, "every rank is on this node"
    info = RankInfo(
        rank=values["rank"],
        world_size=values["world_size"],
        local_rank=values["local_rank"],
        local_world_size=local_size,
        node_rank=told["node_rank"],
        launcher=family.name,
        num_nodes=told["num_nodes"],
        sources=sources,
    )
    _check_ranges(info)
    return info


def complete(reading: RankInfo | Partial | None) -> RankInfo:
    """Return a reading that is complete.

    Raises:
        IncompleteLauncherError: It is not; names what is missing.
    """
    if isinstance(reading, RankInfo):
        return reading
    if reading is None:
        raise IncompleteLauncherError(
            f"{TORCHRUN_PROOF} is set, but RANK, WORLD_SIZE and LOCAL_RANK are not; expected "
            f"torchrun to set all of them; unset {TORCHRUN_PROOF}, or start with torchrun",
            family=TORCHRUN.name,
            missing=TORCHRUN.rank + TORCHRUN.world_size + TORCHRUN.local_rank,
        )
    seen = ", ".join(f"{name}={value}" for name, value in sorted(reading.present.items()))
    raise IncompleteLauncherError(
        f"half-set {reading.family.name} environment: {seen} without "
        f"{' and '.join(reading.missing)}; expected all of them or none; start the ranks with "
        f"ezpz-launch, or unset {' '.join(sorted(reading.present))}",
        family=reading.family.name,
        missing=reading.missing,
    )


def claim(family: Family, env: Mapping[str, str]) -> dict[str, str] | None:
    """Return what a family tells of rank, world size and local rank, in its own words.

    The numbers are not believed, so they need not be any. None where the family is absent.
    """
    if not _is_proven(family, env):
        return None
    fields = _fields(family)
    chosen = {key: first_set(env, names) for key, names in fields.items()}
    if _is_absent(family, chosen):
        return None
    return {key: env[name] for key, name in chosen.items() if name is not None}


def first_set(env: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    """Return the first of these variables that is set and not empty."""
    return next((name for name in names if env.get(name)), None)


def _fields(family: Family) -> dict[str, tuple[str, ...]]:
    return {
        "rank": family.rank,
        "world_size": family.world_size,
        "local_rank": family.local_rank,
    }


def _is_absent(family: Family, chosen: Mapping[str, str | None]) -> bool:
    # The world size's name may belong to another family too (PMI_SIZE): rank and local
    # rank, or for a family with names of its own any of the three, show that it is there.
    own = ("rank", "local_rank") if family.name == "pals" else tuple(chosen)
    return all(chosen[key] is None for key in own)


def _is_proven(family: Family, env: Mapping[str, str]) -> bool:
    return all(env.get(name, "") not in ("", *family.disproof) for name in family.proof)


def _local_world_size(family: Family, env: Mapping[str, str]) -> tuple[int | None, str]:
    name = first_set(env, family.local_world_size)
    if name is not None:
        return _number(env, name), name
    tasks, node = env.get(family.tasks_per_node), first_set(env, family.node_rank)
    if tasks and node is not None:
        size = tasks_on_node(tasks, _number(env, node), variable=family.tasks_per_node)
        return size, f"{family.tasks_per_node} at {node}"
    return None, f"not told by {family.name}"


def _number(env: Mapping[str, str], name: str) -> int:
    text = env[name]
    # int() would take " 1_0 " and Arabic digits; a launcher writes plain decimals.
    if not (text.isascii() and text.isdigit()) or len(text) > 9:
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


# The stamp of ezpz-launch: of which job it is, and which device it gave to a rank.

_JOB_IDS = ("SLURM_JOB_ID", "SLURM_HET_JOB_ID", "PBS_JOBID")


def without_a_stamp_of_another_job(env: Mapping[str, str]) -> tuple[Mapping[str, str], str]:
    """Set a stamp aside that was made in another job, and what was exported with it.

    A rank that submits a job hands its environment on: the new job's script would take itself for
    that rank.

    Returns:
        The environment to read, and a note; empty where nothing was set aside.
    """
    theirs = env.get(STAMP_JOB, "")
    ours = [env[name] for name in _JOB_IDS if env.get(name)]
    if not theirs or not ours or theirs in ours:
        return env, ""
    stamp = claim(STAMP, env) or {}
    left_over = {*_names(STAMP.name), STAMP_JOB, STAMP_DEVICE, STAMP_LAUNCHER}
    for name in {TORCHRUN.name, env.get(STAMP_LAUNCHER, "")} & {known.name for known in FAMILIES}:
        # What the shim exported beside the stamp, or read it from; Slurm's own are of this job.
        told = claim(family(name), env) or {}
        same = all(
            told.get(key, stamp.get(key)) == stamp.get(key) for key in ("rank", "world_size")
        )
        if name != "slurm" and same:
            left_over |= _names(name)
    note = f"the stamp of ezpz-launch is of job {theirs}, and this is {ours[0]}: set aside"
    return {name: value for name, value in env.items() if name not in left_over}, note


def _names(name: str) -> set[str]:
    of = family(name)
    fields = (of.rank, of.world_size, of.local_rank, of.local_world_size, of.node_rank)
    return {variable for field in (*fields, of.num_nodes) for variable in field}


# Slurm's steps: whether this process is in the one that its variables name.


def is_step(env: Mapping[str, str]) -> bool:
    """Whether the variables name a step of ranks, and not one that a shell runs in."""
    return env.get("SLURM_STEP_ID", "") not in ("", *SLURM_SHELL_STEPS)


def why_not_ours(env: Mapping[str, str], above: Iterable[Ancestor]) -> str:
    """Return why the step is another one than this process's; empty if nothing speaks against it.

    Args:
        env: The environment, with a step in it.
        above: The launching processes above, nearest first.
    """
    started_by = next((each for each in above if each.family == "slurm"), None)
    if started_by is not None and started_by.runs_a_shell:
        return f"{started_by.process} started this"
    step, job = env.get("SLURM_STEP_NODELIST", ""), env.get("SLURM_JOB_NODELIST", "")
    # Most steps are as wide as their job, and ten thousand names need not be made for that.
    if not step or not job or step == job:
        return ""
    try:
        others = set(expand_nodelist(step)) - set(expand_nodelist(job))
    except NodelistError:
        # Whoever needs the hosts will say so.
        return ""
    return f"its node {min(others)} is none of the job's, {job[:60]}" if others else ""


# Which launchers stand above this process: the tie-break where variables cannot decide.

_FAMILY_OF = {
    # The kernel keeps 15 bytes of a process's name.
    known: family.name
    for family in FAMILIES
    for name in family.processes
    for known in (name, name[:15])
}

_SHELL_STEP = re.compile(r"\[[0-9+]+\.(batch|extern|interactive)\]")
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

    @property
    def runs_a_shell(self) -> bool:
        """Whether it is a slurmstepd of no ranks: of a batch script, or an interactive shell."""
        return _SHELL_STEP.search(self.process) is not None


def launching_ancestors(pid: int | None = None, *, proc: str = "/proc") -> Iterator[Ancestor]:
    """Yield the launching processes above ``pid`` (default: this process), nearest first.

    Yields nothing where the kernel does not tell (macOS, a PID namespace of its own).

    Source: ``proc_pid_stat(5)``.
    """
    pid = os.getpid() if pid is None else pid
    for _ in range(_DEEPEST):
        pid = _parent(pid, proc)
        if pid <= 0:
            return
        for name in _process_names(pid, proc):
            if name in _FAMILY_OF:
                # slurmstepd writes its step there: "slurmstepd: [7.batch]".
                title = _command(pid, proc)[0] if name == "slurmstepd" else name
                yield Ancestor(_FAMILY_OF[name], f"{title or name} (pid {pid})")
                break


def _parent(pid: int, proc: str) -> int:
    stat = _read(f"{proc}/{pid}/stat")
    # pid (name) state ppid ...: a name may hold spaces and brackets.
    fields = stat.rpartition(b")")[2].split()
    return int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else 0


def _process_names(pid: int, proc: str) -> Iterator[str]:
    """Yield the process's own name, then that of the script or module a Python runs."""
    yield _read(f"{proc}/{pid}/comm").decode("utf-8", "replace").strip()
    words = [
        word.decode("utf-8", "replace") for word in _read(f"{proc}/{pid}/cmdline").split(b"\0")
    ]
    if not os.path.basename(words[0]).startswith("python"):
        return
    arguments = iter(words[1:])
    for word in arguments:
        if word == "-m":
            yield next(arguments, "")
            return
        if word in ("-W", "-X"):
            next(arguments, "")
        elif not word.startswith("-"):
            yield os.path.basename(word)
            # .../torch/distributed/run.py, as `python path` has it
            yield ".".join(word.removesuffix(".py").split(os.sep)[-3:])
            return


def _command(pid: int, proc: str) -> list[str]:
    return _read(f"{proc}/{pid}/cmdline").decode("utf-8", "replace").split("\0")


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(65536)
    except OSError:
        # It ended meanwhile, belongs to another user, or there is no /proc: not known.
        return b""


# Where launchers disagree about this process: which of them started it.


@dataclass(frozen=True, slots=True, eq=False)  # nobody compares them, and to make eq takes 0.3 ms
class Rival:
    """A launcher that tells of another rank or world than the one that was chosen.

    Attributes:
        family: Its variables.
        told: What it tells, by field, in its own words; not all of them if it is half set.
    """

    family: Family
    told: Mapping[str, str]

    def __str__(self) -> str:
        """Say what it says."""
        rank, size, local = (self.told.get(k, "?") for k in ("rank", "world_size", "local_rank"))
        return f"{self.family.name} says {rank} of {size}, local rank {local}"


def find_rivals(best: RankInfo, env: Mapping[str, str]) -> list[Rival]:
    """Return the launchers whose variables contradict ``best``, half-set ones included."""
    rivals = []
    for other in (*LAUNCHERS, TORCHRUN):
        told = claim(other, env) if other.name != best.launcher else None
        # A few of torchrun's variables are a leftover of the user's shell, and noted as such.
        if told is None or (other is TORCHRUN and len(told) < 3):
            continue
        if other is TORCHRUN and _is_of_the_device(best, told, env):
            told = {**told, "local_rank": str(best.local_rank)}
        contradicts = any(text != str(getattr(best, key)) for key, text in told.items())
        if contradicts or (len(told) == 3 and _is_spread_otherwise(best, other, env)):
            rivals.append(Rival(other, told))
    return rivals


def _is_of_the_device(best: RankInfo, told: Mapping[str, str], env: Mapping[str, str]) -> bool:
    """Whether LOCAL_RANK is the index of the rank's device, as the shim has exported it."""
    device = env.get(STAMP_DEVICE)
    return best.launcher == STAMP.name and device is not None and told.get("local_rank") == device


def _is_spread_otherwise(best: RankInfo, family: Family, env: Mapping[str, str]) -> bool:
    """Whether the same rank of the same world is of a launch inside, over other nodes."""
    try:
        reading = read(family, env)
    except InvalidVariableError:
        # It is not believed yet, so it may be anything.
        return False
    sizes = {best.local_world_size, getattr(reading, "local_world_size", None)} - {None}
    return len(sizes) > 1


def arbitrate(
    best: RankInfo, rivals: Sequence[Rival], above: Iterable[Ancestor], env: Mapping[str, str]
) -> RankInfo:
    """Let the nearest launching process decide; without one, refuse what is no known nesting.

    Raises:
        IncompleteLauncherError: The nearest launcher, or one that cannot be set aside, is half
            set.
        LauncherConflictError: Two launchers disagree, and nothing tells which one is right.
    """
    undecided = True
    started_by = env.get(STAMP_LAUNCHER, "") if best.launcher == STAMP.name else best.launcher
    for ancestor in above:
        for rival in rivals:
            if rival.family.name == ancestor.family:
                nearest = complete(read(rival.family, env))
                note = (
                    f"{nearest.launcher} before {best.launcher}, which says {best.rank} of "
                    f"{best.world_size}: {ancestor.process} is the nearest launcher above"
                )
                return replace(nearest, notes=(*nearest.notes, note))
        if ancestor.family == started_by:
            undecided = False
            break
    inner = next((rival for rival in rivals if rival.family is TORCHRUN), None)
    if inner is not None and best.launcher == STAMP.name:
        # The shim exports these three as the stamp has them: who changed them is below it.
        return _set_below_the_stamp(best, inner, env)
    if undecided:
        for rival in rivals:
            if not _is_known_nesting(best, rival, started_by, env):
                _refuse(best, rival, env)
    notes = tuple(f"{rival}: set aside, {best.launcher} is nearer" for rival in rivals)
    return replace(best, notes=(*best.notes, *notes))


def _set_below_the_stamp(best: RankInfo, inner: Rival, env: Mapping[str, str]) -> RankInfo:
    if best.world_size > 1:
        _refuse(best, inner, env)
    reading = complete(read(TORCHRUN, env))
    note = f"RANK, WORLD_SIZE and LOCAL_RANK were set below rank {best.rank} of an ezpz-launch"
    return replace(reading, notes=(*reading.notes, note))


def _is_known_nesting(
    best: RankInfo, rival: Rival, started_by: str, env: Mapping[str, str]
) -> bool:
    """Whether a rival's numbers can be those of an outer launcher, as far as variables show it."""
    size = rival.told.get("world_size", "")
    if rival.family is TORCHRUN:
        # A leftover of the user's shell.
        return True
    if rival.family.name == "slurm" or env.get(TORCHRUN_PROOF):
        # Ranks of MPI carry the SLURM_PROCID of their proxy, and torchrun's workers whatever
        # their agent is: there are never more proxies or agents than ranks.
        return not size.isdigit() or int(size) <= best.world_size
    # A world of one around the stamp (a launch inside `mpiexec -n 1`) contradicts nothing.
    return best.launcher == STAMP.name and rival.family.name != started_by and size == "1"


def _refuse(best: RankInfo, rival: Rival, env: Mapping[str, str]) -> None:
    reading = read(rival.family, env)
    if isinstance(reading, Partial):
        complete(reading)
    raise LauncherConflictError(
        f"{best.launcher} says rank {best.rank} of {best.world_size} ({best.sources['rank']}), "
        f"{rival}; expected one launcher; unset the variables of the one that did not start this "
        f"process"
    )


# Who this process is: rank, world size, local rank, from the launcher's variables alone.

_NAMES = frozenset(
    name
    for each in FAMILIES
    for name in (*each.rank, *each.world_size, *each.local_rank, TORCHRUN_PROOF)
)
"""Where none of these is set, there is nothing to decide."""


def get_rank_info(
    env: Mapping[str, str] | None = None, *, ancestors: Iterable[Ancestor] | None = None
) -> RankInfo:
    """Read this process's place in the world from the launcher's variables.

    The order of trust: the stamp of ezpz-launch, torchrun, then the launchers in the
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
    mine = env is None or env is os.environ
    env = os.environ if env is None else env
    if not any(map(env.get, _NAMES)):
        return ONE_PROCESS
    env, stale = without_a_stamp_of_another_job(env)
    # MERGED  # not for one process alone

    above = _launching_ancestors() if mine and ancestors is None else ancestors or ()
    env, above, note = _without_a_step_of_others(env, above)
    best = _by_order_of_trust(env)
    if best.launcher == "slurm":
        _refuse_a_step_of_others(best, env)
    rivals = find_rivals(best, env)
    if rivals:
        best = arbitrate(best, rivals, above, env)
    for text in (stale, note, _note_on_leftover(best, env)):
        best = _with_note(best, text)
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
    text = env.get(STAMP_DEVICE, "")
    if info.launcher != STAMP.name or not text:
        return info.local_rank
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise InvalidVariableError(
            f"{STAMP_DEVICE}={text[:40]!r}; expected a number from 0; unset it, or start with "
            "ezpz-launch"
        )
    return int(text)


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
            family=info.launcher,
            missing=("LOCAL_WORLD_SIZE",),
        )
    return info.local_world_size


def _launching_ancestors() -> Iterator[Ancestor]:
    """Yield what `launching_ancestors` does; most ranks never ask, and do not load it."""
    # MERGED

    yield from launching_ancestors()


def _by_order_of_trust(env: Mapping[str, str]) -> RankInfo:
    # Half a stamp is no stamp that we made: that is an error too.
    stamp = read(STAMP, env)
    stamp = None if stamp is None else complete(stamp)
    if env.get(TORCHRUN_PROOF):
        # torchrun may run below an MPI launcher (one agent a node): the agent is nearer. The
        # shim of ezpz-launch removes the mark, so that this one runs below the stamp too.
        inner = complete(read(TORCHRUN, env))
        above = "" if stamp is None else f"torchrun runs below rank {stamp.rank} of an ezpz-launch"
        return _with_note(inner, above)
    if stamp is not None:
        return stamp
    half: Partial | None = None
    for candidate in LAUNCHERS:
        reading = read(candidate, env)
        if isinstance(reading, RankInfo):
            return reading
        half = half or reading
    by_hand = read(TORCHRUN, env)
    if isinstance(by_hand, RankInfo):
        return by_hand
    if half is None and by_hand is None:
        return ONE_PROCESS
    return complete(half or by_hand)


def _without_a_step_of_others(
    env: Mapping[str, str], above: Iterable[Ancestor]
) -> tuple[Mapping[str, str], Iterable[Ancestor], str]:
    """Set a step aside that this process is not in."""
    if not is_step(env):
        return env, above, ""
    above = list(above)
    why = why_not_ours(env, above)
    if not why:
        return env, above, ""
    note = f"SLURM_STEP_ID={env['SLURM_STEP_ID']} set aside: {why}"
    return {k: v for k, v in env.items() if k != "SLURM_STEP_ID"}, above, note


def _refuse_a_step_of_others(best: RankInfo, env: Mapping[str, str]) -> None:
    """Refuse such a step where only the variables can show it."""
    here = env.get("SLURM_GTIDS", "")
    if here and len(here.split(",")) != best.local_world_size:
        raise InvalidVariableError(
            f"SLURM_GTIDS={here[:40]} beside {best.local_world_size} tasks of this node "
            f"({best.sources['local_world_size']}); expected one id a task; unset SLURM_STEP_ID, "
            "which is left over from the step that submitted this job"
        )


def _note_on_leftover(best: RankInfo, env: Mapping[str, str]) -> str:
    if best.launcher in ("none", STAMP.name, TORCHRUN.name):
        return ""
    right = {"RANK": best.rank, "WORLD_SIZE": best.world_size, "LOCAL_RANK": best.local_rank}
    wrong = {
        name: env[name] for name in right if (env.get(name) or str(right[name])) != str(right[name])
    }
    if not wrong:
        return ""
    seen = " ".join(f"{name}={value}" for name, value in wrong.items())
    return f"set aside: {seen} of the environment, because {best.launcher} started this process"


def _with_note(info: RankInfo, note: str) -> RankInfo:
    return replace(info, notes=(*info.notes, note)) if note else info
