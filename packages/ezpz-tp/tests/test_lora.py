"""Adapters: numbers and files beside PEFT's, and the same ones at every tensor-parallel degree."""

import copy
import io
import json

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn

import ezpz_tp as tp
from ezpz_tp.testing import run_ranks

WIDTH, INNER, STEPS = 8, 12, 10


class Attention(nn.Module):
    """Names as in a language model, layers as in none."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER, bias=False)
        self.o_proj = nn.Linear(INNER, WIDTH)

    def forward(self, hidden):
        return hidden + self.o_proj(self.q_proj(hidden).sigmoid() * self.v_proj(hidden))


def plain(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(Attention(), Attention()).to(dtype)


def some(*shape, dtype=torch.float32, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def give_values(model):
    """Fill the B of each adapter, at any degree the same; they are zero at first."""
    for name, full in tp.lora_state_dict(model).items():
        layer = model.get_submodule(name.removesuffix(".weight"))
        if name.endswith("lora_B.weight"):
            values = some(*full.shape, seed=3) / 10
            at = getattr(layer, "tp_rank", 0), getattr(layer, "tp_size", 1)
            for begin, start, size in tp.shard_of(layer.weight).pieces(*at):
                layer.weight.data[begin : begin + size] = values[start : start + size]


def beside_peft(dtype, **options):
    """Return PEFT's model and one of ours, of the same weights, A and B; and PEFT."""
    peft = pytest.importorskip("peft")
    ours = plain(dtype)
    config = peft.LoraConfig(target_modules=["q_proj", "o_proj"], **options)
    theirs = peft.get_peft_model(copy.deepcopy(ours), config)
    given = {"rank": options["r"], "alpha": options["lora_alpha"]}
    tp.apply_lora(ours, ("q_proj", "o_proj"), **given, dropout=options.get("lora_dropout", 0.0))
    give_values(ours)
    found = {f"base_model.model.{k}": one for k, one in tp.lora_state_dict(ours).items()}
    peft.set_peft_model_state_dict(theirs, found)
    return theirs, ours, peft


def gradients(model, hidden):
    torch.manual_seed(2)  # of dropout
    output = model(hidden)
    output.float().square().sum().backward()
    named = {name.replace(".default", ""): one for name, one in model.named_parameters()}
    return output, {name: one.grad for name, one in named.items() if one.grad is not None}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_gradients_and_merged_weights_are_pefts_bit_for_bit(dtype, dropout):
    theirs, ours, _ = beside_peft(dtype, r=4, lora_alpha=12, lora_dropout=dropout)
    hidden = some(5, 3, WIDTH, dtype=dtype)
    (expected, right), (output, found) = gradients(theirs, hidden), gradients(ours, hidden)
    assert torch.equal(output, expected)
    assert [f"base_model.model.{name}" for name in found] == list(right)
    assert all(torch.equal(*pair) for pair in zip(found.values(), right.values(), strict=True))
    tp.merge_lora(ours)
    merged = theirs.merge_and_unload().state_dict()
    assert list(merged) == list(ours.state_dict())
    assert all(torch.equal(merged[name], one) for name, one in ours.state_dict().items())
    near = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.2}
    if not dropout:
        torch.testing.assert_close(ours(hidden), output, **near)


def test_files_go_to_peft_and_come_from_it(tmp_path):
    theirs, ours, peft = beside_peft(torch.float32, r=4, lora_alpha=12, lora_dropout=0.25)
    hidden = some(3, WIDTH)
    tp.save_lora(ours, tmp_path / "ours")
    read = peft.PeftModel.from_pretrained(plain(), tmp_path / "ours").eval()
    assert torch.equal(read(hidden), ours.eval()(hidden))
    theirs.save_pretrained(tmp_path / "theirs")
    loaded = plain()
    tp.load_lora(loaded, tmp_path / "theirs")
    assert torch.equal(loaded.eval()(hidden), ours(hidden))
    assert loaded.get_submodule("0.q_proj").lora.dropout == 0.25
    # The same files again, whoever read them; and into a model that has the adapters.
    tp.save_lora(loaded, tmp_path / "again")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "ours" / name).read_bytes()
    with torch.no_grad():
        loaded.get_submodule("1.o_proj").lora_A.weight.zero_()
    tp.load_lora(loaded, tmp_path / "ours")
    assert torch.equal(loaded(hidden), ours(hidden))


