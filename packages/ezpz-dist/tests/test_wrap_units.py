"""Which modules become units of FSDP."""

import pytest
from torch import nn

from ezpz_dist._wrap import find_units


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 1)  # reads the weights of its out_proj itself
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


class Model(nn.Module):
    def __init__(self, layers, tied=False):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = layers
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight


MODEL = Model(nn.ModuleList([Block(), Block()]))
NESTED = {"a": nn.ModuleList([Block()]), "b": nn.Sequential(nn.Sequential(Block()))}
FLAT = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))


@pytest.mark.parametrize(
    ("model", "kinds", "names"),
    [
        (MODEL, None, "embed head layers.0 layers.1"),
        (Model(nn.Sequential(Block(), Block())), None, "embed head layers.0 layers.1"),
        (Model(nn.ModuleDict({"a": Block(), "b": Block()})), None, "embed head layers.a layers.b"),
        (Model(nn.ModuleList([Block()]), tied=True), None, "layers.0"),
        (nn.ModuleList(nn.Sequential(Block(), Block()) for _ in "ab"), None, "0.0 0.1 1.0 1.1"),
        (Model(nn.ModuleDict(NESTED)), None, "embed head layers.a.0 layers.b.0.0"),
        (Model(FLAT), None, "embed head layers.0 layers.1"),
        (nn.Sequential(nn.Embedding(3, 4), Block(), nn.LayerNorm(4), nn.Linear(4, 3)), None,
         "0 1 3"),
        (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), None, "0 2"),
        (nn.Linear(4, 4), None, ""),
        (Block(), None, "mlp.0 mlp.2"),
        (MODEL, [Block], "layers.0 layers.1"),
        (MODEL, [nn.Conv2d], ""),
    ],
)  # fmt: skip
def test_units(model, kinds, names):
    assert sorted(find_units(model, kinds)) == names.split()


def test_a_unit_comes_before_those_that_contain_it():
    both = list(find_units(MODEL, [Block, nn.MultiheadAttention]))
    assert both.index("layers.0.attention") < both.index("layers.0")
