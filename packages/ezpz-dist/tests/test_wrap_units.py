"""Which modules become units of FSDP."""

from torch import nn

from ezpz_dist._fsdp2 import find_units


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 1)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


def names(model, kinds=None):
    return sorted(find_units(model, kinds))


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = layers
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)


def test_blocks_of_a_list_and_the_embedding_and_the_head():
    blocks = [Block() for _ in range(2)]
    for layers in (nn.ModuleList(blocks), nn.Sequential(*blocks)):
        assert names(Model(layers)) == ["embed", "head", "layers.0", "layers.1"]
    layers = nn.ModuleDict({"a": blocks[0], "b": blocks[1]})
    assert names(Model(layers)) == ["embed", "head", "layers.a", "layers.b"]


def test_tied_weights_are_left_to_the_root():
    model = Model(nn.ModuleList([Block()]))
    model.head.weight = model.embed.weight
    assert names(model) == ["layers.0"]


def test_lists_in_lists():
    stages = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))
    assert names(stages) == ["0.0", "0.1", "1.0", "1.1"]
    mixed = nn.ModuleDict(
        {"a": nn.ModuleList([Block()]), "b": nn.Sequential(nn.Sequential(Block()))}
    )
    assert names(Model(mixed)) == ["embed", "head", "layers.a.0", "layers.b.0.0"]
    flat = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
    assert names(Model(flat)) == ["embed", "head", "layers.0", "layers.1"]


def test_lists_that_are_the_model():
    assert names(nn.Sequential(nn.Embedding(3, 4), Block(), nn.LayerNorm(4), nn.Linear(4, 3))) == [
        "0", "1", "3",
    ]  # fmt: skip
    assert names(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))) == ["0", "2"]
    assert names(nn.Linear(4, 4)) == []


def test_what_others_read_the_weights_of_is_left_to_the_root():
    class Pooling(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 1)
            self.head = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))

    assert names(Pooling()) == ["head.1"], "MultiheadAttention reads out_proj.weight itself"


def test_classes_take_the_place_of_what_is_found():
    model = Model(nn.ModuleList(Block() for _ in range(2)))
    assert names(model, [Block]) == ["layers.0", "layers.1"]
    both = list(find_units(model, [Block, nn.MultiheadAttention]))
    assert both.index("layers.0.attention") < both.index("layers.0")
    assert names(model, [nn.Conv2d]) == []
