"""A run that stops and resumes is the run that did not: bit for bit, on any number of ranks."""

import json

import pytest

BODY = """
import hashlib, random, json
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.checkpoint.state_dict import get_model_state_dict, StateDictOptions

rank, where = setup_torch(seed=3, timeout=30), {where!r}
size = dist.get_world_size()

def make(kind, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    if kind == "ddp":  # whose buffers differ between ranks, until the next forward
        model.insert(1, nn.BatchNorm1d(16))
    torch.manual_seed(seed + rank)
    kinds = dict(lr=1e-2, weight_decay=0.1)
    if kind == "fsdp2":
        for layer in (model[0], model[3]):
            fully_shard(layer)
        fully_shard(model)
    elif kind == "hsdp":
        names = ("replicate", "shard")
        fully_shard(model, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=names))
    elif kind == "fsdp1":
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    elif kind in ("ddp", "plain_ddp", "zero1"):
        model = DistributedDataParallel(model)
    if kind == "zero1":
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **kinds)
    # By names, which are each wrapper's.
    return model, torch.optim.AdamW(model.named_parameters(), **kinds)

class Positions:
    "Shuffled indices, and how far we are."
    epoch = at = 0
    def state_dict(self): return dict(vars(self))
    def load_state_dict(self, state): vars(self).update(state)
    def take(self, count):
        order = torch.randperm(10, generator=torch.Generator().manual_seed(self.epoch))
        found = order[self.at:self.at + count]
        self.at += count
        if self.at + count > 10:
            self.epoch, self.at = self.epoch + 1, 0
        return found

def whole(model):
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))

def digest(model, losses):
    state = [(name, tensor.tolist()) for name, tensor in sorted(whole(model).items())]
    digest = hashlib.sha256(json.dumps(state).encode()).hexdigest()
    return digest, [loss.hex() for loss in losses]

DATA = torch.sin(torch.arange(60.0)).view(10, 6)

def started(kind, seed):
    model, optimizer = make(kind, seed)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    return dict(model=model, optimizer=optimizer, scheduler=scheduler, data=Positions())

def train(steps, model, optimizer, scheduler=None, data=None):
    losses, data = [], data or Positions()
    for _ in range(steps):
        batch = DATA[data.take(2)] + random.random() * 0.01
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        losses.append(loss.item())
    return losses
"""

UNINTERRUPTED = """
def run(kind, save):
    random.seed(rank)
    parts = started(kind, 5)
    losses = train(6, **parts)
    if save:
        # In the background: what is saved is the state of now, whatever the training does.
        save_checkpoint(f"{where}/{kind}", step=6, extra=dict(best=losses[-1]),
            asynchronous=kind == "ddp", **parts)
    losses += train(6, **parts)
    return digest(parts["model"], losses)

found = {}
for kind in ("ddp", "fsdp2"):
    # Saving changes nothing.
    found[kind] = run(kind, save=True)
    assert found[kind] == run(kind, save=False)
finish_saving()
print(json.dumps(found))
"""

RESUMED = """
found = {}
for kind in ("ddp", "fsdp2"):
    parts = started(kind, 77)
    loaded = load_checkpoint(f"{where}/{kind}", **parts)
    assert loaded.step == 6 and loaded.notes == loaded.skipped == (), loaded
    found[kind] = digest(parts["model"], train(6, **parts))
print(json.dumps(found))
"""


def test_resuming_is_bitwise_equal_to_going_on(ranks, tmp_path):
    """Dropout, AdamW, a schedule, shuffled data, Python's and torch's random numbers."""
    body = BODY.replace("{where!r}", repr(str(tmp_path)))
    whole = [json.loads(out) for out in ranks(2, body + UNINTERRUPTED)]
    resumed = [json.loads(out) for out in ranks(2, body + RESUMED)]
    for before, after in zip(whole, resumed, strict=True):
        for kind in ("ddp", "fsdp2"):
            assert after[kind][0] == before[kind][0]
            assert after[kind][1] == before[kind][1][6:]


