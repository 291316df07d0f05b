"""What the fused functions promise about memory and modes; their numbers are in test_lattice."""

import pytest
import torch
from on_ranks import on_ranks
from torch.nn import functional as F

import ezpz_tp as tp
from ezpz_tp._fused import column_linear, row_linear
from ezpz_tp.testing import counting, run_ranks

SEQUENCE, BATCH, IN, OUT = 4, 3, 8, 12


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def group():
    return tp.get_state().group("tensor")


def own(full, dim):
    return full.chunk(group().size(), dim)[group().rank()].clone()


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def strange_memory(function, sequence_parallel):
    """Transposed inputs and an expanded gradient: contiguity is nobody's duty but ours."""
    size = IN if function is column_linear else IN // 2
    inputs = numbers(size, BATCH, SEQUENCE).transpose(0, 2).requires_grad_()
    weight = numbers(size, OUT, seed=1).t().requires_grad_()
    function(inputs, weight, None, group(), sequence_parallel).sum().backward()
    return inputs.grad, weight.grad


@pytest.mark.parametrize(
    ("function", "sequence_parallel", "summed", "copies"),
    [
        (column_linear, False, 2, 1),
        (column_linear, True, 2, 2),  # of both ranks' parts of the sequence
        (row_linear, False, 1, 1),
    ],
    ids=["column", "column, sequence", "row"],
)
def test_transposed_inputs_and_expanded_gradients(function, sequence_parallel, summed, copies):
    size = IN if function is column_linear else IN // 2
    full, weight = numbers(size, BATCH, SEQUENCE).transpose(0, 2), numbers(size, OUT, seed=1).t()
    for grad_input, grad_weight in run_ranks(strange_memory, 2, function, sequence_parallel):
        close(grad_input, summed * weight.sum(0).expand_as(full))
        close(grad_weight, copies * full.sum((0, 1)).expand_as(weight))


@on_ranks(2)
def test_only_what_is_wanted_is_kept_computed_and_sent():
    """Of a frozen layer (LoRA) the input is not kept: it is the larger one."""
    for of_weight, of_input in ((False, True), (True, False), (True, True)):
        inputs = numbers(SEQUENCE, IN).requires_grad_(of_input)
        weight, kept = own(numbers(OUT, IN), 0).requires_grad_(of_weight), []
        note = torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: kept.append(t.shape) or t, lambda t: t
        )
        with note:
            output = column_linear(inputs, weight, None, group())
        assert kept == [inputs.shape] * of_weight + [weight.shape] * of_input
        with counting() as counter:
            output.sum().backward()
        assert counter == ({"all_reduce": 1} if of_input else {})
        assert (inputs.grad is not None, weight.grad is not None) == (of_input, of_weight)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@on_ranks(2)
def test_second_derivatives(sequence_parallel):
    """The second derivative of a column and a row layer, with a bias each."""
    full = numbers(SEQUENCE, IN)
    up, down = numbers(OUT, IN, seed=1), numbers(IN, OUT, seed=2)
    up_bias, down_bias = numbers(OUT, seed=3), numbers(IN, seed=4)

    def loss_of(tensors, layers):
        hidden = layers[0](tensors[0], tensors[1], tensors[2]).tanh()
        return (layers[1](hidden, tensors[3], tensors[4]) ** 2).sum()

    def penalty(tensors, layers):
        tensors = [tensor.clone().requires_grad_() for tensor in tensors]
        loss = loss_of(tensors, layers)
        first = torch.autograd.grad(loss, tensors[0], create_graph=True)[0]
        return torch.autograd.grad((first**2).sum(), tensors)

    wanted = penalty([full, up, up_bias, down, down_bias], [F.linear, F.linear])
    here = own(full, 0) if sequence_parallel else full
    tensors = [here, own(up, 0), own(up_bias, 0), own(down, 1), down_bias]
    layers = [
        lambda x, weight, bias: column_linear(x, weight, bias, group(), sequence_parallel),
        lambda x, weight, bias: row_linear(x, weight, bias, group(), sequence_parallel),
    ]
    got = penalty(tensors, layers)
    wanted = [own(wanted[0], 0) if sequence_parallel else wanted[0]] + [
        own(gradient, dim) for gradient, dim in zip(wanted[1:4], (0, 0, 1), strict=True)
    ]
    for actual, expected in zip(got[:4], wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@on_ranks(2)
def test_without_gradients(sequence_parallel):
    inputs, weight, bias = numbers(SEQUENCE, IN), numbers(OUT, IN, seed=1), numbers(OUT, seed=2)
    output = F.linear(inputs, weight, bias)
    here = own(inputs, 0) if sequence_parallel else inputs
    with torch.no_grad(), counting() as counter:
        first = column_linear(here, own(weight, 0), own(bias, 0), group(), sequence_parallel)
        second = row_linear(own(inputs, -1), own(weight, 1), bias, group(), sequence_parallel)
    close(first, own(output, -1))
    close(second, own(output, 0) if sequence_parallel else output)
    assert sum(counter.values()) == (2 if sequence_parallel else 1)


@on_ranks(2, in_processes=True)
def test_without_gradients_autocast_casts_a_weight_once():
    # Threads share that cache, and one empties it for all.
    weight = torch.ones(4, 4, requires_grad=True)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        before = column_linear(torch.ones(1, 4), weight, None, group())
        weight.zero_()  # autocast has kept what it cast
        after = column_linear(torch.ones(1, 4), weight, None, group())
        double = column_linear(torch.ones(1, 4).double(), weight.double(), None, group())
    assert (before.dtype, double.dtype) == (torch.bfloat16, torch.float64)
    assert torch.equal(before, after)
