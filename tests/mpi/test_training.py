"""Data-parallel training on the ranks there are follows the curve of one rank."""

import copy

import pytest
import torch
from torch import nn

import ezpz

ROWS = 12  # divides by 1, 2, 3 and 4 ranks


def losses(model, x):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for _ in range(10):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


@pytest.mark.parametrize("use_fsdp", [False, True])
def test_the_curve_of_one_rank(world, use_fsdp):
    rank, size = world
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x = torch.randn(ROWS, 5, dtype=torch.float64)
    alone = losses(copy.deepcopy(model), x)
    mine = losses(ezpz.wrap_model(model, use_fsdp=use_fsdp), x[rank::size])
    together = [ezpz.all_reduce(loss, "mean") for loss in mine]
    assert together == pytest.approx(alone, rel=1e-12)
