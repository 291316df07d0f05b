"""Ranks as people write them."""

from __future__ import annotations

from collections.abc import Iterable


def fold(ranks: Iterable[int]) -> str:
    """Return ranks as people write them: ``"0, 2-5"``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
