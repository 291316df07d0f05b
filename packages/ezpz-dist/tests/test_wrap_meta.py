"""A model built on the meta device gets the values that one process would have drawn."""

MODELS = """
import copy
from torch import nn
from torch.distributed.tensor import DTensor

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.mlp = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8))
        self.norm = nn.BatchNorm1d(8)  # has buffers
    def forward(self, x):
        x = x + self.attention(x, x, x)[0]
        x = x + self.mlp(x)
        return x + self.norm(x.flatten(0, 1)).view_as(x)

class Net(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(7, 8, padding_idx=1)
        self.blocks = nn.ModuleDict({"a": Block(), "b": Block()})
        self.memory = nn.LSTM(8, 8)
        self.head = nn.Linear(8, 7)
        if tied:
            self.head.weight = self.embed.weight
    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.memory(x)[0])

def on_meta(build, *args):
    with torch.device("meta"):
        return build(*args)

def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

def equal(model, direct):
    found, wanted = model.state_dict(), direct.state_dict()
    assert list(found) == list(wanted)
    for name, tensor in found.items():
        assert torch.equal(whole(tensor), wanted[name]), name

def refused(words, wrap, *args, **kwargs):
    raises(WrapError, words, wrap, *args, **kwargs)

setup_torch(timeout=60)
rank, size = dist.get_rank(), dist.get_world_size()
def first_ranks_seed():
    torch.manual_seed(100 + rank)  # every rank another one, as setup_torch(seed=...) does
def direct(*args):
    torch.manual_seed(100)
    return Net(*args)
"""


def test_shards_are_parts_of_what_one_process_draws(ranks):
    script = """
tokens = torch.arange(12).view(3, 4) % 7
wraps = {
    "FSDP2": wrap_model_for_fsdp2,
    "hybrid": lambda m: wrap_model_for_fsdp2(m, shard_size=2, reshard_after_forward=False),
    "bf16": lambda m: wrap_model_for_fsdp2(m, dtype="bf16", reshard_after_forward=2),
    "wrap_model": lambda m: wrap_model(m, use_fsdp=True),
}
for name, tied in [(name, name == "hybrid") for name in wraps] + [("FSDP2", True)]:
    first_ranks_seed()
    model = wraps[name](on_meta(Net, tied))
    alone = direct(tied)
    equal(model, alone)
    assert (model.head.weight is model.embed.weight) == tied
    if (name, tied) == ("FSDP2", True):
        optimizer = torch.optim.AdamW(model.parameters())
        out = model(tokens)
        assert torch.allclose(out, alone(tokens), atol=1e-6)
        out.square().mean().backward()
        optimizer.step()
        assert not torch.equal(whole(model.embed.weight), alone.embed.weight)
# No rank ever holds more than one unit whole.
class Watched(nn.Linear):
    def reset_parameters(self):
        super().reset_parameters()
        if not self.weight.is_meta:
            whole = [p for p in tall.parameters() if not p.is_meta and not isinstance(p, DTensor)]
            held.append(sum(p.numel() for p in whole))
held = []
tall = on_meta(lambda: nn.Sequential(*(nn.Sequential(Watched(16, 16)) for _ in range(4))))
wrap_model_for_fsdp2(tall)
assert held == [16 * 17] * 4
ignored = on_meta(Net)
wrap_model_for_fsdp2(ignored, ignored_params={ignored.embed.weight})
assert type(ignored.embed.weight) is nn.Parameter
assert isinstance(ignored.head.weight, DTensor)
cleanup()
"""
    ranks(4, MODELS + script)


BODY = """
first_ranks_seed()
model = wrap_model(on_meta(Net))
assert isinstance(model, nn.parallel.DistributedDataParallel) == (size > 1)
equal(getattr(model, "module", model), direct())
first_ranks_seed()
equal(wrap_model_for_ddp(on_meta(Net, True), broadcast_buffers=False).module, direct(True))
first_ranks_seed()
frozen = wrap_model(on_meta(nn.Linear, 3, 4).requires_grad_(False))
torch.manual_seed(100)
equal(frozen, nn.Linear(3, 4))
# A part with data keeps it, those of the first rank.
class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.loaded = nn.Linear(3, 3)
        with torch.device("meta"):
            self.fresh = nn.Linear(3, 3)
    def forward(self, x):
        return self.fresh(self.loaded(x))
for wrap in (wrap_model_for_fsdp2, wrap_model_for_ddp):
    torch.manual_seed(rank)
    half = Half()
    torch.manual_seed(0)
    loaded = nn.Linear(3, 3)
    torch.manual_seed(0)
    wrapped = wrap(half)
    equal(half.loaded, loaded)
    equal(half.fresh, loaded)
# What cannot be filled is an error that names it.
class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.arange(4.0))
        self.gain = nn.Parameter(torch.ones(4))
def lacking():
    return nn.Sequential(nn.Linear(4, 4), Rotary())
for wrap in (wrap_model, wrap_model_for_ddp, wrap_model_for_fsdp2):
    refused("no way to fill 1 (Rotary: gain, frequencies)", wrap, on_meta(lacking))
# What an initialization leaves out is seen in the first loss.
class Forgets(Rotary):
    def reset_parameters(self):
        nn.init.ones_(self.gain)
forgetful = wrap_model_for_fsdp2(on_meta(lambda: nn.Sequential(Forgets())))
assert forgetful[0].frequencies.isnan().all()
# A module that draws into a child, which is sharded by then.
class Redraws(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.empty(4))
    def reset_parameters(self):
        nn.init.ones_(self.scale)
        nn.init.normal_(self.inner.weight, std=0.02)
wrap_model(on_meta(Redraws))
refused("the initialization of Redraws writes to inner.weight, which is sharded by then",
        wrap_model_for_fsdp2, on_meta(Redraws))
refused("use wrap_model_for_fsdp2", wrap_model_for_fsdp, on_meta(Net))

def fill(module):
    if isinstance(module, Rotary):
        module.frequencies.copy_(torch.arange(4.0))
        module.gain.fill_(2.0)
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(std=0.02)
first_ranks_seed()
filled = wrap_model_for_fsdp2(on_meta(lacking), initialize=fill)
assert torch.equal(filled[1].frequencies, torch.arange(4.0))
assert torch.equal(whole(filled[1].gain.detach()), torch.full((4,), 2.0))
assert whole(filled[0].weight.detach()).abs().max() < 0.2
assert filled[0].weight.requires_grad and filled[0].bias.requires_grad
# Buffers that are assigned, not filled.
class Assigns(Rotary):
    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.arange(4))
    def reset_parameters(self):
        nn.init.ones_(self.gain)
        self.frequencies = torch.arange(4.0)
        self.positions = torch.arange(4)
for wrap in (wrap_model, wrap_model_for_ddp, wrap_model_for_fsdp2):
    assigned = wrap(on_meta(Assigns))
    buffers = dict(getattr(assigned, "module", assigned).named_buffers())
    assert {name: one.tolist() for name, one in buffers.items()} == {
        "frequencies": [0, 1, 2, 3], "positions": [0, 1, 2, 3]}
cleanup()
"""


def test_whole_copies_and_what_cannot_be_filled(ranks):
    for n in (1, 2):
        ranks(n, MODELS + BODY)
