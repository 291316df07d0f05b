"""Who this process is: rank, world size, local rank, from the launcher's variables alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ._ancestors import Ancestor, launching_ancestors
from ._env import LAUNCHERS, STAMP, STAMP_LAUNCHER, TORCHRUN, TORCHRUN_PROOF, Family
from ._errors import IncompleteLauncherError, LauncherConflictError
from ._reading import ONE_PROCESS, Partial, RankInfo, claim, complete, first_set, read


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
    best = _by_order_of_trust(env)
    rivals = _rivals(best, env)
    if rivals:
        above = launching_ancestors() if mine and ancestors is None else ancestors or ()
        best = _arbitrate(best, rivals, above, env)
    return _with_note(best, _note_on_leftover(best, env))


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


def _by_order_of_trust(env: Mapping[str, str]) -> RankInfo:
    stamp = complete(read(STAMP, env)) if first_set(env, STAMP.rank) else None
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


def _rivals(best: RankInfo, env: Mapping[str, str]) -> list[Family]:
    """Return the families that are fully there and give this process another rank or world."""
    others = [other for other in (*LAUNCHERS, TORCHRUN) if other.name != best.launcher]
    mine = (str(best.rank), str(best.world_size))
    return [other for other in others if claim(other, env) not in (None, mine)]


def _arbitrate(
    best: RankInfo, rivals: list[Family], above: Iterable[Ancestor], env: Mapping[str, str]
) -> RankInfo:
    """Let the nearest launching process decide; without one, refuse what is no known nesting."""
    started_by = _started_by(best, env)
    for ancestor in above:
        for rival in rivals:
            if rival.name == ancestor.family:
                nearest = complete(read(rival, env))
                return _with_note(
                    nearest,
                    f"{rival.name} before {best.launcher}, which says rank {best.rank} of "
                    f"{best.world_size}: {ancestor.process} is the nearest launcher above",
                )
        if ancestor.family == started_by:
            return best
    for rival in rivals:
        if not _is_known_nesting(best, rival, started_by, env):
            rank, size = claim(rival, env) or ("", "")
            raise LauncherConflictError(
                f"{best.launcher} says rank {best.rank} of {best.world_size} "
                f"({best.sources['rank']}), {rival.name} says {rank} of {size} "
                f"({first_set(env, rival.rank)}); expected one launcher; unset the variables of "
                f"the one that did not start this process"
            )
    return best


def _started_by(best: RankInfo, env: Mapping[str, str]) -> str:
    """Return the family of the launcher that ``best`` was started by, also below the stamp."""
    return env.get(STAMP_LAUNCHER, "") if best.launcher == STAMP.name else best.launcher


def _is_known_nesting(
    best: RankInfo, rival: Family, started_by: str, env: Mapping[str, str]
) -> bool:
    """Whether a rival's numbers are those of an outer launcher, as far as variables show it."""
    if TORCHRUN.name in (best.launcher, rival.name):
        # An agent below an MPI launcher, or a leftover of the user's shell.
        return True
    if rival.name == "slurm":
        # Inside a Slurm step an MPI launcher's ranks carry their proxy's SLURM_PROCID.
        return True
    # A world of one around the stamp (a launch inside `mpiexec -n 1`) contradicts nothing.
    size = (claim(rival, env) or ("", ""))[1]
    return best.launcher == STAMP.name and rival.name != started_by and size == "1"


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
