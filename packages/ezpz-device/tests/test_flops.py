"""Operations counted on shapes alone: wherever the shapes are."""

import pytest
import torch
from torch import nn

from ezpz_device import count_flops

ROWS = 8
FORWARD = 2 * ROWS * 64 * 32
BOTH = 2 * FORWARD  # an input needs no gradient


class Scaled(nn.Module):
    """Makes tensors of its own, and has a buffer and a tensor that is none."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 32)
        self.register_buffer("scale", torch.ones(64))
        self.shift = torch.zeros(64)

    def forward(self, inputs, options=None):
        x = inputs["x"]
        if options is not None:
            x = x + options[0]
        ramp = torch.arange(64) + torch.zeros(64, device=x.device)
        return {"y": self.linear(x * self.scale + self.shift + ramp)}


def build(device):
    with torch.device(device):
        return Scaled()


def build_without_weights():
    model = Scaled()
    model.linear.to("meta")
    return model


def build_without_buffer():
    model = Scaled()
    model.scale = model.scale.to("meta")
    return model


@pytest.mark.parametrize(
    ("build_model", "where"),
    [
        (lambda: build("cpu"), "cpu"),
        (lambda: build("cpu"), "meta"),
        (lambda: build("meta"), "cpu"),
        (build_without_weights, "cpu"),
        (build_without_buffer, "cpu"),
    ],
)
def test_it_does_not_matter_where_model_and_inputs_are(build_model, where):
    model = build_model()
    devices = [one.device for one in (*model.parameters(), *model.buffers())]
    x = torch.empty(ROWS, 64, device=where)
    options = (torch.zeros(64, device="cpu"), "of no matter")
    assert count_flops(model, {"x": x}, backward=False) == FORWARD
    assert count_flops(model, {"x": x}, options=options) == BOTH
    assert count_flops(model, inputs={"x": x.to("meta")}, options=options) == BOTH
    assert [one.device for one in (*model.parameters(), *model.buffers())] == devices
    assert not any(one.grad is not None for one in model.parameters())


def test_a_model_without_tensors_and_a_frozen_one():
    x = torch.empty(ROWS, 64)
    assert count_flops(nn.Identity(), x) == 0
    assert count_flops(build("meta").requires_grad_(False), {"x": x}) == FORWARD
    learned = torch.empty(ROWS, 64, requires_grad=True)
    assert count_flops(build("meta"), {"x": learned}) == 3 * FORWARD


@pytest.mark.parametrize("model", ["cpu", "meta"])
def test_tied_weights_count_as_on_one_device(model):
    with torch.device(model):
        tied = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16, bias=False))
    tied[1].weight = tied[0].weight
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    assert count_flops(tied, tokens) == 3 * 2 * 2 * 3 * 8 * 16
