"""Seeds that differ on every rank and never collide."""

from __future__ import annotations

import random
import sys

import torch

from ezpz_topo import get_rank

MAX_RANKS = 1 << 20
"""Ranks that can have seeds of their own; the largest machines have about 120,000."""

MAX_SEED = 1 << 41
"""Seeds are below this, so that what is made of them fits torch's 64 bits."""

STREAMS = ("default", "model-parallel", "expert-parallel")
"""Streams of random numbers that a rank can have: their seeds do not meet either."""


def seed_for_rank(seed: int, rank: int, stream: str = "default") -> int:
    """Return the seed of one rank: distinct for every (seed, rank, stream), rank < `MAX_RANKS`.

    Args:
        seed: The run's seed, 0 <= seed < `MAX_SEED`.
        rank: The rank.
        stream: One of `STREAMS`.

    Raises:
        ValueError: One of them is out of range.
    """
    if not 0 <= rank < MAX_RANKS:
        raise ValueError(f"rank {rank}; expected 0 to {MAX_RANKS - 1}")
    if not 0 <= seed < MAX_SEED:
        raise ValueError(f"seed {seed}; expected 0 to 2**41 - 1")
    if stream not in STREAMS:
        raise ValueError(f"stream {stream!r}; expected one of {', '.join(STREAMS)}")
    return (seed * 4 + STREAMS.index(stream)) * MAX_RANKS + rank


def seed_everything(seed: int, *, rank: int | None = None) -> int:
    """Seed Python's, numpy's and torch's generators; return the seed of this rank.

    Ranks of one tensor-parallel group share a seed, since they compute the same outside of
    sharded layers (dropout there must drop the same); each still has a stream of its own for
    what is sharded (``ezpz_tp.get_rng_tracker``). All others differ from each other.

    Args:
        seed: The run's seed; every rank gets a different one from it.
        rank: The rank to seed for; default: this process's, or the first of its
            tensor-parallel group. Give the same number on ranks that must draw the same.

    Raises:
        ValueError: The seed is out of range (see `seed_for_rank`).
    """
    own = get_rank()
    if rank is None:
        rank = _first_of_tensor_group(own)
    value = seed_for_rank(seed, rank)
    random.seed(value)
    torch.manual_seed(value)
    # A script that never imports numpy should not pay for it here.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed([value & 0xFFFFFFFF, value >> 32])
    if rank != own or _has_parallel_groups():
        _seed_streams(seed, value, own)
    return value


def _has_parallel_groups() -> bool:
    # What set no groups up has not imported it either.
    tensor_parallel = sys.modules.get("ezpz_tp")
    return tensor_parallel is not None and tensor_parallel.tensor_parallel_is_initialized()


def _first_of_tensor_group(own: int) -> int:
    if not _has_parallel_groups():
        return own
    import ezpz_tp  # noqa: PLC0415  # only where its groups are used

    return min(ezpz_tp.get_state().ranks("tensor"))


def _seed_streams(seed: int, shared: int, own: int) -> None:
    """Give the named streams seeds that no rank's default stream has."""
    import ezpz_tp  # noqa: PLC0415  # only where its groups are used

    tracker = ezpz_tp.get_rng_tracker()
    tracker.reset()
    tracker.add("data-parallel-rng", shared)
    tracker.add("model-parallel-rng", seed_for_rank(seed, own, "model-parallel"))
    tracker.add("expert-parallel-rng", seed_for_rank(seed, own, "expert-parallel"))
