"""Bugs and clean code in other styles: operators, einsum, in place, experts, hooks, own groups.

As in `seeded`, a function runs a step within `check`, and ``# here`` marks the line that its error
names. What has no such line is clean.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ezpz_tp as tp


def data(*shape):
    return torch.ones(shape, requires_grad=True)


def sharded(*shape, dim):
    parameter = nn.Parameter(torch.ones(shape))
    tp.set_tensor_model_parallel_attributes(parameter, True, dim, 1)
    return parameter


def weights():
    return sharded(8, 16, dim=0), sharded(16, 8, dim=1), nn.Parameter(torch.zeros(16))


def inner(hidden, up):
    return torch.relu(tp.copy_to_tensor_parallel_region(hidden) @ up.T)


def layers(**more):
    up = tp.ColumnParallelLinear(16, 32, gather_output=False, seed=1, **more)
    return up, tp.RowParallelLinear(32, 16, input_is_parallel=True, seed=2, **more)


def shard_written_through_a_view():
    up, norm = layers()[0], nn.LayerNorm(32)
    with tp.check():
        buffer = torch.zeros(4, 32)
        buffer[:, :16].copy_(up(data(4, 16)))
        norm(buffer)  # here


def scaled_loss_of_a_part():
    up = layers()[0]
    with tp.check():
        loss = up(data(4, 16)).sum()
        loss.backward(torch.tensor(2.0))  # here


def inside_reentrant_checkpoint():
    up, down, _ = weights()

    def block(hidden):
        hidden = F.linear(hidden, up)  # here
        return tp.reduce_from_tensor_parallel_region(hidden @ down.T)

    with tp.check():
        checkpoint(block, data(4, 16), use_reentrant=True).sum().backward()


def loss_summed_over_a_group_of_ones_own():
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    model = nn.Linear(4, 1)
    with tp.check(model):
        loss = model(data(2, 4)).mean()
        dist.all_reduce(loss, group=groups[dist.get_rank() % 2])  # here


def experts():
    """Their partial outputs are put together first, and summed once."""
    up, down, _ = weights()
    gate = nn.Parameter(torch.ones(4, 16))
    with tp.check():
        hidden = data(6, 16)
        score, chosen = (hidden @ gate.T).softmax(-1).topk(1)
        score = tp.copy_to_tensor_parallel_region(score)
        out = {name: torch.zeros_like(hidden) for name in ("add", "set", "scatter", "copy")}
        for expert in range(4):
            token, slot = torch.where(chosen == expert)
            part = inner(hidden[token], up) @ down.T * score[token, slot, None]
            out["add"].index_add_(0, token, part)
            out["set"][token] = out["set"][token] + part
            out["scatter"] = out["scatter"].scatter_add(0, token[:, None].expand(-1, 16), part)
            out["copy"].index_copy_(0, token, part)
        for one in out.values():
            order = chosen[:, 0].argsort()
            mixed = one[order].index_select(0, order.argsort())
            mixed = F.pad(torch.where(order[:, None] < 9, mixed, 0.0), (0, 0, 0, 1))
            assert not mixed.isnan().any()
            assert tp.type_of(mixed)["tensor"] == "partial"
            tp.reduce_from_tensor_parallel_region(mixed).sum().backward(retain_graph=True)


class _TwoTypes(nn.Module):
    def __init__(self, down):
        super().__init__()
        self.down = down

    def forward(self, part, whole):
        return part * 2, whole + self.down(part)


def hooks():
    """torch hands inputs and outputs of two types through one autograd function."""
    up, down = layers()
    block = _TwoTypes(down)
    block.register_full_backward_hook(lambda *_: None)
    with tp.check():
        hidden = data(4, 16)
        part, whole = block(up(hidden), hidden)
        assert (tp.type_of(part)["tensor"], tp.type_of(whole)["tensor"]) == ("varying", "invariant")
        (whole.sum() + tp.reduce_from_tensor_parallel_region(part.sum())).backward()


def reentrant_checkpoints():
    """A block that makes another type."""
    norm = nn.LayerNorm(16)
    for parameter in norm.parameters():
        tp.mark_sequence_parallel(parameter)
    with tp.check():
        part = checkpoint(tp.scatter_to_sequence_parallel_region, data(4, 16), use_reentrant=True)
        part = checkpoint(norm, part, use_reentrant=True)
        tp.gather_from_sequence_parallel_region(part, False).sum().backward()


def tensors_like_others():
    up = layers()[0]
    norm = nn.LayerNorm(16)
    with tp.check():
        hidden = norm(data(4, 16))
        part = up(data(4, 16))
        hidden.type_as(part), hidden.view_as(part), part.to(norm.weight)
        for like in (torch.zeros_like, torch.ones_like, torch.empty_like):
            assert tp.type_of(like(part) + hidden) == {"tensor": "invariant"}
        total = part.new_zeros(4, 16)
        total += part
        assert tp.type_of(total) == {"tensor": "varying"}


class _Seen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input_):
        _Seen.device = torch.zeros(1).device.type
        return input_ * 1

    @staticmethod
    def backward(ctx, grad):
        return grad


def default_devices():
    """Another function mode works on inside an autograd function."""
    with torch.device("meta"), tp.check():
        _Seen.apply(torch.ones(1))
        assert _Seen.device == "meta"
    with tp.check(), torch.device("meta"):
        _Seen.apply(torch.ones(1))
        assert _Seen.device == "meta"


def nested():
    up, down = layers()
    with tp.check() as outer:
        with tp.check() as inside:
            part = _Seen.apply(up(data(4, 16)))
        down(part).sum().backward()
    assert (outer.operations, inside.operations) == (4, 2)


def groups_of_ones_own():
    """Layers and regions that are given another group of the same ranks."""
    group = dist.new_group([0, 1])
    up, down = layers(tp_group=group)
    with tp.check():
        hidden = data(4, 16)
        copied = tp.copy_to_tensor_parallel_region(hidden, group)
        total = tp.reduce_from_tensor_parallel_region(F.linear(copied, up.weight).sum(), group)
        (total + (hidden + down(up(hidden))).sum()).backward()


def fully_sharded():
    """FSDP2 computes with parameters of its own."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*layers(), nn.LayerNorm(16))
    with tp.keep_attributes(model):
        for one in model:
            fully_shard(one, mesh=tp.get_state().to_mesh("cpu")["dp"])
    with tp.check(model):
        for _ in range(2):
            model(data(4, 16)).square().mean().backward()
    tp.verify_replicated(model, gradients=True)


def compiled():
    """It runs as it is written, and is checked."""
    up, down = layers()
    model = torch.compile(nn.Sequential(up, down), backend="eager", fullgraph=True)
    with tp.check() as checker:
        assert tp.type_of(model(data(4, 16))) == {"tensor": "invariant"}
    assert checker.operations == 2


def mistake_in_compiled():
    up, down, _ = weights()
    model = torch.compile(lambda x: x + inner(x, up) @ down.T, backend="eager")  # here
    with tp.check():
        model(data(4, 16))
