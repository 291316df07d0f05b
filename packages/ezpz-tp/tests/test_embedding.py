import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn

import ezpz_tp as tp
from ezpz_tp.testing import run_ranks

WIDTH = 12


def integers(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).double()


def some_ids(vocabulary):
    ids = torch.randint(vocabulary, (6, 4), generator=torch.Generator().manual_seed(0))
    ids[0, 0] = ids[1, 1] = 3
    return ids


def own_part(layer, full):
    state = tp.get_state()
    index, degree = state.index("tensor"), state.size("tensor")
    if isinstance(layer, tp.ParallelEmbedding):
        return full.chunk(degree, 1)[index]
    rows = layer.num_embeddings_per_partition
    padding = full.new_zeros(rows * degree - full.shape[0], full.shape[1])
    return torch.cat([full, padding])[index * rows : (index + 1) * rows]


def as_nn(kind, vocabulary, options, sequence_parallel):
    state = tp.get_state()
    more = {"sequence_parallel": True} if sequence_parallel else {}
    layer = kind(vocabulary, WIDTH, **options, **more, dtype=torch.float64, seed=1)
    full = integers(vocabulary, WIDTH, seed=1)
    expected = nn.Embedding(vocabulary, WIDTH, **options, _weight=full.clone())
    with torch.no_grad():
        layer.weight.copy_(own_part(layer, full))
    ids = some_ids(vocabulary)
    untouched = ids.clone()
    gradient = integers(*ids.shape, WIDTH, seed=2)
    output, whole = layer(ids), expected(ids)
    own = whole, gradient
    if sequence_parallel:
        own = [each.chunk(state.size("tensor"))[state.index("tensor")] for each in own]
    output.backward(own[1])
    whole.backward(gradient)
    assert torch.equal(ids, untouched)
    assert layer.weight.grad.is_sparse == expected.weight.grad.is_sparse
    pairs = [
        (output, own[0]),
        (layer.weight.grad.to_dense(), own_part(layer, expected.weight.grad.to_dense())),
        (layer.weight, own_part(layer, expected.weight)),
    ]
    # Columns are summed in another order.
    exact = kind is not tp.ParallelEmbedding or "max_norm" not in options
    for found, right in pairs:
        torch.testing.assert_close(found, right, rtol=0 if exact else 1e-14, atol=0)


OPTIONS = {
    "plain": {},
    "padding_idx": {"padding_idx": 3},
    "padding_idx from the end": {"padding_idx": -1},
    "max_norm": {"max_norm": 4.0, "padding_idx": 3},
    "max_norm of 1-norm": {"max_norm": 9.0, "norm_type": 1.0},
    "max_norm of 3-norm": {"max_norm": 4.0, "norm_type": 3.0},
    "max_norm of inf-norm": {"max_norm": 2.0, "norm_type": float("inf")},
    "scale_grad_by_freq": {"scale_grad_by_freq": True, "padding_idx": 3},
    "sparse": {"sparse": True, "padding_idx": 3},
}


# How the numbers themselves come out at other degrees and in other dtypes: test_lattice.
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("kind", [tp.VocabParallelEmbedding, tp.ParallelEmbedding])
def test_trap_5_all_options_do_what_they_do_in_nn_embedding(kind, options):
    for vocabulary, degree in ((16, 2), (5, 4), (13, 1)):
        run_ranks(as_nn, degree, kind, vocabulary, options, False)


@pytest.mark.parametrize("options", [{}, OPTIONS["scale_grad_by_freq"], OPTIONS["sparse"]])
def test_sequence_parallel(options):
    for degree in (1, 3):
        run_ranks(as_nn, degree, tp.VocabParallelEmbedding, 13, options, True)


def test_trap_13_alone_it_is_nn_embedding():
    for kind in (tp.VocabParallelEmbedding, tp.ParallelEmbedding):
        layer = kind(13, WIDTH, padding_idx=3, seed=1)
        expected = nn.Embedding(13, WIDTH, padding_idx=3, _weight=layer.weight.detach().clone())
        ids = some_ids(13)
        output = layer(ids)
        assert output.grad_fn.name() == "EmbeddingBackward0"
        assert torch.equal(output, expected(ids))
        assert layer.tp_group is None


def bad_ids(kind):
    layers = kind(13, WIDTH, max_norm=1.0, seed=1), kind(13, WIDTH, seed=1)
    for bad in (13, 15, 16, 1000, -1, -13):  # 16 rows at degree 4
        ids = some_ids(13)
        ids[2, 2] = bad
        name = rf"{kind.__name__}\(13, 12.*tp=\d/\d\)"
        for layer in layers:
            told = rf"{name}: id {bad} is not in the vocabulary; expected 0 to 12$"
            with pytest.raises(IndexError, match=told):
                layer(ids)
    assert layers[0](some_ids(13).int()).shape == (6, 4, WIDTH)
    assert layers[0](torch.empty(0, 4, dtype=torch.int64)).shape == (0, 4, WIDTH)


@pytest.mark.parametrize("kind", [tp.VocabParallelEmbedding, tp.ParallelEmbedding])
def test_trap_5_ids_outside_the_vocabulary_are_an_error_on_every_rank(kind):
    run_ranks(bad_ids, 4, kind)
    run_ranks(bad_ids, 1, kind)


