"""Who this process is: rank, world size, local rank, from the launcher's variables alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ._env import LAUNCHERS, STAMP, STAMP_LAUNCHER, TORCHRUN, TORCHRUN_PROOF, Family
from ._errors import IncompleteLauncherError, InvalidVariableError, LauncherConflictError
from ._tasks import tasks_on_node


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
        sources: For each field the variable (or rule) that it was read from.
        notes: What was seen and set aside, in words for people.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    node_rank: int | None
    launcher: str
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class _Partial:
    """A family of which some variables are set and others are not."""

    family: Family
    present: dict[str, str]
    missing: tuple[str, ...]


ONE_PROCESS = RankInfo(
    0,
    1,
    0,
    1,
    0,
    "none",
    dict.fromkeys(
        ("rank", "world_size", "local_rank", "local_world_size", "node_rank"),
        "no launcher's variables are set: one process",
    ),
)


def get_rank_info(env: Mapping[str, str] | None = None) -> RankInfo:
    """Read this process's place in the world from the launcher's variables.

    The order of trust: the stamp of ezpz-launch, torchrun, then the launchers in the
    order of the table, then a complete ``RANK``/``WORLD_SIZE``/``LOCAL_RANK`` set by
    hand, then one process. Nothing is guessed and MPI is not imported.

    Args:
        env: The environment to read; default ``os.environ``.

    Raises:
        IncompleteLauncherError: A launcher's variables are half set.
        InvalidVariableError: A variable is not a number, or out of range.
        LauncherConflictError: Two launchers disagree about this process.
    """
    env = os.environ if env is None else env
    if _is_set(env, STAMP.rank):
        return _from_stamp(env)
    if _is_set(env, (TORCHRUN_PROOF,)):
        # torchrun may run below an MPI launcher (one agent a node): the agent is nearer.
        return _complete(_read(TORCHRUN, env))
    half: _Partial | None = None
    for index, candidate in enumerate(LAUNCHERS):
        reading = _read(candidate, env)
        if isinstance(reading, RankInfo):
            _refuse_conflict(reading, LAUNCHERS[index + 1 :], env)
            return _with_note(reading, _note_on_leftover(reading, env))
        half = half or reading
    by_hand = _read(TORCHRUN, env)
    if isinstance(by_hand, RankInfo):
        return by_hand
    if half is None and by_hand is None:
        return ONE_PROCESS
    return _complete(half or by_hand)


def get_rank(env: Mapping[str, str] | None = None) -> int:
    """Return the global rank of this process; 0 for one process without a launcher.

    Raises:
        TopoError: The environment is half set or contradicts itself (see `get_rank_info`).
    """
    return get_rank_info(env).rank


def get_world_size(env: Mapping[str, str] | None = None) -> int:
    """Return the number of ranks; 1 for one process without a launcher.

    Raises:
        TopoError: The environment is half set or contradicts itself (see `get_rank_info`).
    """
    return get_rank_info(env).world_size


def get_local_rank(env: Mapping[str, str] | None = None) -> int:
    """Return this process's rank on its node; 0 for one process without a launcher.

    Raises:
        TopoError: The environment is half set or contradicts itself (see `get_rank_info`).
    """
    return get_rank_info(env).local_rank


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


def _from_stamp(env: Mapping[str, str]) -> RankInfo:
    stamp = _complete(_read(STAMP, env))
    if _is_set(env, (TORCHRUN_PROOF,)):
        # The shim removes torchrun's mark, so a torchrun seen here runs below the stamp.
        inner = _complete(_read(TORCHRUN, env))
        return _with_note(inner, f"torchrun runs below rank {stamp.rank} of an ezpz-launch")
    mine = env.get(STAMP_LAUNCHER, "")
    # A world of one around us (a launch inside `mpiexec -n 1`) contradicts nothing.
    others = tuple(
        f for f in LAUNCHERS if f.name == mine or _world_size_of(f, env) not in ("", "1")
    )
    _refuse_conflict(stamp, others, env)
    return stamp


def _read(family: Family, env: Mapping[str, str]) -> RankInfo | _Partial | None:
    """Read one family: complete, partial, or None when it is absent."""
    if any(not env.get(name) for name in family.proof):
        return None
    fields = {
        "rank": family.rank,
        "world_size": family.world_size,
        "local_rank": family.local_rank,
    }
    chosen = {key: _first_set(env, names) for key, names in fields.items()}
    # The world size's name may belong to another family too (PMI_SIZE): rank and local
    # rank, or for a family with names of its own any of the three, show that it is there.
    own = ("rank", "local_rank") if family.name == "pals" else tuple(fields)
    if all(chosen[key] is None for key in own):
        return None
    absent = tuple("/".join(fields[key]) for key, name in chosen.items() if name is None)
    if absent:
        present = {name: env[name] for name in chosen.values() if name is not None}
        return _Partial(family, present, absent)

    sources = {key: name for key, name in chosen.items() if name is not None}
    values = {key: _number(env, name) for key, name in sources.items()}
    local_size, local_size_source = _local_world_size(family, env)
    node_name = _first_set(env, family.node_rank)
    node_rank = None if node_name is None else _number(env, node_name)
    sources["local_world_size"] = local_size_source
    sources["node_rank"] = node_name or f"not told by {family.name}"
    if node_rank is None and local_size == values["world_size"]:
        node_rank, sources["node_rank"] = 0, "every rank is on this node"
    info = RankInfo(
        rank=values["rank"],
        world_size=values["world_size"],
        local_rank=values["local_rank"],
        local_world_size=local_size,
        node_rank=node_rank,
        launcher=family.name,
        sources=sources,
    )
    _check_ranges(info)
    return info


def _complete(reading: RankInfo | _Partial | None) -> RankInfo:
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


def _local_world_size(family: Family, env: Mapping[str, str]) -> tuple[int | None, str]:
    name = _first_set(env, family.local_world_size)
    if name is not None:
        return _number(env, name), name
    tasks, node = env.get(family.tasks_per_node), _first_set(env, family.node_rank)
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


def _refuse_conflict(best: RankInfo, others: tuple[Family, ...], env: Mapping[str, str]) -> None:
    """Compare with every other launcher that is fully there, without believing its numbers."""
    for other in others:
        required = (other.rank, other.world_size, other.local_rank)
        names = [name for alternatives in required if (name := _first_set(env, alternatives))]
        # Inside a Slurm step an MPI launcher's ranks carry their proxy's SLURM_PROCID.
        if other.name == "slurm" or len(names) < len(required):
            continue
        rank, size = env[names[0]], env[names[1]]
        if (rank, size) != (str(best.rank), str(best.world_size)):
            raise LauncherConflictError(
                f"{best.launcher} says rank {best.rank} of {best.world_size} "
                f"({best.sources['rank']}), {other.name} says {rank} of {size} ({names[0]}); "
                f"expected one launcher; unset the variables of the one that did not start "
                f"this process"
            )


def _note_on_leftover(best: RankInfo, env: Mapping[str, str]) -> str:
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


def _first_set(env: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if env.get(name)), None)


def _world_size_of(family: Family, env: Mapping[str, str]) -> str:
    name = _first_set(env, family.world_size)
    return "" if name is None else env[name]


def _is_set(env: Mapping[str, str], names: tuple[str, ...]) -> bool:
    return _first_set(env, names) is not None
