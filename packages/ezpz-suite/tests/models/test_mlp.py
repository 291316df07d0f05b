"""The perceptron: what its widths make of it."""

import pytest
import torch

from ezpz.models import MLP, ModelError


def test_layers():
    model = MLP((64, 32, 16, 10))
    assert model(torch.zeros(5, 1, 8, 8)).shape == (5, 10)
    assert sum(one.numel() for one in model.parameters()) == 64 * 32 + 32 + 32 * 16 + 16 + 170
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    by_hand = x
    for number, layer in enumerate(model.layers):
        by_hand = layer(by_hand)
        by_hand = by_hand.relu() if number < 2 else by_hand
    torch.testing.assert_close(model(x), by_hand)
    assert model(x).min() < 0, "no ReLU behind the last"


@pytest.mark.parametrize("widths", [(), (3,), (3, 0)])
def test_widths_that_make_no_layer_are_refused(widths):
    with pytest.raises(ModelError, match="at least two widths"):
        MLP(widths)
