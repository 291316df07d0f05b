"""Full tensors from the parts that ranks hold, and back, in memory."""

import copy

import pytest
import torch
from llama import Config, Llama, optimizer_of, parallel_loss_of, text_batch
from torch import nn

import ezpz_tp
from ezpz_tp import (
    ColumnParallelLinear,
    DegreeError,
    ParallelError,
    ParallelState,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from ezpz_tp._formats.safetensors import DTYPES
from ezpz_tp._shard import Shard, set_shard
from ezpz_tp._state_dict import gather_state_dict, shard_state_dict
from ezpz_tp.testing import run_ranks


class Model(nn.Module):
    """Every way in which a tensor is split, in several dtypes."""

    def __init__(self):
        super().__init__()
        self.embedding = VocabParallelEmbedding(45, 16, seed=1)
        self.qkv = ColumnParallelLinear(16, 64, stride=(32, 16, 16), gather_output=False, seed=2)
        self.glu = ColumnParallelLinear(16, 48, stride=2, gather_output=False, seed=3)
        self.down = RowParallelLinear(24, 16, stride=(16, 8), input_is_parallel=True, seed=4)
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


def assert_same(found, expected, name=""):
    """Compare nested dicts, tensors to the last bit."""
    assert type(found) is type(expected), name
    if isinstance(expected, dict):
        assert list(found) == list(expected), name
        for key, value in expected.items():
            assert_same(found[key], value, f"{name}/{key}")
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
        assert torch.equal(found, expected), name
    else:
        assert found == expected, name


def gathered(**options):
    module = Model()
    return gather_state_dict(module, optimizer=adam_of(module), **options)


@pytest.fixture(scope="module")
def whole():
    """What one rank alone has, by torch's own means."""
    module = Model()
    optimizer = adam_of(module)
    names = {parameter: name for name, parameter in module.named_parameters()}
    groups = copy.copy(optimizer.param_groups)
    return {
        "model": dict(module.state_dict()),
        "optimizer": {
            "state": {
                name: dict(optimizer.state[parameter])
                for name, parameter in module.named_parameters()
                if parameter in optimizer.state
            },
            "param_groups": [
                {**group, "params": [names[parameter] for parameter in group["params"]]}
                for group in groups
            ],
        },
    }


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
    for found, expected in zip(
        module.state_dict().values(), fresh.state_dict().values(), strict=True
    ):
        assert torch.equal(found, expected)  # the padding too
    for parameter, state in adam_of(fresh).state.items():
        name = next(n for n, one in fresh.named_parameters() if one is parameter)
        assert torch.equal(
            optimizer.state[dict(module.named_parameters())[name]]["exp_avg"], state["exp_avg"]
        )
    return gather_state_dict(module, optimizer=optimizer)


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_the_whole_is_what_one_rank_has_and_its_parts_what_each_rank_had(degree, whole):
    for found in run_ranks(gathered, degree):
        assert_same(found, whole)
    # torch's AdamW casts its state to the parameter's dtype when it loads it.
    expected = copy.deepcopy(whole)
    for name, state in expected["optimizer"]["state"].items():
        state["exp_avg_sq"] = state["exp_avg_sq"].to(whole["model"][name].dtype)
    for found in run_ranks(cut_and_loaded, degree, whole):
        assert_same(found, expected)


def gathered_to_one():
    state = ezpz_tp.get_state()
    return gather_state_dict(Model(), to_rank=2, device=None), state.rank


def test_one_rank_may_get_all(whole):
    for found, rank in run_ranks(gathered_to_one, 4, tensor=2):
        assert_same(found, whole["model"] if rank == 2 else {})


class Stage(nn.Module):
    """A pipeline's stage with a tied embedding, named as in the whole model."""

    def __init__(self, stage, count, layers=4):
        super().__init__()
        if stage in (0, count - 1):
            self.embedding = VocabParallelEmbedding(45, 16, seed=1)
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


def staged(to_rank=None):
    state = ezpz_tp.get_state()
    module = Stage(state.index("pipeline"), state.size("pipeline"))
    return gather_state_dict(module, optimizer=adam_of(module), to_rank=to_rank)


def sorted_by_name(full):
    return {
        "model": dict(sorted(full["model"].items())),
        "optimizer": {
            "state": dict(sorted(full["optimizer"]["state"].items())),
            "param_groups": [
                {**group, "params": sorted(group["params"])}
                for group in full["optimizer"]["param_groups"]
            ],
        },
    }


@pytest.mark.parametrize("pipeline", [2, 4])
def test_stages_are_joined_and_a_tied_embedding_is_there_once(pipeline):
    expected = sorted_by_name(run_ranks(staged, 1)[0])
    for found in run_ranks(staged, 2 * pipeline, pipeline=pipeline):
        assert_same(sorted_by_name(found), expected)
    only = run_ranks(staged, 2 * pipeline, 1, pipeline=pipeline)
    assert_same(sorted_by_name(only.pop(1)), expected)
    assert only == [{}] * len(only)


def cut_for_a_stage(full):
    state = ezpz_tp.get_state()
    module = Stage(state.index("pipeline"), state.size("pipeline"))
    expected = copy.deepcopy(module.state_dict())
    with torch.no_grad():
        for value in module.parameters():
            value.zero_()
    module.load_state_dict(shard_state_dict(full, module))
    assert_same(dict(module.state_dict()), dict(expected))
    optimizer = adam_of(module)
    full = {"model": full, "optimizer": {"state": {}, "param_groups": []}}
    with pytest.raises(ParallelError, match=r"group 0 of the optimizer has .* were in no group"):
        shard_state_dict(full, module, optimizer=optimizer)


def test_a_stage_takes_its_own_of_the_whole():
    run_ranks(cut_for_a_stage, 4, run_ranks(staged, 1)[0]["model"], pipeline=2)


class Wide(nn.Module):
    """A buffer of one's own in every dtype, split along its last dim."""

    def __init__(self, index, degree):
        super().__init__()
        for name, dtype in DTYPES.items():
            shard = Shard((3, 8), 1, blocks=(4, 4))
            full = (torch.arange(24).view(3, 8) % 2).to(dtype)
            pieces = [full[:, at : at + n] for _, at, n in shard.pieces(index, degree)]
            part = torch.cat([piece.view(torch.uint8) for piece in pieces], 1).view(dtype)
            set_shard(part, shard)
            self.register_buffer(name, part)
        self.register_buffer("empty", torch.zeros(0, 8 // degree))
        set_shard(self.empty, Shard((0, 8), 1), degree)


def wide():
    state = ezpz_tp.get_state()
    found = gather_state_dict(Wide(state.index("tensor"), state.size("tensor")))
    return {name: value.view(torch.uint8) for name, value in found.items()}


def test_every_dtype_is_joined_bit_for_bit():
    expected = {name: value.view(torch.uint8) for name, value in Wide(0, 1).state_dict().items()}
    for found in run_ranks(wide, 2):
        assert_same(found, expected)


class WithExtraState(nn.Linear):
    """A module that keeps something which is no tensor."""

    seen = None

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def extra_state():
    module = WithExtraState(2, 2)
    module.seen = 5
    full = gather_state_dict(module)
    twin = WithExtraState(2, 2)
    twin.load_state_dict(shard_state_dict(full, twin))
    return twin.seen


def test_extra_state_is_passed_on():
    assert run_ranks(extra_state, 2) == [5, 5]


def wrapped():
    """A wrapper whose hooks take its own name out of those in the state dict."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    layer = ColumnParallelLinear(4, 8, seed=1)
    module, twin = nn.Sequential(checkpoint_wrapper(layer)), nn.Sequential(copy.deepcopy(layer))
    full = gather_state_dict(module, optimizer=adam_of(module))
    assert_same(full, gather_state_dict(twin, optimizer=adam_of(twin)))
    parts = shard_state_dict(full["model"], module)
    assert_same(parts, dict(twin.state_dict()))
    return full["model"]


def test_parameters_that_have_other_names_in_the_state_dict():
    for found in run_ranks(wrapped, 2):
        assert torch.equal(found["0.weight"], ColumnParallelLinear(4, 8, seed=1).weight)


def own_group():
    group = ezpz_tp.get_tensor_parallel_group()
    state = ParallelState.from_groups(tensor=group)
    layer = ColumnParallelLinear(4, 8, tp_group=group, seed=1)
    return gather_state_dict(layer, state=state)["weight"]


def test_groups_of_ones_own():
    expected = ColumnParallelLinear(4, 8, seed=1).weight
    for found in run_ranks(own_group, 2):
        assert torch.equal(found, expected)


def trained():
    config = Config(vocabulary=253)
    model = Llama(config)
    optimizer = optimizer_of(model.parameters())
    for step in range(2):
        tokens, labels = (each % 253 for each in text_batch(step))
        parallel_loss_of(model(tokens), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    full = gather_state_dict(model, optimizer=optimizer)
    parts = shard_state_dict(full, model, optimizer=optimizer)
    own = optimizer.state_dict()
    assert_same(dict(parts["model"]), dict(model.state_dict()))
    assert_same(parts["optimizer"]["state"], own["state"])
    assert parts["optimizer"]["param_groups"] == own["param_groups"]


def test_what_was_joined_is_cut_into_the_very_parts():
    run_ranks(trained, 2)


# What goes wrong is said, on every rank.


def problem(make, **options):
    """What every rank is told."""

    def fails():
        module, given = make(ezpz_tp.get_state())
        with pytest.raises(ParallelError) as caught:
            gather_state_dict(module, **given)
        return f"{type(caught.value).__name__} {caught.value}"

    return run_ranks(fails, 2, **options)


def twice(state):
    """Both stages call their layer 0."""
    return nn.Sequential(ColumnParallelLinear(4, 4, seed=state.index("pipeline"))), {}


def other_sizes(state):
    return nn.Linear(4, 4 + state.index("pipeline")), {}


def other_model(state):
    made = (nn.Linear(4, 4), nn.Linear(4, 4, bias=False))[state.index("tensor")]
    return made, {}


class Failing(nn.Linear):
    """Not every rank can say what it keeps."""

    def __init__(self, kept):
        super().__init__(4, 4)
        self.kept = kept

    def get_extra_state(self):
        return {0: self.kept}[ezpz_tp.get_state().rank % 2]


def raising(_):
    return Failing(None), {}


def not_sendable(state):
    module = nn.ModuleDict({str(state.index("pipeline")): WithExtraState(2, 2)})
    module[str(state.index("pipeline"))].seen = lambda: None
    return module, {}


def sparse(_):
    module = nn.Linear(4, 4)
    module.register_buffer("eye", torch.eye(4).to_sparse())
    return module, {}


def one_optimizer(state):
    module = nn.ModuleDict({str(state.index("pipeline")): nn.Linear(4, 4)})
    given = {"optimizer": torch.optim.SGD(module.parameters())}
    return module, {} if state.rank else given


def meta(state):
    device = "meta" if state.index("tensor") else None
    return ColumnParallelLinear(4, 4, device=device, seed=1), {}


def expert(state):
    module = ColumnParallelLinear(4, 4)
    module.weight.allreduce = False
    group = state.group("tensor")
    return module, {"state": ParallelState.from_groups(tensor=group, expert=group)}


def stranger(_):
    return nn.Linear(4, 4), {"optimizer": torch.optim.SGD([torch.zeros(3, requires_grad=True)])}


def odd_state(_):
    module = ColumnParallelLinear(4, 4, bias=False)
    optimizer = torch.optim.SGD(module.parameters())
    optimizer.state[module.weight]["row"] = torch.zeros(4, 1)
    return module, {"optimizer": optimizer}


def other_shape(_):
    module = ColumnParallelLinear(4, 4)
    module.weight.full_shape = (12, 4)
    return module, {}


def uneven(_):
    module = ColumnParallelLinear(4, 4)
    module.weight.full_shape = (5, 4)
    return module, {}


def other_groups(state):
    module = nn.ModuleDict({str(state.index("pipeline")): nn.Linear(4, 4)})
    rate = 0.1 * (1 + state.index("pipeline"))
    return module, {"optimizer": torch.optim.SGD(module.parameters(), lr=rate)}


def more_groups(state):
    module = nn.ModuleDict({str(state.index("pipeline")): nn.Linear(4, 4)})
    parameters = list(module.parameters())
    groups = [{"params": parameters[:1]}, {"params": parameters[1:]}][: 2 - state.index("pipeline")]
    return module, {"optimizer": torch.optim.SGD(groups)}


def no_such_rank(_):
    return nn.Linear(4, 4), {"to_rank": 5}


@pytest.mark.parametrize(
    ("make", "pipeline", "message"),
    [
        (twice, 2, "stages 0 and 1 both have '0.weight', with other values; expected a tied"),
        (other_sizes, 2, "stages 0 and 1 both have 'weight', with Entry(name='weight'"),
        (other_model, 1, "ranks 0 and 1 of stage 0 hold parts of other tensors: Entry(name='bias'"),
        (meta, 1, "rank 1: 'weight' is on the meta device"),
        (raising, 1, "ParallelError rank 1: KeyError: 1"),
        (not_sendable, 2, "rank 0: AttributeError: Can't pickle local object"),
        (sparse, 1, "'eye' is of torch.sparse_coo; expected a dense tensor"),
        (one_optimizer, 1, "hold parts of other tensors: but one has an optimizer; expected"),
        (one_optimizer, 2, "an optimizer was given, but not on pipeline stage 1; expected one on"),
        (expert, 1, "'weight' is an expert's (allreduce is False), split over expert groups"),
        (
            stranger,
            1,
            "parameter 0 of group 0 of the optimizer, of shape (3,), is none of Linear's",
        ),
        (odd_state, 1, "'row' of 'weight' in the optimizer has shape (4, 1); expected that of its"),
        (
            other_shape,
            1,
            "DegreeError rank 0: 'weight' has shape (2, 4); expected (6, 4), rank 0 of 2's part",
        ),
        (
            uneven,
            1,
            "DegreeError rank 0: 'weight': dim 0 of a tensor of full shape (5, 4) does not",
        ),
        (other_groups, 2, "group 0 of the optimizer has lr=0.2 on pipeline stage 1 and 0.1 on"),
        (more_groups, 2, "the optimizer has 1 parameter groups on pipeline stage 1 and 2 on stage"),
        (no_such_rank, 1, "to_rank=5 of 2 ranks; expected 0 to 1"),
    ],
)
def test_what_cannot_be_joined_is_said_on_every_rank(make, pipeline, message):
    found = problem(make, pipeline=pipeline)
    assert len(set(found)) == 1
    assert message in found[0]


def test_a_full_tensor_of_another_shape_is_said():
    layer = ColumnParallelLinear(4, 8, bias=False)
    with pytest.raises(
        DegreeError, match=r"'weight' has shape \(7, 4\); expected \(8, 4\), the full"
    ):
        shard_state_dict({"weight": torch.zeros(7, 4)}, layer)
    optimizer = torch.optim.SGD(layer.parameters())
    with pytest.raises(
        ParallelError, match=r"expected {'model', 'optimizer'}.* found \['weight'\]"
    ):
        shard_state_dict({"weight": torch.zeros(8, 4)}, layer, optimizer=optimizer)


def test_what_is_missing_or_too_much_is_for_load_state_dict_to_judge():
    layer = ColumnParallelLinear(4, 8)
    parts = shard_state_dict({"weight": torch.zeros(8, 4), "other": torch.zeros(1)}, layer)
    found = layer.load_state_dict(parts, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["bias"], ["other"])
