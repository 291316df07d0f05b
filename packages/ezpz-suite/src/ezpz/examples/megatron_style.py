"""A small GPT in Megatron-LM's words, with torch and ezpz_tp (and fire) alone.

usage: ezpz-launch python -m ezpz.examples.megatron_style [--tp=2] [--steps=N] [--outdir=DIR]

Imports and calls are Megatron-LM's, with ``ezpz_tp`` in place of ``megatron.core``. Tensor (with
sequence) parallel over ``--tp`` ranks, data parallel over the rest; torchrun starts it as well.
The text is the Python standard library's own source.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import time
from functools import partial, wraps
from pathlib import Path
from typing import Any, cast

import fire
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

import ezpz_tp
from ezpz_tp import parallel_state as mpu
from ezpz_tp import tensor_parallel
from ezpz_tp.model_parallel_config import ModelParallelConfig

HIDDEN, HEADS, LAYERS, SEQUENCE, BATCH, VOCABULARY = 64, 4, 2, 64, 16, 256
draw: partial[Tensor] = partial(nn.init.normal_, std=0.02)
"""Fills a weight; the layer keeps this rank's part of it."""


def column(config: ModelParallelConfig, outputs: int) -> tensor_parallel.ColumnParallelLinear:
    """Return a layer whose output features are split."""
    return tensor_parallel.ColumnParallelLinear(
        HIDDEN, outputs, config=config, init_method=draw, gather_output=False
    )


def row(config: ModelParallelConfig, inputs: int) -> tensor_parallel.RowParallelLinear:
    """Return a layer whose input features are split."""
    return tensor_parallel.RowParallelLinear(
        inputs, HIDDEN, config=config, init_method=draw,
        bias=True, input_is_parallel=True, skip_bias_add=False,
    )  # fmt: skip


def norm(config: ModelParallelConfig) -> nn.LayerNorm:
    """Return a norm; on a part of the sequence its gradients are to be summed."""
    made = nn.LayerNorm(HIDDEN)
    if config.sequence_parallel:
        ezpz_tp.mark_sequence_parallel(made.weight)
        ezpz_tp.mark_sequence_parallel(made.bias)
    return made


