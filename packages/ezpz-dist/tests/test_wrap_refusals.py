"""What cannot be wrapped, and ranks that differ: an error on every rank, in place of a time-out."""

REFUSED = """
import copy, time
from torch import nn
from ezpz_dist._wrapping.ddp import wrap_model_for_ddp
from ezpz_dist._wrapping.fsdp import wrap_model_for_fsdp
from ezpz_dist._wrapping.fsdp2 import wrap_model_for_fsdp2
from ezpz_dist._wrapping.zero1 import wrap_optimizer_for_zero1
ALL = wrap_model_for_ddp, wrap_model_for_fsdp, wrap_model_for_fsdp2

def refused(words, wrap, *args, kind=WrapError, **kwargs):
    try:
        wrap(*args, **kwargs)
    except kind as error:
        assert words in str(error), (words, error)
    else:
        raise AssertionError(f"{words}: accepted")

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
    wrapped = inner(net())
    for outer in (*ALL, wrap_model):
        refused("Sequential is wrapped already: it is FSDP2" if inner is wrap_model_for_fsdp2
                else f"is wrapped already: it is {kinds[inner]}", outer, wrapped)
        refused(f"is wrapped already: its part 'trunk' is {kinds[inner]}",
                outer, nn.ModuleDict({"trunk": wrapped}))
refused("it is DataParallel", wrap_model_for_ddp, nn.DataParallel(net()))

# The minimal example of old: torch refuses device_ids on CPUs, and so do we, with the remedy.
try:
    nn.parallel.DistributedDataParallel(net(), device_ids=[0])
except ValueError as error:
    assert "device_ids" in str(error)
refused("device_ids is chosen by the set-up; leave it out", wrap_model_for_ddp, net(),
        device_ids=[0])
assert wrap_model_for_ddp(net())(torch.ones(1, 4)).shape == (1, 2)
refused("process_group is chosen", wrap_model_for_fsdp, net(), process_group=None)
refused("takes no mesh; give shard_size, or ezpz_tp's groups", wrap_model_for_fsdp2, net(),
        mesh=None)
refused("takes no mp_policy; give dtype, reduce_dtype", wrap_model_for_fsdp2, net(), mp_policy=1)
frozen = net().requires_grad_(False)
refused("Sequential has no parameter that requires a gradient", wrap_model_for_ddp, frozen)
assert wrap_model_for_fsdp2(frozen)(torch.ones(1, 4)).shape == (1, 2)
refused("a ModuleList has no forward", wrap_model_for_fsdp2, nn.ModuleList([net()]))
scalar = net(); scalar.gain = nn.Parameter(torch.tensor(1.0))
refused("parameter gain has no dim to shard along", wrap_model_for_fsdp2, scalar)
size = dist.get_world_size()
for bad in (1, 3, 0):
    refused(f"shard_size={bad} of {size} data-parallel ranks", wrap_model_for_fsdp2, net(),
            shard_size=bad)
    if bad != 1:
        refused(f"reshard_after_forward={bad}; expected True, False or a divisor of {size}",
                wrap_model_for_fsdp2, net(), reshard_after_forward=bad)
refused("dtype torch.int32; expected a floating-point type", wrap_model_for_fsdp2, net(),
        dtype=torch.int32, kind=ValueError)
refused("reduce_dtype torch.int8; expected", wrap_model_for_fsdp2, net(), dtype="bf16",
        reduce_dtype=torch.int8, kind=ValueError)
refused("dtype 'bf15'", wrap_model_for_fsdp, net(), dtype="bf15", kind=ValueError)
expert = net(); expert[0].weight.allreduce = False
for wrap in ALL:
    refused("0.weight is an expert's: its copies are on", wrap, expert)
refused("the parameters are FSDP2's shards", wrap_optimizer_for_zero1, torch.optim.AdamW,
        wrap_model_for_fsdp2(net()).parameters())
plain = wrap_optimizer_for_zero1(torch.optim.AdamW, [{"params": list(net().parameters())}], lr=0.5)
assert plain.param_groups[0]["lr"] == 0.5
assert (type(plain) is torch.optim.AdamW) == (size == 1)
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
    ranks(
        3,
        REFUSED
        + """
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
for wrap, name in zip((*ALL, wrap_model), ("_for_ddp", "_for_fsdp", "_for_fsdp2", "_for_ddp")):
    call = f"wrap_model{name}(): not the same on all ranks: rank 1 on {here}: "
    refused(call + "parameter 0.weight is float32 [5, 4] there, and float32 [4, 4] on rank 0",
            wrap, net(5 if odd else 4))
    refused(call + "parameter 0.weight is bfloat16 [4, 4] there", wrap,
            net().to(torch.bfloat16 if odd else torch.float32))
    refused(call + "parameter 0.bias is float32 [4], frozen there, and float32 [4] on rank 0",
            wrap, frozen(net()))
    refused(call + "parameter 3.weight is float32 [1, 1] there, and missing on", wrap,
            net().append(nn.Linear(1, 1)) if odd else net())
    refused(call + "parameter 2.weight is missing there, and float32 [2, 4] on", wrap,
            net()[:2] if odd else net())
    refused(call + "buffer seen is float32 [2] there", wrap, buffered(net()))
names = ["a", "b"] if odd else ["b", "a"]
refused("the parameters are in another order", wrap_model_for_fsdp2,
        nn.Sequential(nn.ModuleDict({name: nn.Linear(2, 2) for name in names})))
refused("the call is wrap_model_for_fsdp2(dtype=None, reduce_dtype=torch.float32, ",
        wrap_model_for_fsdp2, net(), reshard_after_forward=not odd)
refused("the call is wrap_model_for_ddp() there, and wrap_model_for_fsdp(dtype=None) on rank 0",
        wrap_model_for_ddp if odd else wrap_model_for_fsdp, net())
# What one rank alone refuses, all refuse.
refused("wrap_model_for_ddp() is refused on rank 1 on" if not odd else "is wrapped already",
        wrap_model_for_ddp, wrap_model_for_fsdp2(net()) if odd else (
            wrap_model_for_fsdp2(net()), net())[1])
refused("parameter 0 is float32 [2] there, and float32 [4, 4] on rank 0",
        wrap_optimizer_for_zero1, torch.optim.SGD, list(net().parameters())[:: -1 if odd else 1])
assert time.monotonic() - start < 30
# And after all this the ranks are still together.
assert wrap_model_for_ddp(net())(torch.ones(1, 4)).shape == (1, 2)
cleanup()
""",
    )
