"""What cannot be wrapped, and ranks that differ: an error on every rank, in place of a time-out."""

REFUSED = """
import copy, time
from torch import nn
ALL = wrap_model_for_ddp, wrap_model_for_fsdp, wrap_model_for_fsdp2

def refused(words, wrap, *args, kind=WrapError, **kwargs):
    return raises(kind, words, wrap, *args, **kwargs)

def net(width=4):
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
"""

TWICE = """
for wrap in ALL:
    refused("before setup_torch(); expected ezpz.setup_torch() first", wrap, net(),
            kind=NotSetUpError)
setup_torch(timeout=60)
kinds = dict(zip(ALL, ("DDP", "FSDP1", "FSDP2")))
for inner in ALL:
    bare = net()
    wrapped = inner(bare)
    within = "it is FSDP2" if wrapped is bare else f"it is inside of {kinds[inner]}"
    for outer in (*ALL, wrap_model):
        refused("Sequential is wrapped already: it is FSDP2" if inner is wrap_model_for_fsdp2
                else f"is wrapped already: it is {kinds[inner]}", outer, wrapped)
        refused(f"is wrapped already: its part 'trunk' is {kinds[inner]}",
                outer, nn.ModuleDict({"trunk": wrapped}))
        refused(f"Sequential is wrapped already: {within}", outer, bare)
        refused("its part '1.0' is ", outer, nn.Sequential(nn.Tanh(), nn.Sequential(bare[0])))
    if inner is wrap_model_for_ddp:  # once the wrapper is gone, its hooks are
        del wrapped
        assert wrap_model_for_ddp(bare)(torch.ones(1, 4)).shape == (1, 2)
refused("it is DataParallel", wrap_model_for_ddp, nn.DataParallel(net()))
for wrap in (*ALL, wrap_model):
    refused("<class 'torch.nn.modules.linear.Linear'> to wrap; expected a torch.nn.Module",
            wrap, nn.Linear, kind=TypeError)
    refused("1.weight of Sequential has no shape yet: it is lazy", wrap,
            nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2)))
# The minimal example of old: torch refuses device_ids on CPUs, and so do we, with the remedy.
try:
    nn.parallel.DistributedDataParallel(net(), device_ids=[0])
except ValueError as error:
    assert "device_ids" in str(error)
refused("takes no device_ids; it is chosen by the set-up: leave it out", wrap_model_for_ddp, net(),
        device_ids=[0])
assert wrap_model_for_ddp(net())(torch.ones(1, 4)).shape == (1, 2)
refused("takes no process_group; it is", wrap_model_for_fsdp, net(), process_group=None)
from torch.distributed.fsdp import ShardingStrategy
refused("ShardingStrategy.HYBRID_SHARD, which wants groups of its own; expected a strategy for one",
        wrap_model_for_fsdp, net(), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
refused("takes no mesh; give shard_size, or ezpz_tp's groups", wrap_model_for_fsdp2, net(),
        mesh=None)
refused("takes no mp_policy; give dtype, reduce_dtype", wrap_model_for_fsdp2, net(), mp_policy=1)
frozen = net().requires_grad_(False)
refused("Sequential has no parameter that requires a gradient", wrap_model_for_ddp, frozen)
assert wrap_model_for_fsdp2(frozen)(torch.ones(1, 4)).shape == (1, 2)
# What torch refuses in mid-work, in forward or in backward.
refused("a ModuleList has no forward", wrap_model_for_fsdp2, nn.ModuleList([net()]))
refused("a ModuleDict has no forward", wrap_model_for_fsdp2, nn.ModuleDict({"a": net()}))
scalar = net(); scalar.gain = nn.Parameter(torch.tensor(1.0), requires_grad=False)
refused("parameter gain has no dim to shard along", wrap_model_for_fsdp2, scalar)
turned = net(); turned.w = nn.Parameter(torch.ones(2, 3).t())
refused("w has the strides [1, 3] for the shape [3, 2]; expected row after row",
        wrap_model_for_fsdp2, turned)
for kept in (scalar, turned):
    assert not any(hasattr(each, "device_mesh") for each in kept.parameters())
empty = net(); empty.w = nn.Parameter(torch.empty(0, 3))
refused("w of shape [0, 3] has nothing to train", wrap_model_for_fsdp2, empty)
mixed = net(); mixed.layers = nn.ModuleList([net()]); mixed.layers[0][2].bfloat16()
refused("layers.0.2.weight is torch.bfloat16 and layers.0.0.weight torch.float32, in one unit "
        "(layers.0); expected one type", wrap_model_for_fsdp2, mixed)
complex_ = net(); complex_.w = nn.Parameter(torch.ones(2, dtype=torch.complex64))
refused("w is torch.complex64, and dtype='bf16'; expected real", wrap_model_for_fsdp2, complex_,
        dtype="bf16")
assert wrap_model_for_fsdp2(complex_)(torch.ones(1, 4)).shape == (1, 2)
size = dist.get_world_size()
for bad in (1, 3, 0, "2", 2.0, None):
    if bad is not None:
        refused(f"shard_size={bad!r} of {size} data-parallel ranks", wrap_model_for_fsdp2, net(),
                shard_size=bad)
    refused(f"reshard_after_forward={bad!r}; expected True, False or a divisor of {size}",
            wrap_model_for_fsdp2, net(), reshard_after_forward=bad)
for wrap, more in ((wrap_model_for_fsdp2, {}), (wrap_model, {"use_fsdp": True})):
    refused("dtype torch.int32; expected a floating-point type", wrap, net(), dtype=torch.int32,
            kind=ValueError, **more)
refused("reduce_dtype torch.int8; expected", wrap_model_for_fsdp2, net(), dtype="bf16",
        reduce_dtype=torch.int8, kind=ValueError)
refused("dtype 'bf15'", wrap_model_for_fsdp, net(), dtype="bf15", kind=ValueError)
expert = net(); expert[0].weight.allreduce = False
for wrap in ALL:
    refused("0.weight is an expert's: its copies are on", wrap, expert)
for wrap in (wrap_model_for_fsdp, wrap_model_for_fsdp2):
    refused(f"the parameters are {kinds[wrap]}'s shards", wrap_optimizer_for_zero1,
            torch.optim.AdamW, wrap(net()).parameters())
refused("takes no process_group", wrap_optimizer_for_zero1, torch.optim.AdamW, net().parameters(),
        process_group=None)
model = wrap_model_for_ddp(net())
groups = [{"params": model.parameters(), "lr": 0.5}]
zero1 = wrap_optimizer_for_zero1(torch.optim.AdamW, groups, lr=0.1)
assert zero1.param_groups[0]["lr"] == 0.5
model(torch.ones(1, 4)).sum().backward()
zero1.step()
zero1.consolidate_state_dict(to=0)  # on one rank as well
if dist.get_rank() == 0:
    torch.optim.AdamW(net().parameters()).load_state_dict(zero1.state_dict())
"""