@on_ranks(4)
def test_trap_5_an_uneven_vocabulary_is_padded_and_gradients_are_not_changed():
    # Its padding stays zero.
    layer = tp.VocabParallelEmbedding(5, WIDTH, seed=1)
    start, end = layer.vocab_start_index, layer.vocab_end_index
    assert (start, end) == [(0, 2), (2, 4), (4, 5), (5, 5)][tp.get_tensor_parallel_rank()]
    assert layer.weight.shape == (2, WIDTH)
    layer(torch.arange(5)).sum().backward()
    for values in (layer.weight, layer.weight.grad):
        assert values[: end - start].all()
        assert not values[end - start :].any()
    # A gradient that autograd shares, and one with a stride of 0, are not changed.
    layer = tp.VocabParallelEmbedding(13, WIDTH, seed=1)
    other = torch.zeros(6, 4, WIDTH, requires_grad=True)
    gradient = torch.ones(6, 4, WIDTH)
    (layer(some_ids(13)) + other * 1).backward(gradient)
    assert torch.equal(other.grad, gradient)
    assert gradient.unique().tolist() == [1]
    first = layer.weight.grad.clone()
    layer(some_ids(13)).sum().backward()
    assert torch.equal(layer.weight.grad, 2 * first)
    # Nor does a foreign row that is not a number come into the sum.
    with torch.no_grad():
        layer.weight[[0, -1]] = float("nan")
    assert layer(torch.tensor([1, 2, 5, 6, 9, 10])).isfinite().all()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2)
def test_second_derivatives(sequence_parallel):
    state = tp.get_state()
    index, degree = state.index("tensor"), state.size("tensor")
    options = {"seed": 1, "dtype": torch.float64}
    layer = tp.VocabParallelEmbedding(13, WIDTH, sequence_parallel=sequence_parallel, **options)
    full = tp.VocabParallelEmbedding(13, WIDTH, tp_group=state.group("data"), **options)
    ids = some_ids(13)
    scale, own_scale = (
        torch.ones(ids.shape, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    part = own_scale.chunk(degree)[index] if sequence_parallel else own_scale

    def first(layer, scale):
        loss = (layer(ids).pow(3) * scale.unsqueeze(-1)).sum()
        return torch.autograd.grad(loss, layer.weight, create_graph=True)[0]

    whole, own = first(full, scale), first(layer, part)
    torch.testing.assert_close(own, own_part(layer, whole))
    (expected,) = torch.autograd.grad(whole.pow(2).sum(), scale)
    (found,) = torch.autograd.grad(own.pow(2).sum(), own_scale)
    if sequence_parallel:  # without it each rank's own loss has the whole gradient
        dist.all_reduce(found, group=state.group("tensor"))
    torch.testing.assert_close(found, expected)


def compiled():
    torch._dynamo.reset()
    layers = [
        tp.VocabParallelEmbedding(13, WIDTH, padding_idx=3, seed=1),
        tp.VocabParallelEmbedding(13, WIDTH, padding_idx=3, seed=2, sequence_parallel=True),
        tp.ParallelEmbedding(13, WIDTH, padding_idx=3, seed=3),
    ]

    def together(ids):
        return sum(layer(ids).square().sum() for layer in layers)

    ids, results = some_ids(13), []
    for function in (together, torch.compile(together, fullgraph=True, backend="aot_eager")):
        loss = function(ids)
        loss.backward()
        results.append([loss, *(layer.weight.grad for layer in layers)])
        for layer in layers:
            layer.weight.grad = None
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager)


@pytest.mark.slow
def test_torch_compile_traces_them_whole():
    compiled()
    run_ranks(compiled, 2)


@on_ranks(4, tensor=2)
def test_groups_copies_and_names():
    state = tp.get_state()
    layer = tp.VocabParallelEmbedding(13, WIDTH, seed=1, tp_group=state.group("data"))
    assert layer.tp_rank == state.index("data")
    assert str(layer) == f"VocabParallelEmbedding(13, 12, tp={layer.tp_rank}/2)"
    named = tp.ParallelEmbedding(13, WIDTH, padding_idx=-1, max_norm=1.0, seed=1)
    rank = state.index("tensor")
    assert str(named) == f"ParallelEmbedding(13, 12, padding_idx=12, max_norm=1.0, tp={rank}/2)"
    master = tp.ParallelEmbedding(13, WIDTH, seed=1, keep_master_weight_for_test=True)
    assert torch.equal(master.master_weight, master.get_master_weight())
    assert torch.equal(own_part(master, master.master_weight), master.weight)
    turned = torch.arange(12).view(3, 4).t()
    straight = tp.VocabParallelEmbedding(13, WIDTH, seed=1)
    assert torch.equal(straight(turned), straight(turned.contiguous()))


def mistakes(early):
    told = r"VocabParallelEmbedding\(13, 12, tp=0/1\) was"
    with pytest.raises(tp.NotInitializedError, match=told):
        early(some_ids(13))
    told = "ParallelEmbedding: embedding_dim=13 is not divisible"
    with pytest.raises(tp.DegreeError, match=told):
        tp.ParallelEmbedding(13, 13)
    sequence = tp.VocabParallelEmbedding(13, WIDTH, seed=1, sequence_parallel=True)
    told = "dim 0 of the ids=3 is not divisible by the tensor-par"
    with pytest.raises(tp.DegreeError, match=told):
        sequence(torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="to have one of the following scalar types: Long, Int"):
        tp.VocabParallelEmbedding(13, WIDTH, seed=1)(torch.zeros(2))


def test_mistakes_are_errors_on_every_rank():
    early = tp.VocabParallelEmbedding(13, WIDTH, seed=1)
    run_ranks(mistakes, 2, early)
    with pytest.raises(tp.DegreeError, match=r"padding_idx=13 is not an id .* expected 0 to 12"):
        tp.VocabParallelEmbedding(13, WIDTH, padding_idx=13)
    with pytest.raises(tp.DegreeError, match="ParallelEmbedding: num_embeddings=0; expected at l"):
        tp.ParallelEmbedding(0, WIDTH)
    with pytest.raises(tp.ParallelError, match="the ids are on meta and the weight on cpu; move"):
        early(torch.zeros(2, dtype=torch.int64, device="meta"))
