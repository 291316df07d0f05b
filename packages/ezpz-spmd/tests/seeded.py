"""Parallel programs with one bug each, as people write them, and the same programs without.

Every function builds its model, runs a step within `check`, and returns nothing; with its bug
it ends in an error. ``# here`` marks the line that the error should name. After them come bugs and
clean code in other styles: operators, einsum, in place, experts, hooks, own groups.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.nn.functional import cross_entropy, dropout, gelu, linear, pad
from torch.utils.checkpoint import checkpoint

import ezpz_tp as tp
from ezpz_spmd import check, type_of
from ezpz_tp import model_parallel as fairscale
from ezpz_tp import tensor_parallel as megatron


def products(size=8, **more):
    up = tp.ColumnParallelLinear(size, 2 * size, gather_output=False, seed=1, **more)
    return up, tp.RowParallelLinear(2 * size, size, input_is_parallel=True, seed=2, **more)


class Mlp(nn.Module):
    """Megatron's two products by hand, around this package's sharded weights."""

    def __init__(self, bug=None):
        super().__init__()
        self.bug = bug
        self.norm = nn.LayerNorm(8)
        self.up, self.down = products()

    def forward(self, hidden):
        inner = self.norm(hidden)
        if self.bug != "missing copy":
            inner = tp.copy_to_tensor_parallel_region(inner)
        if self.bug == "double copy":
            inner = tp.copy_to_tensor_parallel_region(inner)  # here: double copy
        inner = gelu(linear(inner, self.up.weight, self.up.bias))  # here: missing copy
        if self.bug == "bias before reduction":
            out = linear(inner, self.down.weight, self.down.bias)  # here: bias before reduction
            return hidden + tp.reduce_from_tensor_parallel_region(out)
        out = linear(inner, self.down.weight)
        if self.bug == "missing reduction":
            return hidden + out  # here: missing reduction
        if self.bug == "nonlinear before reduction":
            return hidden + tp.reduce_from_tensor_parallel_region(
                gelu(out)  # here: nonlinear before reduction
            )
        out = tp.reduce_from_tensor_parallel_region(out)
        if self.bug == "double reduction":
            out = tp.reduce_from_tensor_parallel_region(out)  # here: double reduction
        out = out + self.down.bias
        if self.bug == "mixed residual":
            return inner.narrow(-1, 0, 8) + out  # here: mixed residual
        if self.bug == "copied residual":
            return tp.copy_to_tensor_parallel_region(hidden) + out  # here: copied residual
        return hidden + out


def data(*shape):
    generator = torch.Generator().manual_seed(shape[0] + tp.get_data_parallel_rank())
    return torch.randn(shape, generator=generator, requires_grad=True)


def by_hand(bug=None):
    model = Mlp(bug)
    with check(model):
        model(data(4, 8)).square().mean().backward()


def sequence(bug=None):
    """Sequence parallelism: norms and activations on this rank's part of dim 0."""
    norm = nn.LayerNorm(8)
    if bug != "untagged norm":
        for parameter in norm.parameters():
            tp.mark_sequence_parallel(parameter)
    up, down = products(sequence_parallel=True)
    if bug == "untagged bias":
        down.bias.sequence_parallel = False
    embedding = tp.VocabParallelEmbedding(12, 8, seed=3)
    with check(nn.ModuleList([norm, up, down])):
        whole = embedding(torch.arange(4))
        hidden = whole if bug == "not scattered" else tp.scatter_to_sequence_parallel_region(whole)
        if bug == "not scattered":
            inner = up(hidden)  # here: not scattered
        inner = norm(hidden)  # here: untagged norm
        hidden = hidden + down(gelu(up(inner)))  # here: untagged bias
        gathered = tp.gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=bug == "summed gather"
        )
        loss = gathered.square().mean()
        loss.backward()  # here: summed gather


