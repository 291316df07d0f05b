"""Whether all ranks are there, once each, and run the same program."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it so

from ezpz_topo import RankInfo

from ._address import fold_hosts, unfold_hosts
from ._errors import SetupError, fold
from ._store import LOST, arrived, values, within

# What must be the same on every rank: versions, and the script.

_LIBRARIES = (
    "ezpz", "ezpz_device", "ezpz_dist", "ezpz_obs", "ezpz_topo", "ezpz_tp",
    "accelerate", "deepspeed", "lightning", "mpi4py", "numpy", "transformers",
)  # fmt: skip
"""Libraries whose version is compared between those ranks that have imported them already."""


def common_facts(**more: object) -> dict[str, Any]:
    """Return what must be the same on every rank: versions, the script, and what is given."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "packages": _versions(),
        "script": _script(),
        **more,
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = version
    return found


def _script() -> str:
    """Return the main script's name and a hash of its text."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None:
        if sys.argv[:1] != ["-c"]:
            return "no file"  # a notebook, standard input
        name, text = "python -c", sys.orig_argv[-len(sys.argv)].encode()
    else:
        name = os.path.basename(str(path))
        try:
            with open(path, "rb") as file:
                text = file.read()
        except OSError:
            return name  # a zip archive, or removed since
    return f"{name} {hashlib.blake2b(text, digest_size=4).hexdigest()}"


# Whether all ranks are there, once each, and run the same thing: found out before they compute.

logger = logging.getLogger(__name__)

AGREEMENT = "EZPZ_AGREEMENT"
"""Set to ``warn``, it turns a difference in versions or in the script into a warning."""

FIRST_WORD = 10.0
"""Seconds after which rank 0 says who has not arrived; then each time twice as long."""

_LOOK = 1.0
"""Seconds between two looks at those who are there: a difference is told within two."""

_GRACE = 2.0
"""Seconds that the others give rank 0 beyond the time-out to tell them who is missing."""

_HEARD = 1.0
"""Seconds that rank 0, whose process may hold the store, gives the others to read what is wrong."""

_TROUBLE = "trouble"
"""The key under which a rank says why this set-up cannot come about."""

_SOFT = ("python", "script", "packages")
"""What may differ when `AGREEMENT` says so; other differences cannot work."""

_SHOWN = 16


@dataclass(frozen=True, slots=True)
class Roster:
    """Who takes part.

    Attributes:
        hosts: By rank, the name of its host.
        holder: Process and PID namespace of rank 0.
    """

    hosts: tuple[str, ...]
    holder: tuple[int, int]


def agree(
    store: Store,
    info: RankInfo,
    timeout: float,
    common: Mapping[str, Any],
    process: tuple[str, int, int],
) -> Roster:
    """Compare what the ranks say of themselves. Collective: every rank calls this.

    Rank 0 reads what each has put into the store, and tells all the same: who takes part,
    or what is wrong.

    Args:
        store: One that is met by this set-up's ranks only.
        info: This rank's place.
        timeout: Seconds for all to arrive.
        common: What must be equal on all ranks, JSON-able.
        process: This rank's host, process and PID namespace.

    Raises:
        SetupError: A rank is missing, there twice, or differs; on every rank.
    """
    host, rank = process[0], info.rank
    facts = json.dumps([*process, {"world_size": info.world_size, **common}])

    def ask() -> dict[str, Any]:
        _arrive(store, info, process, facts)
        store.wait(["verdict"], timedelta(seconds=timeout + _GRACE))
        found: dict[str, Any] = json.loads(zlib.decompress(store.get("verdict")))
        if found["trouble"]:
            store.add("heard", 1)
        return found

    try:
        if rank == 0:
            _arrive(store, info, process, facts)
            verdict = _judge(store, info, timeout, process)
        else:
            # In a thread: torch's wait serves no Ctrl-C, nor ends where rank 0 is stopped.
            verdict = within(timeout + 2 * _GRACE, ask)
    except LOST as error:
        raise SetupError(
            f"rank {rank} of {info.world_size} on {host} heard nothing from rank 0, which holds "
            f"the store ({str(error).partition(chr(10))[0]}); expected it to come to setup_torch "
            f"within {timeout:g} s; check that it has not failed earlier"
        ) from error
    if verdict["trouble"]:
        raise SetupError(f"rank {rank} of {info.world_size} on {host}: {verdict['trouble']}")
    hosts = unfold_hosts(verdict["hosts"])
    if verdict["world_size"] != info.world_size:
        raise SetupError(
            f"rank {rank} on {host} was started in a world of {info.world_size}, rank 0 on "
            f"{hosts[0]} in one of {verdict['world_size']}; expected one world; "
            "start all ranks by one launcher, or give each job a MASTER_PORT of its own"
        )
    return Roster(hosts, (verdict["holder"][0], verdict["holder"][1]))


def refuse(store: Store, info: RankInfo, process: tuple[str, int, int], why: str) -> None:
    """Tell those who come to `agree` that this rank cannot take part. Not collective.

    Args:
        store: As for `agree`.
        info: This rank's place.
        process: This rank's host, process and PID namespace.
        why: What happened.
    """
    store.compare_set(_TROUBLE, "", f"rank {info.rank} on {process[0]} cannot take part: {why}")
    if info.rank == 0:
        _judge(store, info, _LOOK, process)


def _arrive(store: Store, info: RankInfo, process: tuple[str, int, int], facts: str) -> None:
    if store.add(f"there/{info.rank}", 1) > 1:
        twice = _twice(store, info, process)
        store.compare_set(_TROUBLE, "", twice)
        raise SetupError(twice)
    store.set(f"facts/{info.rank}", facts)


def _pack(verdict: Mapping[str, Any]) -> Any:  # bytes, which the stub of Store.set lacks
    # It goes from one server to every rank: what is alike in it is to be sent once.
    return zlib.compress(json.dumps(verdict, separators=(",", ":")).encode(), 9)


def _judge(
    store: Store, info: RankInfo, timeout: float, process: tuple[str, int, int]
) -> dict[str, Any]:
    """Tell all who takes part, or what is wrong. For rank 0; returns the same."""
    said: dict[int, list[Any]] = {}
    start = time.monotonic()
    next_word = FIRST_WORD
    trouble = ""
    while not trouble and len(said) < info.world_size:
        left = start + timeout - time.monotonic()
        keys = {f"facts/{rank}": rank for rank in range(info.world_size) if rank not in said}
        there = arrived(store, list(keys), min(_LOOK, max(left, 0.0)))
        texts = map(json.loads, values(store, there))
        fresh = dict(zip((keys[key] for key in there), texts, strict=True))
        said |= fresh
        if len(said) < info.world_size and store.check([_TROUBLE]):
            trouble = store.get(_TROUBLE).decode()
        elif 0 in said:
            trouble = _difference(said[0], fresh)
        waited = time.monotonic() - start
        if trouble or len(said) == info.world_size:
            break
        if waited >= timeout:
            trouble = _missing(said, info.world_size, waited)
        elif waited >= next_word:
            logger.warning("%s", _missing(said, info.world_size, waited))
            next_word *= 2
    everybody = () if trouble else [said[rank][0] for rank in range(info.world_size)]
    verdict = {
        "trouble": trouble,
        "world_size": info.world_size,
        "hosts": fold_hosts(everybody),
        "holder": process[1:],
    }
    store.set("verdict", _pack(verdict))
    if trouble:
        until = time.monotonic() + _HEARD
        while store.add("heard", 0) < len(said.keys() - {0}) and time.monotonic() < until:
            time.sleep(0.01)
    return verdict


def _missing(said: Mapping[int, list[Any]], world_size: int, waited: float) -> str:
    missing = [rank for rank in range(world_size) if rank not in said]
    hosts: dict[str, list[int]] = {}
    for rank in sorted(said):
        hosts.setdefault(said[rank][0], []).append(rank)
    there = ", ".join(f"{fold(ranks)} on {host}" for host, ranks in list(hosts.items())[:_SHOWN])
    more = f" and {len(hosts) - _SHOWN} hosts more" if len(hosts) > _SHOWN else ""
    plural = "s" if len(missing) > 1 else ""
    return (
        f"rank{plural} {fold(missing)} of {world_size} did not come to setup_torch in "
        f"{waited:.0f} s (there: {there}{more}); expected every rank to call it; look whether one "
        "failed earlier or takes another branch"
    )


def _difference(mine: list[Any], others: Mapping[int, list[Any]]) -> str:
    """Return in what ranks differ from rank 0, or nothing; a warning where that is asked for."""
    refused: dict[str, list[int]] = {}
    allowed: dict[str, list[int]] = {}
    soft = os.environ.get(AGREEMENT) == "warn"
    for rank, (host, _, _, facts) in others.items():
        if facts == mine[3]:
            continue
        for name in sorted({*mine[3], *facts}):
            found = allowed if soft and name in _SOFT else refused
            for key, one, other in _parts(name, mine[3].get(name), facts.get(name)):
                found.setdefault(f"{key} {other} on {host}, rank 0 {one}", []).append(rank)
    if allowed:
        logger.warning("the ranks differ: %s", _told(allowed, mine[0]))
    if not refused:
        return ""
    return (
        f"the ranks differ: {_told(refused, mine[0])}; expected the same on all; install the same "
        "versions and start the same script with the same arguments everywhere "
        f"({AGREEMENT}=warn lets versions and scripts differ)"
    )


def _told(found: Mapping[str, list[int]], host: str) -> str:
    told = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {fold(ranks)}: {text} on {host}"
        for text, ranks in list(found.items())[:_SHOWN]
    )
    return told + (f"; and {len(found) - _SHOWN} differences more" if len(found) > _SHOWN else "")


def _parts(name: str, here: object, there: object) -> list[tuple[str, object, object]]:
    if isinstance(here, dict) and isinstance(there, dict):
        # Rank 0 alone may have imported what it reports with.
        both = [key for key in here if key in there]
        return [(key, here[key], there[key]) for key in both if here[key] != there[key]]
    if here == there:
        return []
    return [(name.replace("_", " "), here, there)]


def _twice(store: Store, info: RankInfo, process: tuple[str, int, int]) -> str:
    host, pid, _ = process
    try:
        store.wait([f"facts/{info.rank}"], timedelta(seconds=1))
        other, its_pid, *_ = json.loads(store.get(f"facts/{info.rank}"))
        first = f"process {its_pid} on {other}"
    except LOST:
        first = "another process"
    return (
        f"rank {info.rank} of {info.world_size} is there twice: {first}, and process {pid} on "
        f"{host}; expected every rank once; two jobs share a MASTER_ADDR and MASTER_PORT, or the "
        "ranks were numbered by hand: start them by one launcher"
    )
