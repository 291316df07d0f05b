import functools
import warnings
from types import SimpleNamespace

import pytest
import torch
from on_ranks import MemoryWatch, on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import init

import ezpz_tp as tp
from ezpz_tp import _init as _initialize
from ezpz_tp import mpu
from ezpz_tp import tensor_parallel as megatron
from ezpz_tp._current import tensor_group
from ezpz_tp._init import agree_on_seed
from ezpz_tp.model_parallel_config import ModelParallelConfig
from ezpz_tp.testing import run_ranks


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(_initialize, "TILE", 1 << 9)
    monkeypatch.setattr(_initialize, "_NARROWEST", 8)


def shards(shape, dim, degree, method, seed=1, stride=1, dtype=torch.float32):
    held = list(shape)
    held[dim] = -(-shape[dim] // degree)
    parts = [torch.full(held, float("nan"), dtype=dtype) for _ in range(degree)]
    for index, part in enumerate(parts):
        tp.initialize_shard(part, shape, dim, index, degree, method, seed=seed, stride=stride)
    pieces = [part.chunk(stride, dim) for part in parts]
    joined = torch.cat([piece[number] for number in range(stride) for piece in pieces], dim)
    return parts, joined.narrow(dim, 0, shape[dim])


def whole(shape, dim, method, seed=1, dtype=torch.float32):
    return shards(shape, dim, 1, method, seed, dtype=dtype)[1]


METHODS = {
    "xavier_normal": init.xavier_normal_,
    "xavier_uniform": functools.partial(init.xavier_uniform_, gain=2.0),
    "kaiming_normal": init.kaiming_normal_,
    "kaiming_uniform": functools.partial(init.kaiming_uniform_, a=5**0.5),
    "kaiming_uniform of fan_out": functools.partial(init.kaiming_uniform_, mode="fan_out"),
    "xavier without a generator": functools.partial(init.xavier_uniform_, generator=None),
    "kaiming without a generator": functools.partial(init.kaiming_normal_, generator=None),
    "normal": functools.partial(init.normal_, std=0.02),
    "uniform": functools.partial(init.uniform_, a=-2.0),
    "trunc_normal": functools.partial(init.trunc_normal_, std=0.02),
    "ones": init.ones_,
    "zeros": init.zeros_,
    "constant": functools.partial(init.constant_, val=3.0),
}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
@pytest.mark.parametrize("dim", [0, 1])
def test_trap_3_the_full_weight_is_the_same_at_every_degree(method, dim, monkeypatch):
    # None of these needs the full weight on any rank.
    monkeypatch.setattr(_initialize, "_draw_whole", None)
    shape = (48, 72)
    expected = whole(shape, dim, method)
    for degree in (2, 3, 5, 8):
        assert torch.equal(shards(shape, dim, degree, method)[1], expected)
    # A fifth of 48 or 72 is rounded up: the last rank's rows past the end are zero.
    last = shards(shape, dim, 5, method)[0][-1]
    real = shape[dim] - 4 * last.shape[dim]
    assert not last.narrow(dim, real, last.shape[dim] - real).any()
    for stride in (2, 3):
        assert torch.equal(shards(shape, dim, 4, method, stride=stride)[1], expected)


def test_tiles_that_draw_again_and_more_ranks_than_rows():
    method = functools.partial(init.trunc_normal_, a=1.0, b=3.0)
    expected = whole((9, 24), 0, method)
    assert expected.min() >= 1
    assert expected.max() <= 3
    assert torch.equal(shards((9, 24), 0, 4, method)[1], expected)

    parts, together = shards((5, 3), 0, 4, init.normal_)
    assert [part.shape[0] for part in parts] == [2] * 4
    assert torch.equal(together, whole((5, 3), 0, init.normal_))
    assert parts[2][0].all()
    assert not parts[2][1].any()
    assert not parts[3].any()


@pytest.mark.usefixtures("small_tiles")
def test_shapes_of_other_ranks_and_no_tile_twice():
    for shape in ((96,), (6, 20, 12)):
        for dim in range(len(shape)):
            expected = whole(shape, dim, init.normal_)
            assert torch.equal(shards(shape, dim, 2, init.normal_)[1], expected)
    replicated = torch.empty(6, 20)
    tp.initialize_shard(replicated, (6, 20), None, 1, 2, init.normal_, seed=1)
    assert torch.equal(replicated, whole((6, 20), 0, init.normal_))
    # No tile repeats another.
    weights = [whole((640, 32), 0, init.normal_, seed) for seed in range(40)]  # of 40 tiles each
    begins = torch.cat([weight.view(40, 512)[:, :16] for weight in weights])
    assert begins.unique(dim=0).shape == begins.shape


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_a_weight_of_one_tile_is_torchs(method):
    """Fans and bounds are those of the full weight: at degree 4, too."""
    expected = torch.empty(8, 40)
    with torch.random.fork_rng():
        torch.manual_seed(_initialize.derive_tile_seed(1, 0))
        method(expected)
    assert torch.equal(shards((8, 40), 0, 4, method)[1], expected)


@pytest.mark.usefixtures("small_tiles")
def test_trap_3_no_rank_makes_more_than_a_tile_at_once():
    for dim, held in ((0, (64, 512)), (1, (512, 64))):
        part = torch.empty(held)
        with MemoryWatch(part) as memory:
            tp.initialize_shard(part, (512, 512), dim, 3, 8, init.normal_, seed=1)
        assert memory.largest <= 4 * (1 << 9)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_trap_11_half_precision_is_drawn_in_fp32_and_rounded(dtype):
    expected = whole((48, 72), 1, init.trunc_normal_)
    _, together = shards((48, 72), 1, 4, init.trunc_normal_, dtype=dtype)
    assert torch.equal(together, expected.to(dtype))
    wide = whole((48, 72), 1, init.normal_, dtype=torch.float64)
    assert not torch.equal(wide, wide.float().double())


def test_an_init_method_with_a_generator_advances_it_as_much_on_every_rank():
    states = []
    for index in range(4):
        generator = torch.Generator().manual_seed(3)
        method = functools.partial(init.normal_, generator=generator)
        tp.initialize_shard(torch.empty(2, 3), (5, 3), 0, index, 4, method, seed=1)
        states.append(generator.get_state())
    assert all(torch.equal(state, states[0]) for state in states)


def normalized(weight):
    weight.normal_().div_(weight.norm())


OTHERS = {
    "orthogonal": init.orthogonal_,
    "sparse": functools.partial(init.sparse_, sparsity=0.5),
    "from data": lambda weight: weight.copy_(torch.arange(weight.numel()).view(weight.shape)),
    "normalized": normalized,
    "own generator": lambda weight: weight.normal_(generator=torch.Generator().manual_seed(5)),
}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("method", OTHERS.values(), ids=OTHERS.keys())
def test_any_other_callable_draws_the_whole_weight(method):
    before = torch.get_rng_state()
    expected = torch.empty(48, 72)
    with torch.random.fork_rng():
        torch.manual_seed(_initialize.derive_tile_seed(1, 0))
        method(expected)
    for dim, degree in ((0, 1), (0, 4), (1, 3), (0, 5)):
        assert torch.equal(shards((48, 72), dim, degree, method)[1], expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_large_whole_weight_is_warned_of(monkeypatch):
    monkeypatch.setattr(_initialize, "_LARGE", 1 << 20)
    part = torch.empty(256, 1024)
    with pytest.warns(UserWarning, match=r"\(512, 1024\) draws all of it, 2 MiB, .* normalized "):
        tp.initialize_shard(part, (512, 1024), 0, 0, 2, normalized, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tp.initialize_shard(part[:128], (256, 1024), 0, 0, 2, init.normal_, seed=1)


def test_errors_of_the_init_method_are_its_own():
    with pytest.raises(ValueError, match="Fan in and fan out can not be computed"):
        tp.initialize_shard(torch.empty(2), (4,), 0, 0, 2, init.xavier_normal_, seed=1)
    # On meta it is not called.
    tp.initialize_shard(torch.empty(2, device="meta"), (4,), 0, 0, 2, init.xavier_normal_, seed=1)


@pytest.mark.parametrize(
    "case",
    [
        ((3, 4), (8, 4), 0, (0, 2), 1, r"\(8, 4\), split along dim 0 over 2 .* \(4, 4\)"),
        ((4, 5), (8, 4), 0, (0, 2), 1, r"shape \(4, 5\) is no part of a weight"),
        ((5, 4), (9, 4), 0, (0, 2), 5, r"add up to 5; expected 9"),
        ((4, 4), (8, 4), 0, (2, 2), 1, r"rank 2 of degree 2; expected 0 to 1"),
        ((4, 4), (8, 4), None, (0, 2), 1, r"shape \(4, 4\) is no part .* expected \(8, 4\)"),
    ],
)
def test_shapes_that_do_not_fit(case):
    held, full, dim, place, stride, message = case
    with pytest.raises(tp.DegreeError, match=message):
        tp.initialize_shard(
            torch.empty(held), full, dim, *place, init.normal_, seed=1, stride=stride
        )


def layers(seed=None, device=None):
    torch.manual_seed(7)
    return nn.ModuleList(
        [
            tp.VocabParallelEmbedding(21, 12, padding_idx=20, seed=seed, device=device),
            tp.ColumnParallelLinear(12, 24, stride=2, seed=seed, device=device),
            tp.RowParallelLinear(24, 12, stride=2, seed=seed, device=device),
            tp.ParallelEmbedding(21, 12, padding_idx=2, seed=seed, device=device),
        ]
    )


def full_weights(seed=None, device=None):
    made = layers(seed, device)
    if device is not None:
        made.to_empty(device="cpu")
        torch.manual_seed(7)
        for layer in made:
            layer.reset_parameters()
    return [layer.get_master_weight() for layer in made]


def all_ways():
    # Ranks that do not agree on a seed: the first one's counts.
    state = tp.get_state()
    agreed = full_weights()
    torch.manual_seed(100 + state.index("tensor"))
    drawn = agree_on_seed(None, tensor_group(), "meta"), agree_on_seed(5, tensor_group())
    return agreed, full_weights(device="meta"), full_weights(seed=3), drawn


def test_a_seed_is_drawn_where_the_weight_is(monkeypatch):
    """So that a script that seeds the accelerator alone, as Megatron's do, decides its weights."""
    places, draw = [], torch.randint

    def noted(*args, device, **options):
        places.append(device.type)
        return draw(*args, **options)  # there may be no accelerator

    monkeypatch.setattr(torch, "randint", noted)
    for device in ("cuda", "meta", None):
        agree_on_seed(None, None, device)
    assert places == ["cuda", "cpu", "cpu"]


def test_trap_3_layers_have_the_same_weights_at_every_degree_and_by_way_of_meta():
    expected, given = full_weights(), full_weights(seed=3)
    assert not expected[0][20].any()
    assert not expected[3][2].any()
    torch.manual_seed(100)
    seed = agree_on_seed(None, None)
    for agreed, by_meta, seeded, drawn in run_ranks(all_ways, 2):
        assert drawn == (seed, 5)
        for found in zip(expected, agreed, by_meta, given, seeded, strict=True):
            assert torch.equal(found[0], found[1])
            assert torch.equal(found[0], found[2])
            assert torch.equal(found[3], found[4])
    # Also on ranks that share torch's generators.
    expected = full_weights(seed=3)
    for found in run_ranks(full_weights, 3, 3):
        assert all(map(torch.equal, found, expected))


@on_ranks(4, tensor=2)
def test_parameters_of_fsdp_are_initialized_where_they_are():
    state, expected = tp.get_state(), full_weights(seed=3)
    made, index = layers(seed=3, device="meta"), state.index("tensor")
    for layer in made:
        fully_shard(layer, mesh=state.to_mesh("cpu")["dp"])
    made.to_empty(device="cpu")
    for layer in made:
        layer.reset_parameters()
    rows, up, down, columns = (layer.weight.full_tensor() for layer in made)
    assert torch.equal(rows[: 11 - index], expected[0][11 * index :][:11])
    assert not rows[11 - index :].any()
    for dim, (found, full) in enumerate(zip((up, down), expected[1:3], strict=True)):
        pieces = full.chunk(4, dim)
        assert torch.equal(found, torch.cat([pieces[index], pieces[2 + index]], dim))
    assert torch.equal(columns, expected[3].chunk(2, 1)[index])


def dtypes_of(dtype):
    """What is made of a dtype at every front door that takes one."""
    config = ModelParallelConfig(params_dtype=dtype, pipeline_dtype=dtype)
    foreign = SimpleNamespace(params_dtype=dtype)  # which nothing has converted
    narrow = torch.ones(2, 4, dtype=torch.bfloat16)
    linear = megatron.linear_with_grad_accumulation_and_async_allreduce
    product = linear(narrow, narrow, None, False, False, False, output_dtype=dtype)
    neox = mpu.VocabParallelEmbedding(8, 4, neox_args=foreign)
    column = megatron.ColumnParallelLinear(
        4, 4, config=foreign, init_method=init.ones_, output_dtype=dtype
    )
    return {
        config.params_dtype,
        config.pipeline_dtype,
        product.dtype,
        neox.weight.dtype,
        column.weight.dtype,
        tp.ColumnParallelLinear(4, 4, dtype=dtype).weight.dtype,
        tp.RowParallelLinear(4, 4, dtype=dtype).weight.dtype,
        tp.ParallelEmbedding(8, 4, dtype=dtype).weight.dtype,
        tp.VocabParallelEmbedding(8, 4, dtype=dtype).weight.dtype,
        mpu.GlobalMemoryBuffer().get_tensor([2], dtype, "it").dtype,
        tp.broadcast_data(["x"], {"x": narrow}, dtype)["x"].dtype,
    }


def test_dtypes_are_taken_by_name():
    for name in (torch.bfloat16, "bfloat16", "torch.bfloat16", "bf16"):
        assert dtypes_of(name) == {torch.bfloat16}
    with pytest.raises(ValueError, match=r"type 'bf15'; expected one of bf16.* torch\.dtype"):
        tp.ColumnParallelLinear(4, 4, dtype="bf15")
