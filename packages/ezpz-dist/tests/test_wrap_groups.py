"""With ezpz_tp's groups a model is wrapped over its data-parallel ranks, never over the world."""

from types import SimpleNamespace

import pytest

from ezpz_dist import WrapError
from ezpz_dist._wrap import _check_sizes

PARALLEL = """
import copy, ezpz_tp
from torch import nn

class Block(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = ezpz_tp.ColumnParallelLinear(8, 16, gather_output=False, seed=seed)
        self.down = ezpz_tp.RowParallelLinear(16, 8, input_is_parallel=True, seed=seed + 1)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(seed) for seed in (10, 20))
        self.head = nn.Linear(8, 3)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

x = torch.linspace(-1, 1, 64).view(8, 8).sin()
def losses(model, optimizer, rows, steps=12):
    seen = []
    for _ in range(steps):
        loss = model(x[rows]).square().mean()
        optimizer.zero_grad(); loss.backward()
        ezpz_tp.finalize_grads(model)
        optimizer.step()
        seen.append(loss.item())
    return torch.tensor(seen, dtype=torch.float64)

def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3)

def built(rank_of_seed=0):
    torch.manual_seed(rank_of_seed)
    return Net()
"""


def test_groups_for_some_ranks_are_not_made_by_those_who_do_not_know_of_the_others():
    # With eight ranks, of which two share the model: torch would wait for ever.
    world = SimpleNamespace(info=SimpleNamespace(world_size=8))
    replicas = SimpleNamespace(size=4, world=world)
    with pytest.raises(WrapError, match=r"reshard_after_forward=2 with ezpz_tp's groups \(4 of 8"):
        _check_sizes(2, None, replicas)
    for kept, shard_size in ((4, None), (2, 2), (True, 2), (False, 4)):
        _check_sizes(kept, shard_size, replicas)


def test_tensor_by_data_parallel_follows_the_curve(ranks):
    script = """
rank = setup_torch(timeout=60)
with ezpz_tp.use_state(ezpz_tp.ParallelState.from_groups()):
    whole = built()
    alone = losses(whole, adamw(whole.parameters()), slice(None))
ezpz_tp.initialize_tensor_parallel(tensor_parallel_size=2)
state = ezpz_tp.get_state()
data = state.index("data")
mine = slice(data * 4, data * 4 + 4)
def follows(curve, what):
    dist.all_reduce(curve, group=state.group("data"))
    difference = ((curve / 2 - alone) / alone).abs().max().item()
    assert difference <= 1e-5, (what, difference)

def optimized(wrapped):
    return losses(wrapped, adamw(wrapped.parameters()), mine)
# Only the first data-parallel rank's start counts: the other's head is another one.
follows(optimized(wrap_model_for_ddp(built(data))), "DDP")
follows(optimized(wrap_model(built(data), use_fsdp=True)), "FSDP2")
follows(optimized(wrap_model_for_fsdp(built(data))), "FSDP1")
wrapped = wrap_model_for_ddp(built(data))
optimizer = wrap_optimizer_for_zero1(torch.optim.AdamW, wrapped.parameters(), lr=3e-3)
assert optimizer.world_size == 2
follows(losses(wrapped, optimizer, mine), "ZeRO-1")

sharded = wrap_model_for_fsdp2(built(data))
up = sharded.blocks[0].up.weight
assert up.tensor_model_parallel and up.device_mesh.size() == 2, "attributes kept; two data ranks"
assert up.device_mesh.get_group() is state.group("data") or (
    dist.get_process_group_ranks(up.device_mesh.get_group()) == list(state.ranks("data")))
# On the meta device, too: parts of the tensor-parallel ranks, shards of the data-parallel ones.
torch.manual_seed(data)
with torch.device("meta"):
    model = Net()
model = wrap_model_for_fsdp2(model)
torch.manual_seed(0)
for (name, one), other in zip(model.named_parameters(), Net().parameters()):
    assert torch.equal(one.full_tensor(), other), name
assert model.blocks[0].down.weight.partition_dim == 1
ezpz_tp.destroy_tensor_parallel()
# Context parallel ranks hold the same parameters: gradients are averaged over them too.
ezpz_tp.initialize_tensor_parallel(context_parallel_size=2)
state = ezpz_tp.get_state()
two = ezpz_tp.ParallelState.from_groups(data=state.group("data"), context=state.group("context"))
with ezpz_tp.use_state(two):
    error = raises(WrapError, "", wrap_model_for_ddp, nn.Linear(2, 2))
    assert "no process group spans data x context (2 x 2)" in str(error)
    assert 'also=[("data", "context")]' in str(error)
torch.manual_seed(rank)
wrapped = wrap_model_for_ddp(nn.Linear(2, 2))
wrapped(torch.full((1, 2), float(rank))).sum().backward()
assert torch.equal(wrapped.module.weight.grad, torch.full((2, 2), 1.5)), "averaged over all four"
ezpz_tp.destroy_tensor_parallel()
# One data-parallel rank: nothing is shared, and nothing of another tensor-parallel rank's is taken.
ezpz_tp.initialize_tensor_parallel(tensor_parallel_size=4)
torch.manual_seed(rank)
model = nn.Linear(2, 2)
start = model.weight.detach().clone()
assert wrap_model(model) is model and torch.equal(model.weight, start)
assert torch.equal(wrap_model_for_fsdp2(model).weight.full_tensor(), start)
ezpz_tp.destroy_tensor_parallel()
# Pipeline stages are different models, each over its own two ranks; hybrid needs groups for all.
ezpz_tp.initialize_tensor_parallel(pipeline_parallel_size=2)
stage = ezpz_tp.get_state().index("pipeline")
torch.manual_seed(rank)
model = wrap_model_for_fsdp2(nn.Linear(2, 3 + stage))
assert model.weight.device_mesh.size() == 2
from ezpz_dist._wrap import data_parallel_mesh
from ezpz_dist._replicas import find_replicas
assert data_parallel_mesh(find_replicas("test"), 2).shape == (2,)
both = data_parallel_mesh(find_replicas("test"), 1)
assert both.mesh_dim_names == ("replicate", "shard") and both.shape == (2, 1)
assert both.mesh.flatten().tolist() == list(ezpz_tp.get_state().ranks("data"))
ezpz_tp.destroy_tensor_parallel()
cleanup()
"""
    ranks(4, PARALLEL + script)


