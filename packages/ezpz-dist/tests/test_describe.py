"""What `describe_model` says of bare and wrapped models."""

import textwrap

import pytest
import torch
from torch import nn

from ezpz_dist import describe_model


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 1000, bias=False)
        self.head.weight = self.embed.weight
        self.embed.weight.requires_grad_(False)
        self.register_buffer("mask", torch.ones(10))


def table(text):
    return textwrap.dedent(text).strip("\n")


def test_a_bare_model():
    found = describe_model(Net())
    assert (found.wrapper, found.parameters, found.trainable) == (None, 76480, 12480)
    assert (found.held, found.bytes, found.buffer_bytes) == (76480, 305920, 40)
    assert str(found) == table(
        """
        Net: 76,480 parameters (12,480 trainable), 100.0% of it here: 298.8 KiB, and 40 B of buffers
        unit   class  by  parameters    here  bytes here  type     after forward
        (all)  Net    -       76,480  76,480   298.8 KiB  float32  -
        """
    )
    assert str(describe_model(nn.ReLU())).startswith("ReLU: 0 parameters (0 trainable): 0 B")
    assert describe_model(nn.Linear(1, 1, dtype=torch.bfloat16)).bytes == 4
    assert "1.5 GiB" in str(describe_model(nn.Linear(3 << 9, 1 << 18, bias=False, device="meta")))


def test_wrapped_models(ranks):
    script = """
import warnings
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)
setup_torch(timeout=60)
print(describe_model(wrap_model_for_ddp(Net())))
sharded = wrap_model_for_fsdp2(Net(), dtype="bf16")
print(describe_model(sharded))
older = describe_model(wrap_model_for_fsdp(Net(), dtype="bf16"))
print(older)
assert all_reduce(float(older.held), "sum") == older.parameters == older.trainable == 280
kept = describe_model(wrap_model_for_fsdp2(Net(), reshard_after_forward=False))
assert [unit.reshards for unit in kept.units] == [False] * 5
sharded(torch.zeros(2, dtype=torch.long)).sum().backward()
assert describe_model(sharded).held == 140 and not describe_model(sharded).units[0].reshards
assert describe_model(sharded).units[1].name == "embed"
# Sizes that FSDP1 pads, a part that it trains, and one that it leaves alone.
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 5), nn.MultiheadAttention(6, 2)) for _ in range(4))
        self.free = nn.Linear(3, 3)
def frozen():
    model = Odd()
    for block in model.blocks:
        block[0].weight.requires_grad_(False)
    return model
model = frozen()
whole = sum(p.numel() for p in model.parameters())
trains = sum(p.numel() for p in model.parameters() if p.requires_grad)
warnings.simplefilter("ignore")  # of units that are frozen in part
for wrap, on_both in (
    (wrap_model_for_fsdp, 0),
    (lambda m: wrap_model_for_fsdp2(m, units=[nn.Sequential, nn.MultiheadAttention]), 0),
    (lambda m: wrap_model_for_fsdp(m, ignored_modules=[m.free]), 12),
):
    found = describe_model(wrap(frozen()))
    assert (found.parameters, found.trainable) == (whole, trains), found
    assert all_reduce(float(found.held), "sum") - on_both == whole, found
    if len(found.units) == 9:  # units within units: each kind in one row
        assert "blocks.0 ... blocks.3 (4x) " in str(found)
        assert "blocks.0.1 ... blocks.3.1 (4x) " in str(found)
        assert len(str(found).splitlines()) == 5, found
cleanup()
"""
    seen = ranks(2, script)
    assert seen[0].strip("\n") == table(
        """
        Net: 280 parameters (280 trainable), 100.0% of it here: 1.1 KiB, and 0 B of buffers
        unit   class  by   parameters  here  bytes here  type     after forward
        (all)  Net    DDP         280   280     1.1 KiB  float32  -
        Net: 280 parameters (280 trainable), 50.0% of it here: 560 B, and 0 B of buffers
        unit                        class      by             parameters  here  bytes here  type                           after forward
        (rest)                      Net        FSDP2 shard 2          16     8        32 B  float32, computes in bfloat16  kept
        embed                       Embedding  FSDP2 shard 2          48    24        96 B  float32, computes in bfloat16  freed
        blocks.0 ... blocks.2 (3x)  Linear     FSDP2 shard 2          72    36       144 B  float32, computes in bfloat16  freed
        Net: 280 parameters (280 trainable), 50.0% of it here: 560 B, and 0 B of buffers
        unit                        class      by     parameters  here  bytes here  type                           after forward
        (rest)                      Net        FSDP1          16     8        32 B  float32, computes in bfloat16  freed
        embed                       Embedding  FSDP1          48    24        96 B  float32, computes in bfloat16  freed
        blocks.0 ... blocks.2 (3x)  Linear     FSDP1          72    36       144 B  float32, computes in bfloat16  freed
        """  # noqa: E501 - as it is printed
    )


class DeepSpeedEngine(nn.Module):
    """As much of DeepSpeed's engine as is looked at; the real one is not installed here."""

    __module__ = "deepspeed.runtime.engine"

    def __init__(self, model, stage):
        super().__init__()
        self.module = model
        self.stage = stage

    def zero_optimization_stage(self):
        return self.stage


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_of_deepspeed(stage):
    model = nn.Linear(4, 4, bias=False)
    if stage == 3:
        model.weight = nn.Parameter(torch.empty(0))
        model.weight.ds_numel, model.weight.ds_tensor = 16, torch.empty(8)
    found = describe_model(DeepSpeedEngine(model, stage))
    assert found.kind == "Linear"
    assert found.wrapper == f"DeepSpeed ZeRO-{stage}"
    assert (found.parameters, found.held) == (16, 16 if stage == 1 else 8)