# Parallel layers, against the same at degree 1.


class Block(nn.Module):
    def __init__(self, *, gathers=False, sequence=False, shared=False, stride=1, pads=False):
        super().__init__()
        self.sequence, self.shared, self.pads = sequence, shared, pads
        more = {"sequence_parallel": sequence and not shared, "gather_output": gathers}
        more |= {"stride": stride, "pad_output": pads}
        inner = INNER - pads
        self.gate = tp.ColumnParallelLinear(WIDTH, inner, **more, seed=1)
        self.up = tp.ColumnParallelLinear(WIDTH, inner, **more, seed=2)
        for layer in (self.gate, self.up):
            layer.reduce_input_gradient = not shared
        more = {"input_is_parallel": not gathers, "sequence_parallel": sequence, "stride": stride}
        self.down = tp.RowParallelLinear(inner, WIDTH, **more, seed=3) if not pads else whole(inner)
        self.plain = whole(WIDTH)  # of own tokens
        if sequence:
            for parameter in self.plain.parameters():
                tp.mark_sequence_parallel(parameter)

    def forward(self, hidden):
        entered = hidden
        if self.shared and self.sequence:
            entered = tp.gather_from_sequence_parallel_region(hidden)
        elif self.shared:
            entered = tp.copy_to_tensor_parallel_region(hidden)
        inner = self.gate(entered).sigmoid() * self.up(entered)
        return hidden + self.plain(self.down(inner)).tanh()


def whole(inputs):
    layer = nn.Linear(inputs, WIDTH)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(some(*parameter.shape))
    return layer


KINDS = {
    "as Megatron's": {},
    "sequence parallel": {"sequence": True},
    "gathered": {"gathers": True},
    "stacked": {"stride": 2},
    "padded": {"pads": True, "gathers": True},
    "input's gradient summed by the caller": {"shared": True},
    "input gathered by the caller": {"shared": True, "sequence": True},
}


def trained(kind, folder, load=None):
    state = tp.get_state()
    index, degree = state.index("tensor"), state.size("tensor")
    model = nn.Sequential(Block(**kind), Block(**kind)).double()
    if load is None:
        names = tp.apply_lora(model, ("gate", "up", "down", "plain"), rank=3, alpha=6, seed=5)
        assert len(names) == 8
        first = tp.lora_state_dict(model)
        give_values(model)
    else:
        tp.load_lora(model, load)
        first = None
    learn = [one for one in model.parameters() if one.requires_grad]
    assert len(learn) == 16
    optimizer, losses = torch.optim.SGD(learn, lr=1e-3), []
    for step in range(STEPS):
        hidden = some(4, 2, WIDTH, seed=step).double()
        if kind.get("sequence"):
            hidden = hidden.chunk(degree)[index]
        loss = model(hidden).square().sum()
        loss.backward()
        tp.finalize_grads(model)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        if kind.get("sequence") and degree > 1:
            dist.all_reduce(total, group=state.group("tensor"))
        losses.append(total)
    if load is None:
        tp.save_lora(model, folder / f"{degree}")
    last = tp.lora_state_dict(model)
    output = model(hidden)
    tp.merge_lora(model)
    torch.testing.assert_close(model(hidden), output, rtol=1e-10, atol=1e-10)
    return first, losses, last


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_ten_steps_are_the_same_at_every_degree(kind, tmp_path):
    (first, losses, last), *_ = run_ranks(trained, 1, kind, tmp_path)
    for found in run_ranks(trained, 2, kind, tmp_path):
        assert all(torch.equal(found[0][name], one) for name, one in first.items())
        torch.testing.assert_close(found[1], losses, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found[2], last, rtol=1e-9, atol=1e-9)
    # What one degree has saved the other goes on with.
    expected = run_ranks(trained, 1, kind, tmp_path, tmp_path / "1")[0][1:]
    for _, *found in run_ranks(trained, 2, kind, tmp_path, tmp_path / "2"):
        torch.testing.assert_close(tuple(found), expected, rtol=1e-9, atol=1e-9)


