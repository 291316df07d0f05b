"""Asking all ranks where they stand, once for all that want to know."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it so

from ezpz_dist._store import LOST, arrived, within

from .board import Board
from .processes import state_of
from .standing import Standing
from .watcher import Watcher

ANSWER = 0.8
"""Seconds for a rank's watcher to answer. It needs the interpreter's lock for a millisecond;
whoever does not get it in this time is stopped, gone, or in native code that keeps the lock."""

LOOK = 0.3
"""Seconds for a neighbour to look what became of a silent rank's process."""

LONGEST = 1.8
"""Seconds for it all: rank 0's process, which holds the store, can be stopped itself."""

SHOWN = 64
"""Ranks that are looked for and named one by one; a longer list nobody reads."""


@dataclass(frozen=True, slots=True)
class RollCall:
    """Who answered what.

    Attributes:
        standings: Where those stand who answered, by rank.
        silent: For each rank that did not answer, what became of it, as far as it is known:
            ``"has ended"``, ``"is stopped (pid 71)"``, ``"left: cleanup() at train.py:90"``.
        hosts: The host of each silent rank.
    """

    standings: dict[int, Standing]
    silent: dict[int, str] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)

    def gone(self) -> list[int]:
        """Return the ranks that can come no more: ended, left or stopped, as far as is known."""
        return [rank for rank, fate in self.silent.items() if fate != _NO_ANSWER]

    def among(self, ranks: Collection[int]) -> RollCall:
        """Return what was found of these ranks; of rank 0 too, if it is silent.

        Without rank 0, which holds the store, there is no telling of the others.
        """
        silent = {rank: fate for rank, fate in self.silent.items() if rank in ranks or rank == 0}
        standings = {rank: said for rank, said in self.standings.items() if rank in ranks}
        return RollCall(standings, silent, self.hosts)

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "standings": [standing.as_json() for standing in self.standings.values()],
            "silent": [[rank, fate, self.hosts[rank]] for rank, fate in self.silent.items()],
        }

    @staticmethod
    def from_json(said: dict[str, Any]) -> RollCall:
        """Return what `as_json` was made of."""
        found = [Standing.from_json(each) for each in said["standings"]]
        return RollCall(
            {standing.rank: standing for standing in found},
            {rank: fate for rank, fate, _ in said["silent"]},
            {rank: host for rank, _, host in said["silent"]},
        )


_NO_ANSWER = "does not answer: it is stopped, or in native code that keeps Python's lock"


def call_roll(watcher: Watcher, *, stack: bool = False) -> RollCall:
    """Return where every rank stands, within about two seconds; never an error.

    When many ranks want to know at once, as all peers of one that died do, one of them asks
    and the others read what it was told.
    """
    mine = watcher.standing(stack=stack)
    with watcher.pinned(mine):
        try:
            return within(LONGEST, lambda: _call(watcher.board, mine, stack))
        except LOST as error:
            return _without_store(watcher.board, mine, error)


def _call(board: Board, mine: Standing, stack: bool) -> RollCall:
    store = board.connect(1.0)
    turn = store.add("roll/turn", 0)
    key = f"roll/{turn}/{stack}"
    first = store.compare_set(key, "", str(board.rank))
    if int(first) != board.rank:
        said = _read(store, f"{key}/said", ANSWER + LOOK + 0.2)
        if said is not None:
            found = RollCall.from_json(json.loads(said))
            found.standings[board.rank] = mine
            return found
    call = _ask(board, store, f"{turn}/{board.rank}", mine, stack)
    store.set(f"{key}/said", json.dumps(call.as_json()))
    store.add("roll/turn", 1)
    return call


def _without_store(board: Board, mine: Standing, error: Exception) -> RollCall:
    """Say what can be said when rank 0's process, which holds the store, does not answer."""
    if board.rank == 0:
        return RollCall({0: mine})
    pid, namespace = board.holder
    state = state_of(pid, namespace) if board.hosts[0] == mine.host else ""
    words = str(error)
    if state == "ended" or "refused" in words or "onnection was likely closed" in words:
        fate = f"has ended (pid {pid})"
    elif state.startswith("stopped"):
        fate = f"is {state} (pid {pid})"
    else:
        fate = f"{_NO_ANSWER} (pid {pid})"
    fate += "; it holds the store, so that nothing is known of the others"
    return RollCall({board.rank: mine}, {0: fate}, {0: board.hosts[0]})


def _ask(board: Board, store: Store, roll: str, mine: Standing, stack: bool) -> RollCall:
    others = [rank for rank in range(board.size) if rank != board.rank]
    board.post(store, "roll", others, roll=roll, stack=stack)
    keys = {rank: f"standing/{roll}/{rank}" for rank in others}
    there = arrived(store, list(keys.values()), ANSWER)
    standings = {board.rank: mine}
    for text in store.multi_get(there) if there else ():
        standing = Standing.from_json(json.loads(text))
        standings[standing.rank] = standing
    silent = [rank for rank in others if rank not in standings]
    return RollCall(
        dict(sorted(standings.items())),
        _fates(board, store, roll, silent[:SHOWN]) | dict.fromkeys(silent[SHOWN:], _NO_ANSWER),
        {rank: board.hosts[rank] for rank in silent},
    )


def _fates(board: Board, store: Store, roll: str, silent: list[int]) -> dict[int, str]:
    """Find out what became of ranks that do not answer."""
    if not silent:
        return {}
    processes = {rank: _process(store, rank) for rank in silent}
    at = [(rank, board.hosts[rank], *process) for rank, process in processes.items() if process]
    board.post(store, "look", range(board.size), roll=roll, at=at)
    keys = {rank: f"state/{roll}/{rank}" for rank, _, _, _ in at}
    arrived(store, list(keys.values()), LOOK)
    fates = {}
    for rank in silent:
        left = _read(store, f"left/{rank}", 0.05)
        known = rank in keys and store.check([keys[rank]])
        state = store.get(keys[rank]).decode() if known else ""
        process = processes[rank]
        pid = process[0] if process else "?"
        if left is not None:
            fates[rank] = f"has left: {left.decode()}"
        elif state == "ended":
            fates[rank] = f"has ended (pid {pid})"
        elif state.startswith("stopped"):
            fates[rank] = f"is {state} (pid {pid})"
        elif state:
            fates[rank] = f"{_NO_ANSWER} (pid {pid}, {state})"
        else:
            fates[rank] = _NO_ANSWER
    return fates


def _process(store: Store, rank: int) -> tuple[int, int] | None:
    """Return (pid, PID namespace) as the rank told at set-up."""
    said = _read(store, f"facts/{rank}", 0.05)
    if said is None:
        return None
    _, pid, namespace, _ = json.loads(said)
    return pid, namespace


def _read(store: Store, key: str, seconds: float) -> bytes | None:
    return bytes(store.get(key)) if arrived(store, [key], seconds) else None