def test_the_same_refusals_on_one_rank_and_on_two(ranks):
    ranks(1, REFUSED + TWICE + "cleanup()")
    ranks(
        2,
        # On several ranks even wrap_model needs the set-up.
        REFUSED
        + "refused('wrap_model() on rank', wrap_model, net(), kind=NotSetUpError)\n"
        + TWICE
        + """
import dataclasses
from ezpz_dist import _world
world = _world.find_world()
# No Mac has two ranks here: what set-up would have decided there.
_world.enter(dataclasses.replace(world, device=torch.device("mps")))
for wrap in (*ALL, wrap_model):
    refused("over 2 rank(s) on mps, from which gloo cannot send", wrap, net())
_world.enter(dataclasses.replace(world, backend="ccl"))
from torch.distributed.fsdp import FSDPModule
kept = FSDPModule.set_force_sum_reduction_for_comms
del FSDPModule.set_force_sum_reduction_for_comms  # as in torch 2.7
refused("ccl cannot average, and torch", wrap_model_for_fsdp2, net())
FSDPModule.set_force_sum_reduction_for_comms = kept
_world.enter(world)
cleanup()
""",
    )


def test_ranks_that_differ_are_named_on_every_rank(ranks):
    script = """
rank = setup_torch(timeout=60)
odd = rank == 1
here = ezpz_dist._world.find_world().hosts[1]
start = time.monotonic()

def frozen(model):
    model[0].bias.requires_grad_(not odd)
    return model
def buffered(model):
    model.register_buffer("seen", torch.zeros(2 if odd else 3))
    return model
def strided(model):
    if odd:
        model[0].weight.data = model[0].weight.data.t()
    return model
for wrap, name in zip((*ALL, wrap_model), ("_for_ddp", "_for_fsdp", "_for_fsdp2", "")):
    if wrap is not wrap_model_for_fsdp2:  # which refuses these altogether
        refused(f"rank 1 ({here}) has float32 [4, 4], strides [1, 4] at key parameter 0.weight "
                "instead of float32 [4, 4]", wrap, strided(net()))
    def differs(what, model):
        said = str(refused(f"; rank 1 ({here}) {what}", wrap, model))
        assert said.startswith(f"wrap_model{name}(): not the same on all ranks: ranks 0, 2 call")
    at = "at key parameter 0."
    differs(f"has float32 [5, 4] {at}weight instead of float32 [4, 4]", net(5 if odd else 4))
    differs(f"has bfloat16 [4, 4] {at}weight", net().to(torch.bfloat16 if odd else torch.float32))
    differs(f"has float32 [4], frozen {at}bias instead of float32 [4]", frozen(net()))
    last = "unit 3" if "fsdp" in name else "parameter 3.weight"
    differs(f"has a key {last} that the others have not",
            net().append(nn.Linear(1, 1)) if odd else net())
    last = "unit 2" if "fsdp" in name else "parameter 2.weight"
    differs(f"has no key {last}", net()[:2] if odd else net())
    differs("has float32 [2] at key buffer seen", buffered(net()))
names = ["a", "b"] if odd else ["b", "a"]
refused("has the same in another order", wrap_model_for_fsdp2,
        nn.Sequential(nn.ModuleDict({name: nn.Linear(2, 2) for name in names})))
refused("has no key unit 2", wrap_model_for_fsdp2, net(),
        units=[nn.Tanh if odd else nn.Linear])
# Other calls are shown with their lines.
refused(f"rank 1 ({here}) calls wrap_model_for_fsdp2(reduce_dtype=torch.float32, "
        "reshard_after_forward=False) at ", wrap_model_for_fsdp2, net(), kind=MismatchError,
        reshard_after_forward=not odd)
refused(f"ranks 0, 2 call wrap_model_for_fsdp() at <string>:", wrap_model_for_ddp if odd
        else wrap_model_for_fsdp, net(), kind=MismatchError)
refused(f"rank 1 ({here}) calls barrier() at <string>:", (lambda _: barrier()) if odd else
        wrap_model, net(), kind=MismatchError)
# What one rank alone refuses, all refuse.
inside = wrap_model_for_fsdp2(net())
refused("is wrapped already" if odd else
        f"rank 1 ({here}) cannot take part in wrap_model_for_ddp() at <string>:",
        wrap_model_for_ddp, inside if odd else net())
refused("dtype='bf16' without use_fsdp; expected it with FSDP only", wrap_model, net(),
        use_fsdp=not odd, dtype="bf16")
refused("has float32 [2] at key parameter 0 instead of float32 [4, 4]",
        wrap_optimizer_for_zero1, torch.optim.SGD, list(net().parameters())[:: -1 if odd else 1])
assert time.monotonic() - start < 150
# And after all this the ranks are still together.
assert wrap_model_for_ddp(net())(torch.ones(1, 4)).shape == (1, 2)
cleanup()
"""
    ranks(3, REFUSED + script)