def tagged(bug=None):
    norm = nn.LayerNorm(8)
    if bug is not None:
        tp.mark_sequence_parallel(norm.weight)
    with check(norm):
        norm(data(4, 8)).sum().backward()  # here: whole norm is tagged


def layers(bug=None):
    up, down = products()
    hidden = data(4, 8)
    with check():
        if bug == "copy before the layer":
            inner = up(tp.copy_to_tensor_parallel_region(hidden))  # here: copy before the layer
        else:
            inner = up(hidden)
        if bug == "two columns":
            inner = up(inner.narrow(-1, 0, 8))  # here: two columns
        if bug == "gathered before the row":
            inner = tp.gather_from_tensor_parallel_region(inner).narrow(-1, 0, 8)
        inner = down(inner)  # here: gathered before the row
        inner.sum().backward()


def loss(bug=None):
    embedding = tp.VocabParallelEmbedding(12, 8, seed=3)
    head = tp.ColumnParallelLinear(8, 12, bias=False, gather_output=False, seed=4)
    ids, labels = torch.arange(6) % 5, torch.arange(6) % 7
    state = tp.get_state()
    context = tp.get_context_parallel_group()
    with check(nn.ModuleList([embedding, head])):
        logits = head(embedding(ids))
        assert type_of(logits)["tensor"] == "varying"
        if bug == "own part of the logits":
            value = cross_entropy(logits, labels % 6)
        elif bug == "gathered logits":
            whole = tp.gather_from_tensor_parallel_region(logits)
            value = tp.vocab_parallel_cross_entropy(whole, labels)  # here: gathered logits
            value = value.mean()
        else:
            value = tp.vocab_parallel_cross_entropy(logits, labels).mean()
        if bug == "in place over data":
            dist.all_reduce(value, group=state.group("data"))  # here: in place over data
        if bug == "twice over context":
            reduce = tp.reduce_from_tensor_parallel_region
            value = reduce(value, context)
            value = reduce(value, context)  # here: twice over context
        if bug == "copied over data":
            group = state.group("data")
            value = tp.reduce_from_tensor_parallel_region(value, group)
            value = tp.copy_to_tensor_parallel_region(value, group)
        value.backward()  # here: own part of the logits, copied over data


def differentiable_sum(bug=None):
    """torch's own differentiable all-reduce of a loss: its backward sums once more."""
    model = nn.Linear(4, 1)
    group = tp.get_data_parallel_group()
    with check(model):
        value = model(data(2, 4)).mean()
        if bug is not None:
            value = all_reduce(value, group=group)
        value.backward()  # here: summed gradient over data


def dropped(bug=None):
    tp.seed_model_parallel(1)
    tracker = tp.get_rng_tracker()
    up, down = products()
    with check(up):
        hidden = data(4, 8)
        if bug == "dropped whole inside":
            with tracker.fork():
                hidden = dropout(hidden, 0.5)  # here: dropped whole inside
        hidden = up(dropout(hidden, 0.5))
        if bug == "dropped part outside":
            hidden = dropout(hidden, 0.5)  # here: dropped part outside
        with tracker.fork():
            hidden = dropout(hidden, 0.5)
            hidden = hidden * torch.full((8,), 0.5).bernoulli()
        part = linear(hidden, down.weight)
        if bug == "dropped sum inside":
            with tracker.fork():
                part = dropout(part, 0.5)  # here: dropped sum inside
        part = dropout(part, 0.5)
        dropout(tp.reduce_from_tensor_parallel_region(part), 0.5).sum().backward()


