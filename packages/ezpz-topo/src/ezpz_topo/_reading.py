"""One launcher's variables, read into a `RankInfo`, or told to be half set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ._env import TORCHRUN, TORCHRUN_PROOF, Family
from ._errors import IncompleteLauncherError, InvalidVariableError
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
