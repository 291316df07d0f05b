import random

import pytest
import torch

from ezpz_dist import seed_everything, seed_for_rank
from ezpz_dist._seed import MAX_RANKS, MAX_SEED, STREAMS

try:
    import numpy as np
except ImportError:  # torch does without it, and so do we
    np = None


def draws():
    mine = [random.random(), torch.rand(1).item()]
    return mine if np is None else [*mine, float(np.random.rand())]


def test_a_seed_repeats_itself():
    seed_everything(7, rank=3)
    first = draws()
    seed_everything(7, rank=3)
    assert draws() == first


def test_ranks_draw_differently():
    seen = set()
    for rank in range(8):
        seed_everything(7, rank=rank)
        seen.update(draws())
    assert len(seen) == 8 * len(draws())


def test_no_two_seeds_collide():
    # the predecessor's seed * (rank + 1) * (local_rank + 1) gives ranks 2 and 8 the same
    seeds = [
        seed_for_rank(seed, rank, stream)
        for seed in (0, 1, 42)
        for rank in (*range(4096), MAX_RANKS - 1)
        for stream in STREAMS
    ]
    assert len(set(seeds)) == len(seeds)


def test_the_largest_seed_fits_torch():
    torch.manual_seed(seed_for_rank(MAX_SEED - 1, MAX_RANKS - 1, STREAMS[-1]))


@pytest.mark.parametrize(("seed", "rank"), [(-1, 0), (MAX_SEED, 0), (0, -1), (0, MAX_RANKS)])
def test_out_of_range(seed, rank):
    with pytest.raises(ValueError, match="expected 0 to"):
        seed_for_rank(seed, rank)
