"""Seeds that differ on every rank and never collide."""

from __future__ import annotations

import random
import sys

import torch

from ezpz_topo import get_rank

MAX_RANKS = 1 << 20
"""Ranks that can have seeds of their own; the largest machines have about 120,000."""


def seed_for_rank(seed: int, rank: int) -> int:
    """Return the seed of one rank: distinct for every (seed, rank) with rank < `MAX_RANKS`.

    Args:
        seed: The run's seed, 0 <= seed < 2**43, so that the result fits torch's 64 bits.
        rank: The rank.

    Raises:
        ValueError: Either is out of range.
    """
    if not 0 <= rank < MAX_RANKS:
        raise ValueError(f"rank {rank}; expected 0 to {MAX_RANKS - 1}")
    if not 0 <= seed < 1 << 43:
        raise ValueError(f"seed {seed}; expected 0 to 2**43 - 1")
    return seed * MAX_RANKS + rank


def seed_everything(seed: int, *, rank: int | None = None) -> int:
    """Seed Python's, numpy's and torch's generators; return the seed of this rank.

    Args:
        seed: The run's seed; every rank gets a different one from it.
        rank: The rank to seed for; default: this process's. Give the same number on
            ranks that must draw the same.

    Raises:
        ValueError: The seed is out of range (see `seed_for_rank`).
    """
    value = seed_for_rank(seed, get_rank() if rank is None else rank)
    random.seed(value)
    torch.manual_seed(value)
    # A script that never imports numpy should not pay for it here.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed([value & 0xFFFFFFFF, value >> 32])
    return value
