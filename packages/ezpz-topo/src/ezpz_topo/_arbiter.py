"""Where launchers disagree about this process: which of them started it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ._env import (
    LAUNCHERS,
    STAMP,
    STAMP_DEVICE,
    STAMP_LAUNCHER,
    TORCHRUN,
    TORCHRUN_PROOF,
    Family,
)
from ._errors import InvalidVariableError, LauncherConflictError
from ._reading import Partial, RankInfo, claim, complete, read

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._ancestors import Ancestor


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