def trained(bug=None):
    """A step of a block under sequence parallelism on several data-parallel ranks."""
    norm = nn.LayerNorm(8)
    for parameter in norm.parameters():
        tp.mark_sequence_parallel(parameter)
    model = nn.Sequential(norm, *products(sequence_parallel=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = tp.get_data_parallel_group()
    with check(model):
        part = tp.scatter_to_sequence_parallel_region(data(4, 8))
        whole = tp.gather_from_sequence_parallel_region(model(part), False)
        whole.square().mean().backward()
        tp.finalize_grads(model)
        if bug == "finalized twice":
            tp.finalize_grads(model)  # here: finalized twice
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
        optimizer.step()


# Other styles: a bug has a program of its own, and what has no line ``# here`` is clean.


def sharded(*shape, dim):
    parameter = nn.Parameter(torch.ones(shape))
    tp.set_tensor_model_parallel_attributes(parameter, True, dim, 1)
    return parameter


def weights():
    return sharded(8, 16, dim=0), sharded(16, 8, dim=1), nn.Parameter(torch.zeros(16))


def inner(hidden, up):
    return torch.relu(tp.copy_to_tensor_parallel_region(hidden) @ up.T)


def shard_written_through_a_view():
    up, norm = products(16)[0], nn.LayerNorm(32)
    with check():
        buffer = torch.zeros(4, 32)
        buffer[:, :16].copy_(up(data(4, 16)))
        norm(buffer)  # here


def scaled_loss_of_a_part():
    up = products(16)[0]
    with check():
        loss = up(data(4, 16)).sum()
        loss.backward(torch.tensor(2.0))  # here


def inside_reentrant_checkpoint():
    up, down, _ = weights()

    def block(hidden):
        hidden = linear(hidden, up)  # here
        return tp.reduce_from_tensor_parallel_region(hidden @ down.T)

    with check():
        checkpoint(block, data(4, 16), use_reentrant=True).sum().backward()


def loss_summed_over_a_group_of_ones_own():
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    model = nn.Linear(4, 1)
    with check(model):
        loss = model(data(2, 4)).mean()
        dist.all_reduce(loss, group=groups[dist.get_rank() % 2])  # here


def experts():
    """Their partial outputs are put together first, and summed once."""
    up, down, _ = weights()
    gate = nn.Parameter(torch.ones(4, 16))
    with check():
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
            mixed = pad(torch.where(order[:, None] < 9, mixed, 0.0), (0, 0, 0, 1))
            assert not mixed.isnan().any()
            assert type_of(mixed)["tensor"] == "partial"
            tp.reduce_from_tensor_parallel_region(mixed).sum().backward(retain_graph=True)


class _TwoTypes(nn.Module):
    def __init__(self, down):
        super().__init__()
        self.down = down

    def forward(self, part, whole):
        return part * 2, whole + self.down(part)


def hooks():
    """torch hands inputs and outputs of two types through one autograd function."""
    up, down = products(16)
    block = _TwoTypes(down)
    block.register_full_backward_hook(lambda *_: None)
    with check():
        hidden = data(4, 16)
        part, whole = block(up(hidden), hidden)
        assert (type_of(part)["tensor"], type_of(whole)["tensor"]) == ("varying", "invariant")
        (whole.sum() + tp.reduce_from_tensor_parallel_region(part.sum())).backward()


def reentrant_checkpoints():
    """A block that makes another type."""
    norm = nn.LayerNorm(16)
    for parameter in norm.parameters():
        tp.mark_sequence_parallel(parameter)
    with check():
        part = checkpoint(tp.scatter_to_sequence_parallel_region, data(4, 16), use_reentrant=True)
        part = checkpoint(norm, part, use_reentrant=True)
        tp.gather_from_sequence_parallel_region(part, False).sum().backward()


def tensors_like_others():
    up = products(16)[0]
    norm = nn.LayerNorm(16)
    with check():
        hidden = norm(data(4, 16))
        part = up(data(4, 16))
        hidden.type_as(part), hidden.view_as(part), part.to(norm.weight)
        for like in (torch.zeros_like, torch.ones_like, torch.empty_like):
            assert type_of(like(part) + hidden) == {"tensor": "invariant"}
        total = part.new_zeros(4, 16)
        total += part
        assert type_of(total) == {"tensor": "varying"}


def names_of_other_libraries():
    """Megatron-LM's and fairscale's region functions."""
    up, down, _ = weights()
    with check():
        hidden = data(4, 16)
        part = megatron.copy_to_tensor_model_parallel_region(hidden) @ up.T
        total = fairscale.reduce_from_model_parallel_region(part @ down.T)
        whole = megatron.gather_from_tensor_model_parallel_region(part)
        assert type_of(whole) == {"tensor": "invariant"}
        (hidden + total).sum().backward()


def attention():
    q = torch.zeros(1, 2, 8, 8, requires_grad=True)
    ulysses = tp.get_tensor_parallel_group()  # of one rank
    ring = tp.get_context_parallel_group()
    with check() as checker:
        tp.ring_attention(q, q, q)
        tp.ulysses_attention(q, q, q)
        tp.unified_attention(q, q, q, ulysses_group=ulysses, ring_group=ring)
        tp.unshard_sequence(tp.shard_sequence(q, 2), 2)
    assert checker.operations == 5


class Stage(nn.Module):
    """A block of a model whose sequence is scattered before the first one."""

    def __init__(self, layers, first, last):
        super().__init__()
        self.first = first
        norm = nn.LayerNorm(8)
        for parameter in norm.parameters():
            tp.mark_sequence_parallel(parameter)
        block = nn.Sequential(norm, *products(sequence_parallel=True))
        self.blocks = nn.ModuleDict({str(layers.start): block})

    def forward(self, hidden):
        if self.first:
            hidden = tp.scatter_to_sequence_parallel_region(hidden)
        for block in self.blocks.values():
            hidden = hidden + block(hidden)
        return hidden


def loss_of_a_stage(part, targets):
    whole = tp.gather_from_sequence_parallel_region(part, False)
    return (whole - targets).square().mean()


def pipelined():
    """Each rank has two stages, which receive their part of the sequence."""
    pipeline = tp.Pipeline(
        Stage, layers=4, microbatches=2, loss=loss_of_a_stage,
        schedule="interleaved", virtual=2,
    )  # fmt: skip
    with check(pipeline.module) as checker:
        pipeline.step(torch.ones(8, 8), torch.zeros(8, 8))
    assert checker.operations > 10


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
    with torch.device("meta"), check():
        _Seen.apply(torch.ones(1))
        assert _Seen.device == "meta"
    with check(), torch.device("meta"):
        _Seen.apply(torch.ones(1))
        assert _Seen.device == "meta"


def nested():
    up, down = products(16)
    with check() as outer:
        with check() as inside:
            part = _Seen.apply(up(data(4, 16)))
        down(part).sum().backward()
    assert (outer.operations, inside.operations) == (4, 2)


def groups_of_ones_own():
    """Layers and regions that are given another group of the same ranks."""
    group = dist.new_group([0, 1])
    up, down = products(16, tp_group=group)
    with check():
        hidden = data(4, 16)
        copied = tp.copy_to_tensor_parallel_region(hidden, group)
        total = tp.reduce_from_tensor_parallel_region(linear(copied, up.weight).sum(), group)
        (total + (hidden + down(up(hidden))).sum()).backward()


def fully_sharded():
    """FSDP2 computes with parameters of its own."""
    model = nn.Sequential(*products(16), nn.LayerNorm(16))
    with tp.keep_attributes(model):
        for one in model:
            fully_shard(one, mesh=tp.get_state().to_mesh("cpu")["dp"])
    with check(model):
        for _ in range(2):
            model(data(4, 16)).square().mean().backward()


def compiled():
    """It runs as it is written, and is checked."""
    up, down = products(16)
    model = torch.compile(nn.Sequential(up, down), backend="eager", fullgraph=True)
    with check() as checker:
        assert type_of(model(data(4, 16))) == {"tensor": "invariant"}
    assert checker.operations == 2


def mistake_in_compiled():
    up, down, _ = weights()
    model = torch.compile(lambda x: x + inner(x, up) @ down.T, backend="eager")  # here
    with check():
        model(data(4, 16))