STATES = """
def moments(model, optimizer):
    "Full exp_avg and step by plain name, wherever they are."
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        names = {p: n.removeprefix("module.") for n, p in model.named_parameters()}
        mine = {names[p]: (s["exp_avg"], s["step"]) for p, s in optimizer.optim.state.items()}
        return {name: each for one in all_gather_object(mine) for name, each in one.items()}
    options = StateDictOptions(full_state_dict=True)
    full = get_optimizer_state_dict(model, optimizer, options=options)
    return {name: (state["exp_avg"], state["step"]) for name, state in full["state"].items()}

def expect(model, optimizer, tensors, state):
    found = whole(model)
    assert found.keys() == tensors.keys(), (found.keys(), tensors.keys())
    for name in tensors:
        assert torch.equal(found[name], tensors[name]), name
    held = moments(model, optimizer)
    for name, (average, step) in state.items():
        assert torch.equal(held[name][0], average) and float(held[name][1]) == step, name
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.005
    assert "param_names" not in group or group["param_names"] == [
        name for name, _ in model.named_parameters()]

def curve(model, optimizer):
    "Losses of six more steps on the same global batches, whatever the number of ranks."
    model.eval()  # no dropout: new ranks draw other numbers
    losses = []
    for number in range(6):
        share = DATA.roll(number, 0)[:4].tensor_split(size)[rank]
        loss = model(share).square().mean()
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        losses.append(all_reduce(loss.detach()) / size)
    return torch.stack(losses)
"""

WRITE = """
model, optimizer = make("plain_ddp", 5)
train(3, model, optimizer)
for group in optimizer.param_groups:
    group["lr"] = 0.005
tensors, state = whole(model), moments(model, optimizer)
state = {name: (average, float(step)) for name, (average, step) in state.items()}
save_checkpoint(f"{where}/ddp", model=model, optimizer=optimizer, step=3)
for kind in ("fsdp2", "fsdp1", "zero1"):
    model, optimizer = make(kind, 99)
    loaded = load_checkpoint(f"{where}/ddp", model=model, optimizer=optimizer)
    expect(model, optimizer, tensors, state)
    save_checkpoint(f"{where}/{kind}", model=model, optimizer=optimizer, step=3)
    model, optimizer = make("plain_ddp", 98)
    load_checkpoint(f"{where}/{kind}", model=model, optimizer=optimizer)
    expect(model, optimizer, tensors, state)
losses = curve(model, optimizer)
if rank == 0:
    torch.save((tensors, state, losses), f"{where}/expected.pt")
"""

READ = """
tensors, state, losses = torch.load(f"{where}/expected.pt")
for saved in ("ddp", "fsdp2", "fsdp1", "zero1"):
    for kind in {kinds!r}:
        model, optimizer = make(kind, 77)
        if size == 1 and kind == "bare":
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
        loaded = load_checkpoint(f"{where}/{saved}", model=model, optimizer=optimizer)
        assert loaded.world_size == 2 and "derived from rank 0's" in loaded.notes[-1]
        expect(model, optimizer, tensors, state)
        torch.testing.assert_close(curve(model, optimizer), losses, rtol=1e-6, atol=0)
draws = torch.rand(1).item(), random.random()
load_checkpoint(f"{where}/zero1", model=model, optimizer=optimizer)
assert draws == (torch.rand(1).item(), random.random())  # new streams are derived, not drawn
assert len(set(all_gather_object(draws))) == size  # every rank draws its own
"""


# A module that a model has under two names.
SHARED = """
class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = self.a
        relu = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.rest = nn.Sequential(relu, nn.ReLU(), relu)
    def forward(self, x):
        return self.rest(self.b(self.a(x)))

def shared(wrap, seed):
    torch.manual_seed(seed)
    model = wrap(Shared())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(DATA[:4, :4]).sum().backward()
    optimizer.step()
    return model, optimizer

compiled = lambda model: torch.compile(DistributedDataParallel(model), backend="eager")
for kind, wrap in dict(ddp=DistributedDataParallel, fsdp2=fully_shard, compiled=compiled).items():
    model, optimizer = shared(wrap, 1)
    save_checkpoint(f"{where}/shared/{kind}", model=model, optimizer=optimizer, step=1)
    other, theirs = shared(wrap, 2)
    load_checkpoint(f"{where}/shared/{kind}", model=other, optimizer=theirs)
    for one, two in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two), kind
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], theirs.state[two]["exp_avg"]), kind
    bare = Shared()
    load_checkpoint(f"{where}/shared/{kind}", model=bare)
    assert bare.b is bare.a and torch.equal(bare.a.weight, whole(model)["a.weight"])
"""


@pytest.mark.slow
def test_any_wrapper_on_any_number_of_ranks_loads_what_two_ranks_wrote(ranks, tmp_path):
    body = BODY.replace("{where!r}", repr(str(tmp_path))) + STATES
    ranks(2, body + WRITE + SHARED)
    ranks(1, body + READ.replace("{kinds!r}", "('bare',)"))
    ranks(4, body + READ.replace("{kinds!r}", "('plain_ddp', 'hsdp')"))
