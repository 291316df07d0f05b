"""Full tensors from the parts that ranks hold, and back, in memory."""

import copy
from functools import partial

import pytest
import torch
from files import assert_same
from on_ranks import on_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict

import ezpz_tp
from ezpz_tp import (
    ColumnParallelLinear,
    DegreeError,
    ParallelError,
    ParallelState,
    Piece,
    dtensor_state_dict,
    load_dtensor_state_dict,
)
from ezpz_tp._shard import Shard, set_shard, shard_of
from ezpz_tp._state_dict import gather_state_dict, shard_state_dict
from ezpz_tp.testing import assert_matches_unsharded, run_ranks

DTYPES = (
    torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.int64, torch.uint8,
    torch.uint16, torch.float8_e4m3fn,
)  # fmt: skip


class Model(nn.Module):
    """Every way in which a tensor is split, in several dtypes."""

    def __init__(self):
        super().__init__()
        self.embedding = ezpz_tp.VocabParallelEmbedding(45, 16, seed=1)
        self.qkv = ColumnParallelLinear(16, 64, stride=(32, 16, 16), gather_output=False, seed=2)
        self.glu = ColumnParallelLinear(16, 48, stride=2, gather_output=False, seed=3)
        self.down = ezpz_tp.RowParallelLinear(
            24, 16, stride=(16, 8), input_is_parallel=True, seed=4
        )
        self.column = ColumnParallelLinear(16, 16, seed=6)
        self.columns = ezpz_tp.ParallelEmbedding(13, 16, seed=7)
        self.norm = nn.LayerNorm(16, dtype=torch.bfloat16)
        self.head = ColumnParallelLinear(16, 45, pad_output=True, seed=5).to(torch.bfloat16)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("scale", torch.tensor(1.5))


