"""Whether all ranks are there, once each, and run the same thing: found out before they compute."""

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

from ezpz_dist._errors import SetupError
from ezpz_dist._ranks import fold
from ezpz_dist._store import LOST, arrived
from ezpz_topo import RankInfo

logger = logging.getLogger(__name__)

AGREEMENT = "EZPZ_AGREEMENT"
"""Set to ``warn``, it turns a difference in versions or in the script into a warning."""

FIRST_WORD = 10.0
"""Seconds after which rank 0 says who has not arrived; then each time twice as long."""

_LOOK = 1.0
"""Seconds between two looks at those who are there: a difference is told within two."""

_GRACE = 2.0
"""Seconds that the others give rank 0 beyond the time-out to tell them who is missing."""

_LIBRARIES = (
    "ezpz", "ezpz_device", "ezpz_dist", "ezpz_obs", "ezpz_topo", "ezpz_tp",
    "accelerate", "deepspeed", "lightning", "mpi4py", "numpy", "transformers",
)  # fmt: skip
"""Libraries whose version is compared between those ranks that have imported them already."""

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
        # python -c, whose text is an argument; a notebook, in which there is no other rank
        text = "\0".join(sys.orig_argv[1:]).encode()
        name = "python -c"
    else:
        name = os.path.basename(str(path))
        try:
            with open(path, "rb") as file:
                text = file.read()
        except OSError:
            return name  # a zip archive, or removed since
    return f"{name} {hashlib.blake2b(text, digest_size=4).hexdigest()}"


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
    host, pid, namespace = process
    rank = info.rank
    facts = {"world_size": info.world_size, **common}
    try:
        if store.add(f"there/{rank}", 1) > 1:
            raise SetupError(_twice(store, info, process))
        store.set(f"facts/{rank}", json.dumps([host, pid, namespace, facts]))
        if rank == 0:
            verdict = _judge(store, info, timeout)
            store.set("verdict", _pack(verdict))
        else:
            store.wait(["verdict"], timedelta(seconds=timeout + _GRACE))
            verdict = json.loads(zlib.decompress(store.get("verdict")))
    except LOST as error:
        raise SetupError(
            f"rank {rank} of {info.world_size} on {host} heard nothing from rank 0, which holds "
            f"the store ({str(error).partition(chr(10))[0]}); expected it to come to setup_torch "
            f"within {timeout:g} s; check that it has not failed earlier"
        ) from error
    if verdict["world_size"] != info.world_size and not verdict["trouble"]:
        raise SetupError(
            f"rank {rank} on {host} was started in a world of {info.world_size}, rank 0 on "
            f"{verdict['hosts'][0]} in one of {verdict['world_size']}; expected one world; start "
            "all ranks by one launcher, or give each job a MASTER_PORT of its own"
        )
    if verdict["trouble"]:
        raise SetupError(f"rank {rank} of {info.world_size} on {host}: {verdict['trouble']}")
    return Roster(tuple(verdict["hosts"]), (verdict["holder"][0], verdict["holder"][1]))


def _pack(verdict: Mapping[str, Any]) -> Any:  # bytes, which the stub of Store.set lacks
    # The names of 10,000 hosts are alike: a fifteenth of 140 kB goes to each of their ranks.
    return zlib.compress(json.dumps(verdict).encode(), 1)


def _judge(store: Store, info: RankInfo, timeout: float) -> dict[str, Any]:
    """Return rank 0's verdict: who takes part, and what is wrong, if anything is."""
    said: dict[int, list[Any]] = {}
    start = time.monotonic()
    next_word = FIRST_WORD
    trouble = ""
    while not trouble and len(said) < info.world_size:
        waited = time.monotonic() - start
        if waited >= timeout:
            trouble = _missing(said, info.world_size, waited)
            break
        missing = [rank for rank in range(info.world_size) if rank not in said]
        keys = {f"facts/{rank}": rank for rank in missing}
        there = arrived(store, list(keys), min(_LOOK, timeout - waited))
        texts = store.multi_get(there) if there else []
        said.update(zip((keys[key] for key in there), map(json.loads, texts), strict=True))
        trouble = _difference(said)
        waited = time.monotonic() - start
        if not trouble and len(said) < info.world_size and waited >= next_word:
            logger.warning("%s", _missing(said, info.world_size, waited))
            next_word *= 2
    return {
        "trouble": trouble,
        "world_size": info.world_size,
        "hosts": [said[rank][0] if rank in said else "?" for rank in range(info.world_size)],
        "holder": said[0][1:3],
    }


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


def _difference(said: Mapping[int, list[Any]]) -> str:
    """Return in what ranks differ from rank 0, or nothing; a warning where that is asked for."""
    if 0 not in said:
        return ""
    mine = said[0][3]
    found: dict[str, list[int]] = {}
    soft = os.environ.get(AGREEMENT) == "warn"
    for rank, (host, _, _, facts) in said.items():
        if facts == mine:
            continue
        for name in sorted({*mine, *facts}):
            here, there = mine.get(name), facts.get(name)
            if here == there:
                continue
            for key, one, other in _parts(name, here, there):
                if soft and name in _SOFT:
                    logger.warning(
                        "rank %d on %s has %s %s, rank 0 %s", rank, host, key, other, one
                    )
                else:
                    found.setdefault(f"{key} {other} on {host}, rank 0 {one}", []).append(rank)
    if not found:
        return ""
    told = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {fold(ranks)}: {text} on {said[0][0]}"
        for text, ranks in list(found.items())[:_SHOWN]
    )
    more = f"; and {len(found) - _SHOWN} differences more" if len(found) > _SHOWN else ""
    return (
        f"the ranks differ: {told}{more}; expected the same on all; install the same versions and "
        f"start the same script with the same arguments everywhere ({AGREEMENT}=warn lets versions "
        "and scripts differ)"
    )


def _parts(name: str, here: object, there: object) -> list[tuple[str, object, object]]:
    if isinstance(here, dict) and isinstance(there, dict):
        # Rank 0 alone may have imported what it reports with.
        both = [key for key in here if key in there]
        return [(key, here[key], there[key]) for key in both if here[key] != there[key]]
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