@on_ranks(2, in_processes=True)
def test_dropout_is_of_the_same_input_on_all_ranks_and_of_parts_on_each():
    tp.seed_model_parallel(1)
    model = nn.Sequential(
        tp.ColumnParallelLinear(64, 64, gather_output=False),
        tp.RowParallelLinear(64, 64, input_is_parallel=True),
    )
    tp.apply_lora(model, ("0", "1"), rank=2, dropout=0.5)
    kept = []
    for layer in model:
        layer.lora_A.register_forward_pre_hook(lambda _, given: kept.append(given[0] != 0))
    model(torch.ones(8, 64))
    for own, same in zip(kept, (True, False), strict=True):
        both = [torch.empty_like(own, dtype=torch.uint8) for _ in range(2)]
        dist.all_gather(both, own.byte())
        assert torch.equal(*both) is same


def test_copies_saved_modules_meta_and_compiled():
    model = plain()
    names = tp.apply_lora(model, r"\d\.[qv]_proj", seed=1)
    assert names == ["0.q_proj", "0.v_proj", "1.q_proj", "1.v_proj"]
    give_values(model)
    hidden, file = some(3, WIDTH), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(hidden), model(hidden))
        tp.merge_lora(other)
        assert list(other.state_dict()) == list(plain().state_dict())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden), model(hidden))
    with torch.device("meta"):
        empty = plain()
    tp.apply_lora(empty, names, seed=1)
    empty.to_empty(device="cpu")
    for each in empty.modules():
        if hasattr(each, "reset_parameters"):
            each.reset_parameters()
    assert torch.equal(empty[0].q_proj.lora_A.weight, model[0].q_proj.lora_A.weight)
    assert not empty[0].q_proj.lora_B.weight.any()


def test_mistakes_and_files_with_more_than_lora(tmp_path):
    def refused(text, call, *args, **options):
        with pytest.raises(tp.ParallelError, match=text):
            call(*args, **options)

    # One string is a regular expression, which matches whole names.
    refused("match no module .*expected some of o_proj, q_proj, v_", tp.apply_lora, plain(), "q_")
    with pytest.raises(ValueError, match=r"alpha=0, dropout=0\.0; expected .* alpha above 0"):
        tp.apply_lora(plain(), alpha=0)
    refused("0 is a Attention; expected an nn.Linear", tp.apply_lora, plain(), ("0",))
    heads = nn.ModuleDict({"heads": nn.MultiheadAttention(8, 2)})
    refused("heads.out_proj belongs to nn.Multihead", tp.apply_lora, heads, ("out_proj",))
    refused("merge_lora: the model has no adapters", tp.merge_lora, plain())
    refused("the model has no adapters", tp.save_lora, plain(), tmp_path / "none")
    model = plain()
    tp.apply_lora(model, rank=2)
    refused("the model has adapters; expected none", tp.apply_lora, model)
    tp.save_lora(model, tmp_path / "a")
    refused("exists, and is not an empty folder", tp.save_lora, model, tmp_path / "a")
    refused("no such file", tp.load_lora, plain(), tmp_path / "b")
    other = nn.Sequential(Attention())
    refused(r"1.q_proj, 1.v_proj \(2 in all\) are not both", tp.load_lora, other, tmp_path / "a")
    other = plain()
    tp.apply_lora(other, rank=4)
    refused("rank 2 and alpha 16; expected 4 and 16", tp.load_lora, other, tmp_path / "a")
    tied = plain()
    tied[1].q_proj.weight = tied[0].q_proj.weight
    tp.apply_lora(tied, rank=2)
    refused("0.q_proj.weight and 1.q_proj.weight are one weight", tp.merge_lora, tied)
    config = tmp_path / "a" / "adapter_config.json"
    said = json.loads(config.read_text(encoding="utf-8"))
    for key, value in {
        "use_dora": True, "use_rslora": True, "bias": "all", "modules_to_save": ["norm"],
        "rank_pattern": {"0.q_proj": 4}, "init_lora_weights": "pissa", "peft_type": "LOHA",
    }.items():  # fmt: skip
        config.write_text(json.dumps(said | {key: value}), encoding="utf-8")
        refused(f"{key} is .*, which ezpz_tp does not have", tp.load_lora, plain(), tmp_path / "a")
