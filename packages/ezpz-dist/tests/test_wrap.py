"""Wrapped on n ranks, a model takes the same steps as on one with the whole batch."""

MODEL = """
import copy, logging
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 1)
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

def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

torch.manual_seed(0)
model = Net().double()
alone = losses(copy.deepcopy(model), slice(None))
rank = setup_torch(seed=1, timeout=60)
size = dist.get_world_size()

# Every step.
share = 6 // size
for use_fsdp in (False, True):
    bare = copy.deepcopy(model)
    wrapped = wrap_model(bare, use_fsdp=use_fsdp)
    assert (wrapped is bare) == (size == 1 or use_fsdp)
    mine = losses(wrapped, slice(rank * share, (rank + 1) * share))
    for one, other in zip(alone, mine):
        assert abs(all_reduce(other, "mean") - one) < 1e-12, (alone, mine)
"""

BODY = """
# Every rank starts from rank 0's values; of buffers, too, also of types that backends cannot send.
for use_fsdp in (False, True):
    fresh = Net().double()
    fresh.register_buffer("noise", torch.rand(3))
    if use_fsdp:
        fresh.register_buffer("small", torch.full((3,), rank, dtype=torch.int16))
        fresh.register_buffer("tiny", torch.full((3,), rank + 1.0).to(torch.float8_e4m3fn))
        fresh.register_buffer("turned", torch.full((2, 3), complex(rank, 1)).t().conj())
        fresh.register_buffer("none", torch.empty(0))
    start = broadcast({k: v.clone() for k, v in fresh.state_dict().items()})
    wrapped = wrap_model(fresh, use_fsdp=use_fsdp)
    for name, tensor in wrapped.state_dict().items():
        wanted = start[name.removeprefix("module.")]
        assert torch.equal(whole(tensor).to(torch.complex128), wanted.to(torch.complex128)), name

# With nothing to train.
for use_fsdp in (False, True):
    frozen = nn.Linear(3, 3).requires_grad_(False)
    assert wrap_model(frozen, use_fsdp=use_fsdp) is frozen
    out = frozen(torch.ones(1, 3))
    assert torch.equal(broadcast(out), out), "rank 0's on every rank"
    assert type(wrap_model(nn.ReLU(), use_fsdp=use_fsdp)) is nn.ReLU

# In another type, and as shards.
from torch.distributed.fsdp import FSDPModule
said = []
logging.getLogger("ezpz_dist._wrap").addFilter(lambda record: said.append(record))
model = Net()
elements = sum(p.numel() for p in model.parameters())
model = wrap_model(model, use_fsdp=True, dtype="bf16")
out = model(torch.ones(2, 4))
out.sum().backward()
assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
if size > 1:
    assert out.dtype == torch.bfloat16 and not said
    assert sum(p.to_local().numel() for p in model.parameters()) < 0.6 * elements
    assert all(isinstance(block, FSDPModule) for block in model.blocks)
else:
    assert out.dtype == torch.float32
    assert said[0].getMessage() == "wrap_model(dtype=bf16) on one rank casts nothing"

# Lists of lists, a block that stands there twice, tied and frozen weights, an integer one.
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2))
        self.stages[1][0].weight.requires_grad_(False)
        same = nn.Linear(4, 4)
        self.twice = nn.ModuleList([same, nn.Tanh(), same])
        self.tied = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.tied[1].weight = self.tied[0].weight
        self.scale = nn.Parameter(torch.arange(1, 5), requires_grad=False)
    def forward(self, x):
        for stage in self.stages:
            for layer in stage:
                x = layer(x)
        for layer in (*self.twice, *self.tied):
            x = layer(x)
        return x * self.scale
torch.manual_seed(0)
model = Odd().double()
alone = copy.deepcopy(model)
x = torch.ones(2, 4, dtype=torch.float64)
wrapped = wrap_model(model, use_fsdp=True)
if size > 1:
    assert all(isinstance(layer, FSDPModule) for stage in wrapped.stages for layer in stage)
    assert not any(isinstance(layer, FSDPModule) for layer in (*wrapped.twice, *wrapped.tied))
assert torch.allclose(wrapped(x), alone(x), rtol=1e-12)
wrapped(x).sum().backward()
alone(x).sum().backward()
assert whole(wrapped.scale).dtype == torch.int64
for (name, one), other in zip(wrapped.named_parameters(), alone.parameters()):
    assert (one.grad is None) == (not one.requires_grad) == (other.grad is None), name
    assert one.grad is None or torch.allclose(whole(one.grad), other.grad, rtol=1e-12), name

# A batch norm's running statistics: the first rank's with DDP, each rank's own with FSDP.
for use_fsdp in (False, True):
    norm = wrap_model(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), use_fsdp=use_fsdp)
    for _ in range(2):  # DDP sends them before each forward pass
        norm(torch.arange(4.0).view(2, 2) ** rank)
    own = dict(norm.named_buffers())[("" if use_fsdp or size == 1 else "module.") + "1.running_var"]
    every = all_gather_object(own.tolist())
    assert (every[0] != every[-1]) == (size > 1), "after it they differ"

def refused(kind, words, *args, **kwargs):
    raises(kind, words, wrap_model, *args, **kwargs)
refused(WrapError, "without use_fsdp", Net(), dtype="bf16")
refused(ValueError, "dtype torch.int32", Net(), use_fsdp=True, dtype=torch.int32)
refused(ValueError, "dtype 'bf15'", Net(), use_fsdp=True, dtype="bf15")
"""


def test_every_step_on_one_rank_and_on_two(ranks):
    ranks(1, MODEL + BODY + "cleanup()")
    ranks(2, MODEL + BODY + "cleanup()")


def test_every_step_on_three(ranks):
    ranks(3, MODEL + "cleanup()")