class _Block(nn.Module):
    """Attention and MLP: (s / tp, b, HIDDEN) to the same, this rank's heads and features."""

    def __init__(self, config: ModelParallelConfig) -> None:
        super().__init__()
        self.input_norm, self.mlp_norm = norm(config), norm(config)
        self.qkv, self.projection = column(config, 3 * HIDDEN), row(config, HIDDEN)
        self.fc1, self.fc2 = column(config, 4 * HIDDEN), row(config, 4 * HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed, _ = self.qkv(self.input_norm(hidden))  # (s, b, 3 * HIDDEN / tp)
        heads = mixed.unflatten(-1, (-1, 3 * HIDDEN // HEADS)).permute(1, 2, 0, 3)
        q, k, v = heads.chunk(3, dim=-1)
        context = scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.projection(context.permute(2, 0, 1, 3).flatten(-2))[0]
        return cast("Tensor", hidden + self.fc2(gelu(self.fc1(self.mlp_norm(hidden))[0]))[0])


class _GPT(nn.Module):
    """Tokens (b, s) to the loss of each next token (s, b)."""

    def __init__(self, config: ModelParallelConfig) -> None:
        super().__init__()
        self.word = tensor_parallel.VocabParallelEmbedding(
            VOCABULARY, HIDDEN, init_method=draw, config=config
        )
        self.position = nn.Parameter(torch.zeros(SEQUENCE, 1, HIDDEN))
        self.blocks = nn.Sequential(*(_Block(config) for _ in range(LAYERS)))
        self.norm, self.head = norm(config), column(config, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.word(tokens.t()) + self.position
        hidden = tensor_parallel.scatter_to_sequence_parallel_region(hidden)
        logits, _ = self.head(self.norm(self.blocks(hidden)))  # (s, b, VOCABULARY / tp)
        return tensor_parallel.vocab_parallel_cross_entropy(logits, targets.t().contiguous())


def batch(text: bytes, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens and targets (b, s): drawn by one tensor-parallel rank, sent to the others."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - SEQUENCE - 1, (BATCH,), generator=generator).tolist()
    rows = torch.tensor([list(text[start : start + SEQUENCE + 1]) for start in starts])
    sent = tensor_parallel.broadcast_data(["text"], {"text": rows.to(device)}, torch.int64)["text"]
    return sent[:, :-1], sent[:, 1:]


def _device() -> torch.device:
    for kind in (torch.cuda, torch.xpu):
        if kind.is_available():
            kind.set_device(int(os.environ["LOCAL_RANK"]))
            return torch.device(kind.__name__[6:], kind.current_device())
    return torch.device("cpu")


def train(tp: int = 2, steps: int = 80, lr: float = 3e-3, seed: int = 42, outdir: str = "") -> None:
    """Train a small GPT in Megatron-LM's words.

    Args:
        tp: Tensor-parallel ranks, or as many ranks as there are.
        steps: Optimizer steps.
        lr: Learning rate of AdamW.
        seed: Seed of the run.
        outdir: Where metrics.jsonl goes; default: outputs/megatron_style-DATE-TIME.
    """
    for name, value in {"tp": tp, "steps": steps, "lr": lr, "seed": seed}.items():
        kinds, kind = ((int, float), "number") if name == "lr" else ((int,), "whole number")
        if type(value) not in kinds or value < 0 or (value == 0 and name != "seed"):
            least = "from 0" if name == "seed" else "above 0"
            sys.exit(_said(f"--{name}={value}; expected a {kind} {least}"))
    if outdir in ("True", "False"):  # what Fire makes of a name without a value
        sys.exit(_said(f"--outdir={outdir}; expected a folder, such as --outdir=./{outdir}"))
    if "RANK" not in os.environ:
        sys.exit(_said("RANK is not set; start it by ezpz-launch (-n 1 for one rank) or torchrun"))
    device = _device()
    dist.init_process_group({"cuda": "nccl", "xpu": "xccl"}.get(device.type, "gloo"))
    tp = min(tp, dist.get_world_size())
    mpu.initialize_model_parallel(tensor_model_parallel_size=tp)
    if dist.get_rank() == 0:
        print(f"ready: tp={tp} ranks={dist.get_world_size()}", flush=True)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    config = ModelParallelConfig(
        tensor_model_parallel_size=tp, sequence_parallel=tp > 1,
        use_cpu_initialization=device.type == "cpu",
    )  # fmt: skip
    model = _GPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    text = b"\n".join(path.read_bytes() for path in sources)
    held_out = batch(text[-100_000:], 0, device)
    path = Path(outdir or time.strftime("outputs/megatron_style-%Y%m%d-%H%M%S"))
    first, replicas = dist.get_rank() == 0, mpu.get_data_parallel_world_size()
    for step in range(1, steps + 1):
        seed_here = step * replicas + mpu.get_data_parallel_rank()
        loss = model(*batch(text[:-100_000], seed_here, device)).mean()
        optimizer.zero_grad()
        loss.backward()
        # Of sequence-parallel norms the sum, of replicas the average.
        ezpz_tp.finalize_grads(model, average_over="data")
        ezpz_tp.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 and step not in (1, steps):
            continue
        with torch.no_grad():
            found: list[float] = [0.0] * dist.get_world_size()
            dist.all_gather_object(found, model(*held_out).mean().item())
        metrics = {"step": step, "loss": loss.item(), "eval_loss": found[0]}
        metrics |= {"eval_loss/min": min(found), "eval_loss/max": max(found)}
        if first:
            print(*(f"{name}={value:.5g}" for name, value in metrics.items()), flush=True)
            path.mkdir(parents=True, exist_ok=True)
            with (path / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(metrics) + "\n")
    if first:
        print(f"done: eval_loss={found[0]:.4f} metrics={path / 'metrics.jsonl'}")
    mpu.destroy_model_parallel()
    # gloo's threads drop their last tensors; one that is late aborts the process (torch 2.13).
    time.sleep(0.1)
    dist.destroy_process_group()


def _said(what: object) -> int:
    print(f"megatron_style: {what}", file=sys.stderr)
    return 2


def main() -> None:
    """Read the command line and train; an error of degrees is a line, and status 2."""
    asked: list[Any] = []
    options = wraps(train)(lambda *given, **named: asked.extend((given, named)))
    fire.decorators.SetParseFns(outdir=str)(options)  # of 2024_01 it would make 202401
    try:
        fire.Fire(options, name="megatron_style")  # refuses what is misspelt before the training
        train(*asked[0], **asked[1])
    except ezpz_tp.DegreeError as error:
        sys.exit(_said(error))


if __name__ == "__main__":
    main()
