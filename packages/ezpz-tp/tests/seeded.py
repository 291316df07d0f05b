"""Parallel programs with one bug each, as people write them, and the same programs without.

Every function builds its model, runs a step within `check`, and returns nothing; with its bug
it ends in an error. ``# here`` marks the line that the error should name.
"""

import torch
import torch.distributed as dist
from llama import Config, Llama, parallel_loss_of, text_batch
from torch import nn
from torch.nn.functional import cross_entropy, dropout, gelu, linear

import ezpz_tp as tp


def products(**more):
    up = tp.ColumnParallelLinear(8, 16, gather_output=False, seed=1, **more)
    return up, tp.RowParallelLinear(16, 8, input_is_parallel=True, seed=2, **more)


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
    with tp.check(model):
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
    with tp.check(nn.ModuleList([norm, up, down])):
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
    with tp.check(norm):
        norm(data(4, 8)).sum().backward()  # here: whole norm is tagged


def layers(bug=None):
    up, down = products()
    hidden = data(4, 8)
    with tp.check():
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
    with tp.check(nn.ModuleList([embedding, head])):
        logits = head(embedding(ids))
        assert tp.type_of(logits)["tensor"] == "varying"
        if bug == "own part of the logits":
            value = cross_entropy(logits, labels % 6)
        elif bug == "gathered logits":
            whole = tp.gather_from_tensor_parallel_region(logits)
            value = tp.vocab_parallel_cross_entropy(whole, labels)  # here: gathered logits
            value = value.mean()
        else:
            value = tp.vocab_parallel_cross_entropy(logits, labels).mean()
        if bug == "sum over tensor ranks":
            value = tp.reduce_from_tensor_parallel_region(value)  # here: sum over tensor ranks
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
    from torch.distributed.nn.functional import all_reduce

    model = nn.Linear(4, 1)
    group = tp.get_data_parallel_group()
    with tp.check(model):
        value = model(data(2, 4)).mean()
        if bug is not None:
            value = all_reduce(value, group=group)
        value.backward()  # here: summed gradient over data


def dropped(bug=None):
    tp.seed_model_parallel(1)
    tracker = tp.get_rng_tracker()
    up, down = products()
    with tp.check(up):
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
    """A Llama under sequence parallelism and several data-parallel ranks; values are compared."""
    config = Config(sequence_parallel=True, layers=1)
    model, state = Llama(config), tp.get_state()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if bug == "equal seeds":
        with torch.no_grad():
            weight = model.layers["0"].feed_forward.up.weight
            weight.normal_(generator=torch.Generator().manual_seed(5))
    tp.verify_replicated(model)
    tokens, labels = text_batch(state.index("data"))
    with tp.check(model):
        parallel_loss_of(model(tokens), labels).backward()
        if bug != "forgotten finalize_grads":
            tp.finalize_grads(model)
        if bug == "finalized twice":
            tp.finalize_grads(model)  # here: finalized twice
        if bug != "not averaged over data":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=state.group("data"))
        optimizer.step()
    tp.verify_replicated(model)


def tied(bug=None):
    """An embedding on the first stage that is the head's weight on the last."""
    weight = nn.Parameter(torch.arange(12.0).view(4, 3))
    weight.shared_embedding = True
    last = tp.is_pipeline_last_stage()
    if bug != "counted twice":
        weight.shared = last
    weight.grad = torch.ones_like(weight) * (3 if last else 2)
    if bug != "not summed":
        tp.finalize_grads([weight])
    model = nn.Module()
    model.embedding = weight
    with torch.no_grad():
        weight.sub_(weight.grad)
    tp.verify_replicated(model)
