"""Wrapped on n ranks, a model takes the same steps as on one with the whole batch."""

import pytest

MODEL = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(4, 8)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(2))
        self.head = torch.nn.Linear(8, 1)
    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

def losses(model, rows):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)
    seen = []
    for _ in range(5):
        loss = model(x[rows]).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        seen.append(loss.item())
    return seen

torch.manual_seed(0)
model = Net().double()
"""


@pytest.mark.parametrize("n", [1, 3])
def test_the_loss_curve_is_that_of_one_rank(ranks, n):
    ranks(
        n,
        MODEL
        + f"""
import copy
alone = losses(copy.deepcopy(model), slice(None))
rank = setup_torch(timeout=60)
share = 6 // {n}
for use_fsdp in (False, True):
    bare = copy.deepcopy(model)
    wrapped = wrap_model(bare, use_fsdp=use_fsdp)
    assert (wrapped is bare) == ({n} == 1 or use_fsdp)
    mine = losses(wrapped, slice(rank * share, (rank + 1) * share))
    for one, other in zip(alone, mine):
        assert abs(all_reduce(other, "mean") - one) < 1e-12, (alone, mine)
cleanup()
""",
    )


@pytest.mark.parametrize("use_fsdp", [False, True])
def test_every_rank_starts_from_rank_0s_values(ranks, use_fsdp):
    ranks(
        2,
        MODEL
        + f"""
rank = setup_torch(seed=1, timeout=60)
fresh = Net().double()
fresh.register_buffer("noise", torch.rand(3))
start = broadcast({{k: v.clone() for k, v in fresh.state_dict().items()}})
wrapped = wrap_model(fresh, use_fsdp={use_fsdp})
for name, tensor in wrapped.state_dict().items():
    whole = tensor.full_tensor() if {use_fsdp} and hasattr(tensor, "full_tensor") else tensor
    assert torch.equal(whole, start[name.removeprefix("module.")]), name
cleanup()
""",
    )


def test_fsdp_takes_lists_of_lists_shared_blocks_and_tied_weights(ranks):
    ranks(
        2,
        """
from torch import nn
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2))
        same = nn.Linear(4, 4)
        self.twice = nn.ModuleList([same, nn.Tanh(), same])
        self.tied = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.tied[1].weight = self.tied[0].weight
    def forward(self, x):
        for stage in self.stages:
            for layer in stage:
                x = layer(x)
        for layer in (*self.twice, *self.tied):
            x = layer(x)
        return x
import copy
from torch.distributed.fsdp import FSDPModule
setup_torch(timeout=60)
torch.manual_seed(0)
model = Odd().double()
alone = copy.deepcopy(model)
x = torch.ones(2, 4, dtype=torch.float64)
wrapped = wrap_model(model, use_fsdp=True)
assert all(isinstance(layer, FSDPModule) for stage in wrapped.stages for layer in stage)
assert not any(isinstance(layer, FSDPModule) for layer in (*wrapped.twice, *wrapped.tied))
assert torch.allclose(wrapped(x), alone(x), rtol=1e-12)
wrapped(x).sum().backward()
alone(x).sum().backward()
for (name, one), other in zip(wrapped.named_parameters(), alone.parameters()):
    assert torch.allclose(one.grad.full_tensor(), other.grad, rtol=1e-12), name
cleanup()
""",
    )


@pytest.mark.parametrize("n", [1, 2])
def test_a_model_with_nothing_to_train(ranks, n):
    ranks(
        n,
        """
rank = setup_torch(seed=1, timeout=60)
for use_fsdp in (False, True):
    frozen = torch.nn.Linear(3, 3).requires_grad_(False)
    assert wrap_model(frozen, use_fsdp=use_fsdp) is frozen
    out = frozen(torch.ones(1, 3))
    assert torch.equal(broadcast(out), out), "rank 0's on every rank"
    assert type(wrap_model(torch.nn.ReLU(), use_fsdp=use_fsdp)) is torch.nn.ReLU
cleanup()
""",
    )


def test_fsdp_keeps_a_share_on_each_rank(ranks):
    ranks(
        2,
        MODEL
        + """
from torch.distributed.fsdp import FSDPModule
setup_torch(timeout=60)
whole = sum(p.numel() for p in model.parameters())
wrap_model(model, use_fsdp=True)
share = sum(p.to_local().numel() for p in model.parameters())
assert share < 0.6 * whole
assert all(isinstance(block, FSDPModule) for block in model.blocks)
cleanup()
""",
    )


def test_fsdp_computes_in_the_type_asked_for(ranks):
    ranks(
        2,
        MODEL
        + """
setup_torch(timeout=60)
model = wrap_model(Net(), use_fsdp=True, dtype="bf16")
out = model(torch.ones(2, 4))
assert out.dtype == torch.bfloat16
out.sum().backward()
assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
cleanup()
""",
    )


@pytest.mark.parametrize("n", [1, 2])
def test_what_is_refused(ranks, n):
    ranks(
        n,
        MODEL
        + """
setup_torch(timeout=60)
def refused(kind, words, *args, **kwargs):
    try:
        wrap_model(*args, **kwargs)
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"{words}: accepted")
refused(WrapError, "without use_fsdp", Net(), dtype="bf16")
refused(ValueError, "dtype torch.int32", Net(), use_fsdp=True, dtype=torch.int32)
refused(ValueError, "dtype 'bf15'", Net(), use_fsdp=True, dtype="bf15")
if dist.get_world_size() > 1:
    refused(WrapError, "is wrapped already", wrap_model(Net()))
    refused(WrapError, "is wrapped already", wrap_model(Net()), use_fsdp=True)
    refused(WrapError, "is wrapped already", wrap_model(Net(), use_fsdp=True))
cleanup()
""",
    )
