"""Data-parallel training on the ranks there are follows the curve of one rank."""

import copy

import pytest
import torch
from torch import nn

import ezpz
from ezpz_dist._fsdp2 import wrap_model_for_fsdp, wrap_model_for_fsdp2
from ezpz_dist._wrap import wrap_model_for_ddp, wrap_optimizer_for_zero1

ROWS = 12  # divides by 1, 2, 3 and 4 ranks


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def zero1(parameters):
    return wrap_optimizer_for_zero1(torch.optim.AdamW, parameters, lr=1e-2)


def losses(model, optimizer, x):
    seen = []
    for _ in range(30):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


@pytest.mark.parametrize(
    ("wrap", "optimizer_of"),
    [
        (ezpz.wrap_model, adamw),
        (lambda model: ezpz.wrap_model(model, use_fsdp=True), adamw),
        (wrap_model_for_ddp, zero1),
        (wrap_model_for_fsdp, adamw),
        (wrap_model_for_fsdp2, adamw),
    ],
    ids=["wrap_model", "use_fsdp", "ddp-zero1", "fsdp", "fsdp2"],
)
def test_the_curve_of_one_rank(world, wrap, optimizer_of):
    rank, size = world
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x = torch.randn(ROWS, 5, dtype=torch.float64)
    bare = copy.deepcopy(model)
    alone = losses(bare, adamw(bare.parameters()), x)
    wrapped = wrap(model)
    mine = losses(wrapped, optimizer_of(wrapped.parameters()), x[rank::size])
    together = [ezpz.all_reduce(loss, "mean") for loss in mine]
    assert together == pytest.approx(alone, rel=1e-12)