def adam_of(module, **options):
    """An optimizer whose state tells where each of its numbers belongs."""
    plain = [one for one in module.parameters() if one.dim() == 1]
    rest = [one for one in module.parameters() if one.dim() > 1]
    groups = [{"params": rest, "weight_decay": 0.1}, {"params": plain, "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, **options)
    for parameter in module.parameters():
        if parameter.requires_grad:
            state = optimizer.state[parameter]
            state["step"] = torch.tensor(7.0)
            state["exp_avg"] = parameter.detach() * 2
            state["exp_avg_sq"] = parameter.detach().float().square()
    return optimizer


def gathered(**options):
    module = Model()
    return gather_state_dict(module, optimizer=adam_of(module), **options)


@pytest.fixture(scope="module")
def whole():
    """What one rank alone has, by torch's own means."""
    module = Model()
    model, optimizer = get_state_dict(module, adam_of(module))
    return {"model": model, "optimizer": optimizer}


def cut_and_loaded(full):
    """The parts of this rank, in a model that had other values."""
    module = Model()
    optimizer = adam_of(module)
    with torch.no_grad():
        for value in [*module.parameters(), *module.buffers()]:
            value.fill_(float("nan"))
    for group in optimizer.param_groups:
        group["lr"] = 99.0
    parts = shard_state_dict(full, module, optimizer=optimizer)
    module.load_state_dict(parts["model"])
    optimizer.state.clear()
    optimizer.load_state_dict(parts["optimizer"])
    fresh = Model()
    assert_same(module.state_dict(), fresh.state_dict())  # the padding too
    for layer in ("qkv", "down"):  # of unequal matrices
        assert torch.equal(
            fresh.get_submodule(layer).get_master_weight(), full["model"][f"{layer}.weight"]
        )
    states = adam_of(fresh).state
    for one, other in zip(module.parameters(), fresh.parameters(), strict=True):
        if one in optimizer.state:
            assert torch.equal(optimizer.state[one]["exp_avg"], states[other]["exp_avg"])
    return gather_state_dict(module, optimizer=optimizer)


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_the_whole_is_what_one_rank_has_and_its_parts_what_each_rank_had(degree, whole):
    for found in run_ranks(gathered, degree):
        assert_same(found, whole)
        assert list(found["model"]) == list(whole["model"])
    # torch's AdamW casts its state to the parameter's dtype when it loads it.
    expected = copy.deepcopy(whole)
    for name, state in expected["optimizer"]["state"].items():
        state["exp_avg_sq"] = state["exp_avg_sq"].to(whole["model"][name].dtype)
    for found in run_ranks(cut_and_loaded, degree, whole):
        assert_same(found, expected)


class Stage(nn.Module):
    """A pipeline's stage with a tied embedding, named as in the whole model."""

    def __init__(self, stage, count, layers=4):
        super().__init__()
        if stage in (0, count - 1):
            self.embedding = ezpz_tp.VocabParallelEmbedding(45, 16, seed=1)
            if count > 1:
                self.embedding.weight.shared_embedding = True
        each = layers // count
        self.layers = nn.ModuleDict(
            {
                str(number): ColumnParallelLinear(16, 16, seed=10 + number, dtype=torch.float16)
                for number in range(stage * each, (stage + 1) * each)
            }
        )
        if stage == count - 1:
            self.norm = nn.LayerNorm(16)
        self.register_buffer("frequencies", torch.arange(3.0))


def own_stage():
    state = ezpz_tp.get_state()
    return Stage(state.index("pipeline"), state.size("pipeline"))


def staged(**options):
    module = own_stage()
    return gather_state_dict(module, optimizer=adam_of(module), **options)


def sorted_groups(full):
    for group in full["optimizer"]["param_groups"]:
        group["params"].sort()
    return full


@pytest.mark.parametrize("pipeline", [2, 4])
def test_stages_are_joined_and_a_tied_embedding_is_there_once(pipeline):
    expected = sorted_groups(run_ranks(staged, 1)[0])
    for found in run_ranks(staged, 2 * pipeline, pipeline=pipeline):
        assert_same(sorted_groups(found), expected)
    # Left where they are joined, by two replicas.
    for found in run_ranks(partial(staged, device=None), 4 * pipeline, pipeline=pipeline, tensor=2):
        assert_same(sorted_groups(found), expected)


def test_a_stage_takes_its_own_of_the_whole():
    def cut_for_a_stage(full):
        module, expected = own_stage(), own_stage()
        with torch.no_grad():
            for value in module.parameters():
                value.zero_()
        module.load_state_dict(shard_state_dict(full, module))
        assert_same(module.state_dict(), expected.state_dict())
        full = {"model": full, "optimizer": {"state": {}, "param_groups": []}}
        with pytest.raises(ParallelError, match=r"group 0 of the optimizer has .* were in no grou"):
            shard_state_dict(full, module, optimizer=adam_of(module))

    run_ranks(cut_for_a_stage, 4, run_ranks(staged, 1)[0]["model"], pipeline=2)


class Wide(nn.Module):
    def __init__(self, index, degree):
        super().__init__()
        for dtype in DTYPES:
            shard = Shard((3, 8), 1, blocks=(4, 4))
            full = (torch.arange(24).view(3, 8) % 2).to(dtype)
            pieces = [full[:, at : at + n] for _, at, n in shard.pieces(index, degree)]
            part = torch.cat([piece.view(torch.uint8) for piece in pieces], 1).view(dtype)
            set_shard(part, shard)
            self.register_buffer(str(dtype).replace(".", "_"), part)
        self.register_buffer("empty", torch.zeros(0, 8 // degree))
        set_shard(self.empty, Shard((0, 8), 1), degree)


@on_ranks(2)
def test_every_dtype_is_joined_bit_for_bit():
    state = ezpz_tp.get_state()
    found = gather_state_dict(Wide(state.index("tensor"), state.size("tensor")))
    expected = Wide(0, 1).state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_same(found[name].view(torch.uint8), value.view(torch.uint8), name)


class WithExtraState(nn.Linear):
    seen = None

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


class WithTensorState(WithExtraState):
    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


@pytest.mark.parametrize(
    ("made", "values"),
    [
        (WithExtraState, (5, "text")),
        (WithTensorState, (torch.arange(3.0), torch.zeros(0))),  # of another length each time
    ],
)
@on_ranks(2)
def test_extra_state_is_passed_on(made, values):
    for value in values:
        module, twin, other = made(2, 2), made(2, 2), made(2, 2)
        module.seen = value
        twin.seen = other.seen = values[0]
        twin.load_state_dict(shard_state_dict(gather_state_dict(module), twin))
        load_dtensor_state_dict(other, dtensor_state_dict(module))
        assert_same(twin.seen, value)
        assert_same(other.seen, value)


def named(count, stage):
    layers = range(stage * 4 // count, (stage + 1) * 4 // count)
    module = nn.ModuleDict({f"layer{number}": nn.Linear(2, 2) for number in layers})
    return module, torch.optim.SGD(module.named_parameters(), lr=0.5)


def gather_named():
    state = ezpz_tp.get_state()
    module, optimizer = named(state.size("pipeline"), state.index("pipeline"))
    return gather_state_dict(module, optimizer=optimizer)


def load_named(full):
    state = ezpz_tp.get_state()
    module, optimizer = named(state.size("pipeline"), state.index("pipeline"))
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.load_state_dict(shard_state_dict(full, module, optimizer=optimizer)["optimizer"])
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.5
    assert group["param_names"] == [name for name, _ in module.named_parameters()]
    optimizer.param_groups[0]["lr"] = 0.1
    other, theirs = named(state.size("pipeline"), state.index("pipeline"))
    load_dtensor_state_dict(
        module, dtensor_state_dict(other, optimizer=theirs), optimizer=optimizer
    )
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert group["param_names"] == [name for name, _ in module.named_parameters()]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4)])
def test_names_of_parameters_are_no_option_of_a_group(before, after):
    full = run_ranks(gather_named, before, pipeline=before)[0]
    run_ranks(load_named, after, full, pipeline=after)


@on_ranks(2)
def test_parameters_that_have_other_names_in_the_state_dict():
    """A wrapper whose hooks take its own name out of those in the state dict."""
    layer = ColumnParallelLinear(4, 8, seed=1)
    module, twin = nn.Sequential(checkpoint_wrapper(layer)), nn.Sequential(copy.deepcopy(layer))
    full = gather_state_dict(module, optimizer=adam_of(module))
    assert_same(full, gather_state_dict(twin, optimizer=adam_of(twin)))
    assert_same(shard_state_dict(full["model"], module), dict(twin.state_dict()))


@on_ranks(2)
def test_groups_of_ones_own():
    group = ezpz_tp.get_tensor_parallel_group()
    state = ParallelState.from_groups(tensor=group)
    layer = ColumnParallelLinear(4, 8, tp_group=group, seed=1)
    found = gather_state_dict(layer, state=state)
    assert torch.equal(found["weight"], layer.get_master_weight())


class Failing(nn.Linear):
    def get_extra_state(self):
        return {0: None}[ezpz_tp.get_state().rank % 2]


def column(**attributes):
    module = ColumnParallelLinear(4, 4, bias=False)
    vars(module.weight).update(attributes)
    return module


def layer(state, made=nn.Linear):
    return nn.ModuleDict({str(state.index("pipeline")): made(2, 2)})


def not_sendable(state):
    module = layer(state, WithExtraState)
    module[str(state.index("pipeline"))].seen = lambda: None
    return module


def sparse(_):
    module = nn.Linear(4, 4)
    module.register_buffer("eye", torch.eye(4).to_sparse())
    return module


def expert(state):
    group = state.group("tensor")
    return column(allreduce=False), {"state": ParallelState.from_groups(tensor=group, expert=group)}


def odd_state(_):
    module = column()
    optimizer = torch.optim.SGD(module.parameters())
    optimizer.state[module.weight]["row"] = torch.zeros(4, 1)
    return module, {"optimizer": optimizer}


def one_optimizer(state):
    module = layer(state)
    return module, {} if state.rank else {"optimizer": torch.optim.SGD(module.parameters())}


def other_groups(state):
    module, stage = layer(state), state.index("pipeline")
    return module, {"optimizer": torch.optim.SGD(module.parameters(), lr=0.1 * (1 + stage))}


def more_groups(state):
    module = layer(state)
    weight, bias = module.parameters()
    groups = [{"params": weight}, {"params": bias}][: 2 - state.index("pipeline")]
    return module, {"optimizer": torch.optim.SGD(groups)}


PROBLEMS = {
    "stages 0 and 1 both have '0.weight', with other values; expected a tied": (
        lambda state: nn.Sequential(ColumnParallelLinear(4, 4, seed=state.index("pipeline"))), 2
    ),
    "stages 0 and 1 both have 'weight', with Entry(name='weight'": (
        lambda state: nn.Linear(4, 4 + state.index("pipeline")), 2
    ),
    "ranks 0 and 1 of stage 0 hold parts of other tensors: Entry(name='bias'": (
        lambda state: nn.Linear(4, 4, bias=not state.index("tensor")), 1
    ),
    "rank 1: 'weight' is on the meta device": (
        lambda state: ColumnParallelLinear(
            4, 4, device="meta" if state.index("tensor") else None, seed=1
        ), 1
    ),
    "ParallelError rank 1: KeyError: 1": (lambda _: Failing(4, 4), 1),
    "rank 0: AttributeError: Can't pickle local object": (not_sendable, 2),
    "'eye' is of torch.sparse_coo; expected a dense tensor": (sparse, 1),
    "hold parts of other tensors: but one has an optimizer; expected": (one_optimizer, 1),
    "an optimizer was given, but not on pipeline stage 1; expected one on": (one_optimizer, 2),
    "'weight' is an expert's (allreduce is False), split over expert groups": (expert, 1),
    "parameter 0 of group 0 of the optimizer, of shape (3,), is none of Linear's": (
        lambda _: (
            nn.Linear(4, 4),
            {"optimizer": torch.optim.SGD([torch.zeros(3, requires_grad=True)])},
        ), 1
    ),
    "'row' of 'weight' in the optimizer has shape (4, 1); expected that of its": (odd_state, 1),
    "DegreeError rank 0: 'weight' has shape (2, 4); expected (6, 4), rank 0 of 2's part": (
        lambda _: column(full_shape=(12, 4)), 1
    ),
    "DegreeError rank 0: 'weight': dim 0 of a tensor of full shape (5, 4) does not": (
        lambda _: column(full_shape=(5, 4)), 1
    ),
    "group 0 of the optimizer has lr=0.2 on pipeline stage 1 and 0.1 on": (other_groups, 2),
    "the optimizer has 1 parameter groups on pipeline stage 1 and 2 on stage": (more_groups, 2),
}  # fmt: skip


@pytest.mark.parametrize("message", PROBLEMS)
def test_what_cannot_be_joined_is_said_on_every_rank(message):
    make, pipeline = PROBLEMS[message]

    def fails():
        made = make(ezpz_tp.get_state())
        module, given = made if isinstance(made, tuple) else (made, {})
        with pytest.raises(ParallelError) as caught:
            gather_state_dict(module, **given)
        return f"{type(caught.value).__name__} {caught.value}"

    (found,) = set(run_ranks(fails, 2, pipeline=pipeline))
    assert message in found


def test_a_full_tensor_of_another_shape_is_said():
    layer = ColumnParallelLinear(4, 8, bias=False)
    message = r"'weight' has shape \(7, 4\); expected \(8, 4\), the full"
    with pytest.raises(DegreeError, match=message):
        shard_state_dict({"weight": torch.zeros(7, 4)}, layer)
    optimizer = torch.optim.SGD(layer.parameters())
    message = r"expected {'model', 'optimizer'}.* found \['weight'\]"
    with pytest.raises(ParallelError, match=message):
        shard_state_dict({"weight": torch.zeros(8, 4)}, layer, optimizer=optimizer)


def test_what_is_missing_or_too_much_is_for_load_state_dict_to_judge():
    layer = ColumnParallelLinear(4, 8)
    parts = shard_state_dict({"weight": torch.zeros(8, 4), "other": torch.zeros(1)}, layer)
    assert parts.keys() == {"weight", "other"}


# What each rank holds of a full tensor, and how parameters say it.


SHARDS = [
    Shard((24, 3), 0),
    Shard((3, 24, 2), 1),
    Shard((3, 24), -1),
    Shard((24,), 0, blocks=(12, 12)),
    Shard((5, 24), 1, blocks=(16, 4, 4)),
    Shard((48, 2), 0, blocks=(24, 0, 24)),
    Shard((13, 2), 0, padded=True),
    Shard((2, 3), 0, padded=True),
    Shard((0, 3), 0, padded=True),
]


def part_of(full, shard, index, degree):
    """The same from torch's own functions: chunks of each block, then zeros up to the size."""
    blocks = full.split(shard.blocks, shard.dim) if shard.blocks else [full]
    none = full.narrow(shard.dim, 0, 0)
    part = torch.cat(
        [(*b.chunk(degree, shard.dim), *[none] * degree)[index] for b in blocks], shard.dim
    )
    missing = -(-full.shape[shard.dim] // degree) - part.shape[shard.dim]
    padding = list(full.shape)
    padding[shard.dim] = missing
    return torch.cat([part, torch.zeros(padding, dtype=full.dtype)], shard.dim)


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("shard", SHARDS, ids=repr)
def test_pieces_are_the_chunks_of_each_block(shard, degree):
    full = torch.arange(1, 1 + torch.Size(shard.full_shape).numel()).view(shard.full_shape)
    joined = torch.zeros_like(full)
    for index in range(degree):
        part = torch.zeros(shard.local_shape(index, degree), dtype=full.dtype)
        for local, start, length in shard.pieces(index, degree):
            assert length > 0
            piece = full.narrow(shard.dim, start, length)
            part.narrow(shard.dim, local, length).copy_(piece)
            joined.narrow(shard.dim, start, length).add_(piece)
        assert torch.equal(part, part_of(full, shard, index, degree))
        for local, box in shard.boxes(index, degree):
            assert torch.equal(part[local.slices], full[box.slices])
        low = Piece((0,) * full.dim(), tuple((size + 1) // 2 for size in part.shape))
        for local, box in shard.boxes(index, degree, low):  # of less than all
            assert local.overlap(low) == local
            assert torch.equal(part[local.slices], full[box.slices])
    assert torch.equal(joined, full)  # each element once


def test_what_is_not_split_is_one_piece_everywhere():
    assert Shard((4,), 0, blocks=(4,)) == Shard([4], -1)  # one block is none
    for shape in ((), (3,), (2, 0, 5)):
        assert Shard(shape).local_shape(3, 4) == shape
        assert Shard(shape).pieces(3, 4) == ((0, 0, shape[0] if shape else 1),)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shard((4, 4), 2), r"dim 2 of a tensor of shape \(4, 4\); expected 0 to 1"),
        (lambda: Shard((4, 4), blocks=(4,)), "give the dim"),
        (lambda: Shard((4,), 0, (2, 1)), r"blocks \(2, 1\) add up to 3; expected 4, dim 0"),
        (lambda: Shard((4,), 0, (2, 2), padded=True), "cannot be padded"),
        (lambda: Shard((6, 4), 0).local_shape(0, 4), r"\(6, 4\) does not divide: 6 over degree 4"),
        (
            lambda: Shard((12,), 0, (8, 2, 2)).pieces(0, 4),
            r"stacked of \(8, 2, 2\), does not divide: 2 over degree 4; .* divides 2",
        ),
        (lambda: Shard((4,), 0).pieces(2, 2), "rank 2 of degree 2; expected 0 to 1"),
        (lambda: Shard((4,), 0).local_shape(0, 0), "rank 0 of degree 0"),
    ],
)
def test_what_does_not_fit_is_said(make, message):
    with pytest.raises(DegreeError, match=message):
        make()


def test_megatron_attributes_alone_are_understood_with_a_degree():
    parameter = nn.Parameter(torch.zeros(4, 6))
    ezpz_tp.set_tensor_model_parallel_attributes(parameter, True, 1, 2)
    assert shard_of(parameter) is None
    assert shard_of(parameter, 4) == Shard((4, 24), 1, blocks=(12, 12))
    whole = nn.Parameter(torch.zeros(4, 6))
    ezpz_tp.set_tensor_model_parallel_attributes(whole, False, 1, 1)
    assert shard_of(whole) == Shard((4, 6), 1)
    odd = nn.Parameter(torch.zeros(4, 3))
    ezpz_tp.set_tensor_model_parallel_attributes(odd, True, 1, 4)
    with pytest.raises(DegreeError, match=r"partition_stride 4, which does not divide 6"):
        shard_of(odd, 2)


def test_of_a_parameter_of_ones_own_it_can_be_said():
    parameter = nn.Parameter(torch.zeros(8, 4))
    set_shard(parameter, Shard((16, 4), 0, blocks=(8, 4, 4)))
    assert shard_of(parameter) == Shard((16, 4), 0, blocks=(8, 4, 4))
    found = parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride
    assert found == (True, 0, 3)
    set_shard(parameter, Shard((8, 4), 0))
    assert not parameter.tensor_model_parallel
    set_shard(parameter, Shard((8, 4), 0, padded=True), degree=1)
    for shard, degree in ((Shard((16, 5), 0), None), (Shard((8, 4, 1), 0), None)):
        with pytest.raises(DegreeError, match=r"shape \(8, 4\) is no part of Shard"):
            set_shard(parameter, shard, degree)
    with pytest.raises(DegreeError, match=r"at degree 4; expected \(4, 4\)"):
        set_shard(parameter, Shard((16, 4), 0), 4)
    # What is copied with Megatron's attributes, as to a master weight.
    layer = ColumnParallelLinear(16, 64, stride=(32, 16, 16))
    master = nn.Parameter(layer.weight.float())
    ezpz_tp.copy_tensor_model_parallel_attributes(master, layer.weight)
    assert shard_of(master) == Shard((64, 16), 0, blocks=(32, 16, 16))


class Grouped(nn.Module):
    """Two queries for each key and value, of one product: as in grouped-query attention."""

    def __init__(self, qkv, out):
        super().__init__()
        self.qkv, self.out = qkv, out

    def forward(self, input_):
        each = self.qkv.weight.shape[0] // 4
        query, key, value = self.qkv(input_).split([2 * each, each, each], -1)
        query = query.unflatten(-1, (-1, 2, 2))  # key's heads, queries for each, size of a head
        key, value = (part.unflatten(-1, (-1, 1, 2)) for part in (key, value))
        return self.out((query * key + value).flatten(-3))


def test_a_fused_projection_computes_what_the_unsharded_one_does():
    def parallel():
        qkv = ColumnParallelLinear(4, 32, stride=(16, 8, 8), gather_output=False)
        return Grouped(qkv, ezpz_tp.RowParallelLinear(16, 4, input_is_parallel=True))

    def ordinary():
        return Grouped(nn.Linear(4, 32), nn.Linear(16, 4))

    assert_matches_unsharded(parallel, ordinary, torch.ones(3, 4), tensor=[1, 2, 4])
