"""Tensor- and pipeline-parallel models: saved at one degree, loaded at another."""

BODY = """
import logging
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import ezpz_tp
from ezpz_tp import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

where = {where!r}
rank = setup_torch(timeout=60)
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("ezpz_dist").addHandler(handler)

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(9, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(16, 8)
        self.head = nn.Module()
        self.head.weight = self.embed.weight
    def forward(self, tokens):
        gate, up = self.up(self.embed(tokens)).chunk(2, -1)
        return self.norm(self.down(torch.tanh(gate) * up))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        # Two matrices stacked in one weight; a vocabulary that no degree divides.
        self.embed = VocabParallelEmbedding(9, 8)
        self.up = ColumnParallelLinear(8, 32, gather_output=False, stride=2)
        self.norm = nn.LayerNorm(8)
        self.down = RowParallelLinear(16, 8, input_is_parallel=True)
        self.head = nn.Module()
        self.head.weight = self.embed.weight
    forward = Plain.forward

def wrapped(kind, seed):
    torch.manual_seed(seed)
    model = Model()
    if kind == "fsdp2":
        with ezpz_tp.keep_attributes(model):
            fully_shard(model, mesh=ezpz_tp.get_state().to_mesh("cpu")["dp"])
    elif kind == "ddp":
        model = DistributedDataParallel(model, process_group=ezpz_tp.get_data_parallel_group())
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)

TOKENS = torch.arange(9).view(3, 3)

def step(model, optimizer):
    loss = model(TOKENS).square().sum() + model(TOKENS)[0].sum()
    loss.backward()
    ezpz_tp.finalize_grads(model)
    optimizer.step(), optimizer.zero_grad()

def outputs(model, optimizer):
    "Before and after a step of the optimizer: weights and moments are right."
    with torch.no_grad():
        first = model(TOKENS)
    step(model, optimizer)
    with torch.no_grad():
        return first, model(TOKENS)

def near(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
"""

FOUR = """
ezpz_tp.initialize_tensor_parallel(2)
ezpz_tp.seed_model_parallel(7)
model, optimizer = wrapped("ddp", 1)
step(model, optimizer)
save_checkpoint(where + "/ddp", model=model, optimizer=optimizer, step=1)
with ezpz_tp.get_rng_tracker().fork():
    drawn = torch.rand(2)
expected = outputs(model, optimizer)
if rank == 0:
    torch.save(expected, where + "-expected.pt")

model, optimizer = wrapped("fsdp2", 2)
loaded = load_checkpoint(where + "/ddp", model=model, optimizer=optimizer)
assert loaded.notes == ()
with ezpz_tp.get_rng_tracker().fork():
    assert torch.equal(torch.rand(2), drawn)
save_checkpoint(where + "/fsdp2", model=model, optimizer=optimizer, step=1)
near(outputs(model, optimizer), expected)

model, optimizer = wrapped("ddp", 3)
torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
load_checkpoint(where + "/fsdp2", model=model, optimizer=optimizer)
torch.use_deterministic_algorithms(False)
for values in optimizer.state.values():  # also of rows that pad the vocabulary
    assert all(value.isfinite().all() for value in values.values())
near(outputs(model, optimizer), expected)
assert not said  # norms and biases are equal on tensor-parallel ranks

def refused(text, model, **given):
    raises(CheckpointError, text, save_checkpoint, where + "/no", model=model, step=1, **given)
# Half of the ranks' shards would be lost without a word.
bare = Model()
fully_shard(bare, mesh=ezpz_tp.get_state().to_mesh("cpu")["dp"])
refused("no parameter of FSDPModel says what it is a part of".replace("FSDPModel",
    type(bare).__name__), bare)
refused("2 tensor-parallel ranks", nn.Linear(2, 2))
ezpz_tp.destroy_model_parallel()
# Pipeline stages: of one name, only what is tied.
ezpz_tp.initialize_tensor_parallel(1, 2)
stage = ezpz_tp.get_state().index("pipeline")
part = nn.ModuleDict({"tied": nn.Linear(3, 3, bias=False), f"layer{stage}": nn.Linear(3, 3)})
with torch.no_grad():
    part["tied"].weight.fill_(1)
    part[f"layer{stage}"].weight.fill_(stage)
optimizer = torch.optim.SGD([{"params": part["tied"].parameters()},
    {"params": part[f"layer{stage}"].parameters(), "lr": 1.0 + stage}])
save_checkpoint(where + "/pp", model=part, optimizer=optimizer, step=1)
with torch.no_grad():
    part["tied"].weight.zero_()
    part[f"layer{stage}"].weight.zero_()
optimizer.param_groups[1]["lr"] = 0
load_checkpoint(where + "/pp", model=part, optimizer=optimizer)
assert part["tied"].weight[0, 0] == 1 and part[f"layer{stage}"].weight[0, 0] == stage
assert optimizer.param_groups[1]["lr"] == 1.0 + stage
# Each data-parallel rank holds some rows of what is tied, and none of what has none.
sharded = nn.ModuleDict({"tied": nn.Linear(3, 3, bias=False), f"layer{stage}": nn.Linear(3, 3)})
sharded.load_state_dict(part.state_dict())
sharded["tied"].none = nn.Parameter(torch.zeros(0, 3))
fully_shard(sharded["tied"], mesh=ezpz_tp.get_state().to_mesh("cpu")["dp"])
save_checkpoint(where + "/pp-fsdp2", model=sharded, step=1)
with torch.no_grad():
    part["tied"].weight.zero_()
for model in (sharded, part):
    assert load_checkpoint(where + "/pp-fsdp2", model=model).notes == ()
assert (part["tied"].weight == 1).all()
with torch.no_grad():
    part["tied"].weight.fill_(stage)
refused("pipeline stages hold different values under model.tied.weight", part)
refused(f"on rank", nn.Linear(3 + stage, 3))
"""

