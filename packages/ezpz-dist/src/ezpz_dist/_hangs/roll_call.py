"""Asking all ranks where they stand, once for all that want to know."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it so

from ezpz_dist._store import LOST, arrived, values, within

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
        """Return it as plain values: short, for most ranks stand in the same place."""
        places: dict[str, list[int]] = {}
        for rank, standing in self.standings.items():
            place = {**standing.as_json(), "rank": 0, "host": ""}
            places.setdefault(json.dumps(place), []).append(rank)
        return {"places": list(places.items()), "silent": list(self.silent.items())}

    @staticmethod
    def from_json(said: dict[str, Any], hosts: Sequence[str]) -> RollCall:
        """Return what `as_json` was made of; `hosts` are those of all ranks."""
        standings: dict[int, Standing] = {}
        for place, ranks in said["places"]:
            there = Standing.from_json(json.loads(place))
            standings |= {r: replace(there, rank=r, host=hosts[r]) for r in ranks}
        silent: dict[int, str] = dict(said["silent"])
        return RollCall(dict(sorted(standings.items())), silent, {r: hosts[r] for r in silent})


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
    store = board.reach()
    turn = store.add("roll/turn", 0)
    key = f"roll/{turn}/{stack}"
    first = store.compare_set(key, "", str(board.rank))
    if int(first) != board.rank:
        said = _read(store, f"{key}/said", ANSWER + LOOK + 0.2)
        if said is not None:
            found = RollCall.from_json(json.loads(zlib.decompress(said)), board.hosts)
            found.standings[board.rank] = mine
            return found
    call = _ask(board, store, f"{turn}/{board.rank}", mine, stack)
    # Thousands read it, from one server.
    store.set(f"{key}/said", zlib.compress(json.dumps(call.as_json()).encode()))  # type: ignore[arg-type]
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
        fate = f"does not answer in {LONGEST:g} s: it is stopped, cut off or overloaded (pid {pid})"
    fate += "; it holds the store, so that nothing is known of the others"
    return RollCall({board.rank: mine}, {0: fate}, {0: board.hosts[0]})


def _ask(board: Board, store: Store, roll: str, mine: Standing, stack: bool) -> RollCall:
    others = [rank for rank in range(board.size) if rank != board.rank]
    board.post(store, "roll", others, roll=roll, stack=stack)
    keys = {rank: f"standing/{roll}/{rank}" for rank in others}
    there = arrived(store, list(keys.values()), ANSWER)
    standings = {board.rank: mine}
    for text in values(store, there):
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
    at: list[tuple[int, str, int, int]] = []
    for said in values(store, [f"facts/{rank}" for rank in silent]):  # as told at set-up
        host, pid, namespace, _ = json.loads(said)
        at.append((silent[len(at)], host, pid, namespace))
    board.post(store, "look", range(board.size), roll=roll, at=at)
    words = _those(store, "left", silent)
    states = _those(store, f"state/{roll}", [rank for rank in silent if rank not in words], LOOK)
    fates = {}
    for rank, _, pid, _ in at:
        state = states.get(rank, "")
        if rank in words:
            fates[rank] = f"has left: {words[rank]}"
        elif state == "ended":
            fates[rank] = f"has ended (pid {pid})"
        elif state.startswith("stopped"):
            fates[rank] = f"is {state} (pid {pid})"
        elif state:
            fates[rank] = f"{_NO_ANSWER} (pid {pid}, {state})"
        else:
            fates[rank] = _NO_ANSWER
    return fates


def _those(store: Store, name: str, ranks: list[int], seconds: float = 0.0) -> dict[int, str]:
    """Return what is there under a name for each rank."""
    keys = {f"{name}/{rank}": rank for rank in ranks}
    there = arrived(store, list(keys), seconds)
    texts = values(store, there)
    return {keys[key]: text.decode() for key, text in zip(there, texts, strict=True)}


def _read(store: Store, key: str, seconds: float) -> bytes | None:
    return bytes(store.get(key)) if arrived(store, [key], seconds) else None