@pytest.mark.slow
def test_meshes_split_no_communicator(ranks, tmp_path):
    # As on Aurora: a backend that is registered in Python and cannot split, in a world that is
    # bound to its device.
    (tmp_path / "oneccl_bindings_for_pytorch.py").write_text("""
import torch.distributed as dist
made = []

class NeverSplits(dist.ProcessGroupGloo):
    supports_splitting = False

def create(store, rank, size, timeout):
    made.append(NeverSplits(store, rank, size, timeout))
    return made[-1]

dist.Backend.register_backend("ccl", create, devices=["cpu", "cuda"])
""")
    script = """
sys.path.insert(0, os.getcwd())
rank = setup_torch(backend="ccl", timeout=60)
from oneccl_bindings_for_pytorch import made
dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
torch.accelerator.is_available = lambda: True
torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
torch.optim.Optimizer._accelerator_graph_capture_health_check = lambda self: None

from torch.distributed.device_mesh import init_device_mesh
raises(RuntimeError, "does not support splitting", init_device_mesh, "cpu", (2, 2))
with ezpz_tp.use_state(ezpz_tp.ParallelState.from_groups()):
    whole = built()
    alone = losses(whole, adamw(whole.parameters()), slice(None))

seen = len(made)
def follows(wrapped, mine, *groups):
    global seen
    assert [one.size() for one in made[seen:]] == [*groups]
    seen = len(made)
    curve = losses(wrapped, adamw(wrapped.parameters()), mine)
    dist.all_reduce(curve)
    assert ((curve / 4 - alone) / alone).abs().max() <= 1e-5

mine = slice(rank * 2, rank * 2 + 2)
follows(wrap_model_for_ddp(built(rank)), mine)
follows(wrap_model_for_fsdp2(built(rank)), mine)
hybrid = wrap_model_for_fsdp2(built(rank), shard_size=2)
mesh = hybrid.blocks[0].up.weight.device_mesh
assert mesh.mesh.tolist() == [[0, 1], [2, 3]] and mesh.mesh_dim_names == ("replicate", "shard")
follows(hybrid, mine, 2, 2)
save_checkpoint("saved", model=hybrid, step=1)
other = wrap_model_for_fsdp2(built(rank + 9), shard_size=2)
load_checkpoint("saved", model=other)
for one, two in zip(hybrid.parameters(), other.parameters()):
    assert torch.equal(one.full_tensor(), two.full_tensor())

ezpz_tp.initialize_tensor_parallel(tensor_parallel_size=2)
data, seen = ezpz_tp.get_state().index("data"), len(made)
mine = slice(data * 4, data * 4 + 4)
follows(wrap_model_for_ddp(built(data)), mine)
follows(wrap_model_for_fsdp2(built(data)), mine)

from ezpz_tp import layouts
axes = layouts.MESHES["fsdp+tp+cp+pp"].axes
mesh = ezpz_tp.make_mesh("cpu", torch.arange(4).view(2, 1, 1, 2), axes)
assert sorted(mesh.shape) == [1, 1, 2, 2], mesh
for dim in mesh.mesh_dim_names:
    sum_ = torch.tensor(rank)
    dist.all_reduce(sum_, group=mesh.get_group(dim))
    assert sum_ == sum(dist.get_process_group_ranks(mesh.get_group(dim))), dim
"""
    ranks(4, PARALLEL + script, cwd=tmp_path)