ONE = """
expected = torch.load(where + "-expected.pt")
for saved in ("ddp", "fsdp2"):
    for make in (Plain, Model):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        load_checkpoint(where + "/" + saved, model=model, optimizer=optimizer)
        near(outputs(model, optimizer), expected)
whole = nn.ModuleDict({"tied": nn.Linear(3, 3, bias=False), "layer0": nn.Linear(3, 3),
    "layer1": nn.Linear(3, 3)})
optimizer = torch.optim.SGD([{"params": whole[name].parameters()} for name in whole])
load_checkpoint(where + "/pp", model=whole, optimizer=optimizer)
assert whole["layer1"].weight[0, 0] == 1 and optimizer.param_groups[2]["lr"] == 2.0
"""


def test_tensor_and_pipeline_parallel_models_change_degree(ranks, tmp_path):
    """TP 2 x DP 2, with DDP and with FSDP2, to one process; and two pipeline stages to one."""
    body = BODY.replace("{where!r}", repr(str(tmp_path)))
    ranks(4, body + FOUR, timeout=120)
    ranks(1, body + ONE)


OWN = """
ezpz_tp.initialize_tensor_parallel(2)

def made(value):
    part = nn.Sequential(ColumnParallelLinear(4, 8, gather_output=False), nn.BatchNorm1d(4),
        RowParallelLinear(8, 4, input_is_parallel=True))
    with torch.no_grad():
        part[1].weight.fill_(value)
        part[1].running_mean.fill_(value / 4)
    return part

def heard(text, count):
    assert len(said) == count * (rank == 0), said
    assert rank or text in said[-1], said

part = made(1 + rank)
for step in (1, 2):
    save_checkpoint(where, model=part, step=step)
    heard("the values of model.1.weight differ between ranks 0-1, which are taken for copies", 1)
# What it advises. Buffers come back to each rank without it.
for parameter in part[1].parameters():
    ezpz_tp.set_shard(parameter, ezpz_tp.Shard((8,), 0), degree=2)
save_checkpoint(where, model=part, step=3)
heard("the values of model.1.weight differ", 1)
other = made(0)
for parameter in other[1].parameters():
    ezpz_tp.set_shard(parameter, ezpz_tp.Shard((8,), 0), degree=2)
assert load_checkpoint(where, model=other).notes == ()
assert all(map(torch.equal, other.state_dict().values(), part.state_dict().values()))
"""


def test_copies_on_tensor_parallel_ranks_that_are_not_equal_are_named(ranks, tmp_path):
    ranks(2, BODY.replace("{where!r}", repr(str(tmp_path))) + OWN)
