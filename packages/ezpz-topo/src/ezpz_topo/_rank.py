"""Who this process is: rank, world size, local rank, from the launcher's variables alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ._env import FAMILIES, LAUNCHERS, STAMP, STAMP_DEVICE, TORCHRUN, TORCHRUN_PROOF
from ._errors import IncompleteLauncherError, InvalidVariableError
from ._reading import ONE_PROCESS, Partial, RankInfo, complete, read
from ._stamp import without_a_stamp_of_another_job
from ._steps import is_step, why_not_ours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._ancestors import Ancestor

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
    from ._arbiter import arbitrate, find_rivals  # noqa: PLC0415  # not for one process alone

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
    from ._ancestors import launching_ancestors  # noqa: PLC0415

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
