"""Ranks that called different things: who, what, and where in their code."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ezpz_dist._errors import CollectiveError, MismatchError
from ezpz_dist._hangs.standing import calling_line
from ezpz_dist._ranks import fold
from ezpz_dist._world import World

from .call import Call, digest, shorten

_PARTIES = 8
"""Different calls that are told apart; more make no message clearer."""

_KEYS = 3
"""Keys that a message names for each rank."""

_PATIENCE = 10.0
"""Seconds for a rank to say what it called; they all are in this function."""

_LOST = (dist.DistNetworkError, dist.DistStoreError)


@dataclass(frozen=True, slots=True)
class Slots:
    """What the exchange showed.

    Attributes:
        world: What set-up decided.
        ranks: The ranks, by place.
        place: This rank's place.
        heads: By place, bytes that are equal where the calls are.
        refused: The places of those who cannot take part.
        every: All bytes of the exchange: the same on every rank, and never twice.
    """

    world: World
    ranks: Sequence[int]
    place: int
    heads: list[bytes]
    refused: set[int]
    every: bytes


def explain(call: Call, slots: Slots, refusal: Exception | None) -> CollectiveError:
    """Return the error that every rank raises. Collective: every rank of ``slots`` calls this.

    One rank of each party says through the store what it called; nothing is kept there.
    """
    parties: dict[bytes, list[int]] = {}
    for place, head in enumerate(slots.heads):
        parties.setdefault(head, []).append(place)
    # The majority first; of equally many, those with the lowest rank.
    ordered = sorted(parties.values(), key=lambda party: (-len(party), party[0]))
    if slots.refused:
        ordered.sort(key=lambda party: party[0] in slots.refused)
    told = _tell_and_ask(call, slots, refusal, [party[0] for party in ordered[:_PARTIES]])
    hosts = slots.world.hosts

    def name(party: list[int]) -> str:
        ranks = [slots.ranks[place] for place in party]
        return f"rank {ranks[0]} ({hosts[ranks[0]]})" if len(ranks) == 1 else f"ranks {fold(ranks)}"

    expected = told[0]
    lines = []
    if ordered[0][0] not in slots.refused:
        lines.append(f"{name(ordered[0])} {_verb(ordered[0])} {_words(expected)}")
    for party, said in zip(ordered[1:], told[1:], strict=False):
        if bool(slots.refused) == (party[0] in slots.refused):
            lines.append(f"{name(party)} {_difference(expected, said, party)}")
    if len(ordered) > _PARTIES:
        lines.append(f"and {len(ordered) - _PARTIES} more different calls")
    if slots.refused:
        ranks = sorted(slots.ranks[place] for place in slots.refused)
        return CollectiveError(
            f"{'; '.join(lines)}; expected every rank to take part; mend the call there", ranks
        )
    ranks = sorted(slots.ranks[place] for party in ordered[1:] for place in party)
    return MismatchError(
        f"{'; '.join(lines)}; expected every rank to call the same, with the same keys, shapes "
        "and dtypes",
        ranks,
    )


def _verb(party: list[int]) -> str:
    return "calls" if len(party) == 1 else "call"


def _words(said: Mapping[str, Any]) -> str:
    return f"{shorten(said['signature'])} at {said['at']}"


def _difference(expected: Mapping[str, Any], said: Mapping[str, Any], party: list[int]) -> str:
    if said["refusal"]:
        return f"cannot take part in {_words(said)}: {said['refusal']}"
    mine, theirs = said["leaves"], expected["leaves"]
    alike = (said["name"], said["op"]) == (expected["name"], expected["op"])
    if not alike or mine is None or theirs is None or ("" in mine) != ("" in theirs):
        return f"{_verb(party)} {_words(said)}"
    has = "has" if len(party) == 1 else "have"
    found = [f"{has} no key {key}" for key in theirs if key not in mine]
    found += [f"{has} a key {key} that the others have not" for key in mine if key not in theirs]
    found += [
        f"{has} {kind}{f' at key {key}' if key else ''} instead of {theirs[key]}"
        for key, kind in mine.items()
        if theirs.get(key, kind) != kind
    ]
    more = [f"and {len(found) - _KEYS} more differences"] if len(found) > _KEYS else []
    return f"{', '.join(found[:_KEYS] + more)} at {said['at']}"


def _tell_and_ask(
    call: Call, slots: Slots, refusal: Exception | None, speakers: list[int]
) -> list[dict[str, Any]]:
    """Return what each of the speakers called; each says so itself, the others listen."""
    mine = {
        "name": call.name,
        "op": call.op,
        "leaves": None if call.leaves is None else dict(call.leaves),
        "signature": call.signature(),
        "at": calling_line(),
        "refusal": refusal and f"{type(refusal).__name__}: {refusal}",
    }
    unknown = {**mine, "leaves": None, "signature": "something else", "at": "?", "refusal": ""}
    # No counter that a failure could put out of step: what all ranks have just seen.
    subject = f"mismatch/{digest(f'{list(slots.ranks)}{slots.every.hex()}').hex()}"
    store, until = slots.world.store, time.monotonic() + min(_PATIENCE, slots.world.timeout)
    keys = [f"{subject}/{place}" for place in speakers]
    told: list[dict[str, Any]] = []
    try:
        if slots.place in speakers:
            store.set(f"{subject}/{slots.place}", json.dumps(mine))
        for key in keys:
            store.wait([key], timedelta(seconds=max(0.1, until - time.monotonic())))
            told.append(json.loads(store.get(key)))
    except _LOST:
        # A rank, or the store's, has ended meanwhile: the ranks that differ are known all the same.
        told += [unknown] * (len(keys) - len(told))
        return told
    with suppress(*_LOST):
        _leave_together(slots, subject, keys, until)
    return told


def _leave_together(slots: Slots, subject: str, keys: list[str], until: float) -> None:
    """Keep the rank whose process holds the store until all have read, and leave nothing there."""
    store, size = slots.world.store, len(slots.ranks)
    if store.add(f"{subject}/read", 1) == size:
        for key in [*keys, f"{subject}/read"]:
            store.delete_key(key)
        store.set(f"{subject}/done", "")
    store.wait([f"{subject}/done"], timedelta(seconds=max(0.1, until - time.monotonic())))
    if store.add(f"{subject}/left", 1) == size:
        store.delete_key(f"{subject}/done")
        store.delete_key(f"{subject}/left")
