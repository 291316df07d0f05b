"""Fine-tune a published causal language model, on any number of ranks.

usage: ezpz-launch python -m ezpz.examples.finetune --model=Qwen/Qwen3-0.6B --data=chats.jsonl
       ... --tp=2 --lora=16: split each layer over two ranks, train adapters of rank 16

The same command resumes from the newest checkpoint. docs/guides/finetuning.md has the data.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset

import ezpz
import ezpz_tp
from ezpz import models
from ezpz.data import NOT_LEARNED, pack_documents
from ezpz.examples import _settings
from ezpz_dist import share_on_node

_logger = ezpz.get_logger("finetune")


@dataclass(frozen=True, kw_only=True)
class Settings(_settings.Settings):
    """Fine-tune a published language model.

    Attributes:
        model: A model's folder, or its name on the hub.
        data: A JSONL file, a text file, or a folder of texts.
        steps: Optimizer steps.
        batch_size: Blocks a step, over all ranks together.
        micro_batch: Blocks that a rank computes at once; the gradients of several are added up.
        block: Tokens of a block.
        lr: The highest learning rate of AdamW, after a tenth of the steps; then it falls (cosine).
        dtype: What is computed in: bf16 or fp32; fp16 needs a scaled loss. Weights are fp32.
        tp: Tensor-parallel ranks.
        shard_size: Ranks that hold one copy of the model, a node's say (HSDP); 0: all of them.
        lora: Rank of adapters; 0 trains all weights.
        recompute: Keep no activations of a block of layers: compute them again in backward.
        evaluate_every: Steps from one evaluation on held-out blocks to the next.
        save_every: Steps from one checkpoint to the next.
        cache: Where downloads go, a node's own disk say; default: the hub's cache.
        outdir: Where metrics, checkpoints and the model go; its newest checkpoint is resumed.
    """

    model: str = ""
    data: str = ""
    steps: int = 100
    batch_size: int = 8
    micro_batch: int = 1
    block: int = 512
    lr: float = 2e-5
    dtype: str = field(default="bf16", metadata={"known": ["bf16", "fp32"]})
    tp: int = 1
    shard_size: int = field(default=0, metadata={"least": 0})
    lora: int = field(default=0, metadata={"least": 0})
    recompute: bool = False
    evaluate_every: int = 25
    save_every: int = 50
    cache: str = ""
    outdir: str = "outputs/finetune"


class _Run:
    """A model, its data, and what trains it. Collective: every rank makes one."""

    def __init__(self, settings: Settings) -> None:
        from transformers import get_cosine_schedule_with_warmup as cosine

        self.settings, self.folder = settings, Path(settings.outdir)
        self.replicas = ezpz_tp.get_data_parallel_world_size()
        self.parts, odd = divmod(settings.batch_size, self.replicas * settings.micro_batch)
        if odd or not self.parts:
            raise _settings.UsageError(
                f"--batch_size={settings.batch_size} on {self.replicas} data-parallel ranks, "
                f"--micro_batch={settings.micro_batch}; expected a multiple of both together"
            )
        _logger.info("looking for the model", model=settings.model)
        source = models.find_pretrained(settings.model, settings.cache or None)
        self.tokenizer = models.load_tokenizer(source, settings.block)
        _logger.info("reading the data", data=settings.data)
        data = Path(settings.data).expanduser(), self.tokenizer, settings.block
        packed = share_on_node(lambda: pack_documents(*data))
        blocks = TensorDataset(packed["tokens"], packed["targets"])
        count = len(blocks) - max(1, min(16, len(blocks) // 10))
        self.held_out = [blocks[place] for place in range(count, len(blocks))]
        how: dict[str, Any] = {"shuffle": True, "seed": settings.seed, "drop_last": True}
        self.loader = ezpz.DataLoader(Subset(blocks, range(count)), settings.micro_batch, **how)
        if not len(self.loader):
            raise _settings.UsageError(
                f"{count} blocks on {self.replicas} data-parallel ranks; expected --micro_batch="
                f"{settings.micro_batch} for each: more text, or a smaller --block or --micro_batch"
            )
        self.batches = chain.from_iterable(repeat(self.loader))
        _logger.info("reading the model")
        self.model = self.wrapped(models.load_pretrained(source))
        self.trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=settings.lr)
        self.scheduler = cosine(self.optimizer, settings.steps // 10, settings.steps)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.state |= {"scheduler": self.scheduler, "data": self.loader}

    def wrapped(self, model: Any) -> Any:
        if rank := self.settings.lora:
            ezpz_tp.apply_lora(model, models.lora_targets(model), rank, 2 * rank)
        self.flops = models.flops_per_token(model, self.settings.block)
        if self.settings.recompute:
            of_old = model.gradient_checkpointing_enable  # transformers before 5.20
            getattr(model, "activation_checkpointing_enable", of_old)({"use_reentrant": False})
        dtype, shard = _settings.dtype_named(self.settings.dtype), self.settings.shard_size or None
        return ezpz.wrap_model_for_fsdp2(model, dtype=dtype, shard_size=shard)

    def save(self, step: int) -> None:
        whole = not self.settings.lora
        ezpz.save_checkpoint(self.folder / "checkpoints", step=step, frozen=whole, **self.state)

    def step(self) -> dict[str, Any]:
        """Train on one batch, in parts whose gradients are added up."""
        device, parts = ezpz.get_torch_device(), list(islice(self.batches, self.parts))
        learned = sum(int((targets != NOT_LEARNED).sum()) for _, targets in parts)
        # Of all data-parallel ranks; tensor-parallel ones count the same.
        count = max(1, ezpz.all_reduce(learned) // self.settings.tp)
        loss = 0.0
        for number, part in enumerate(parts, 1):
            self.model.set_requires_gradient_sync(number == self.parts)
            losses = models.causal_losses(self.model, *(one.to(device) for one in part))
            own = losses.sum() * self.replicas / count  # FSDP2 averages over the replicas
            own.backward()
            loss += own.item()
        ezpz_tp.finalize_grads(self.model)
        norm = ezpz_tp.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return {"loss": loss, "gradient_norm": norm, "lr": self.scheduler.get_last_lr()[0]}

    @torch.no_grad()
    def evaluate(self) -> float:
        self.model.eval()
        total, count = 0.0, 0
        for block in self.held_out:
            tokens, targets = (one.unsqueeze(0).to(ezpz.get_torch_device()) for one in block)
            total += models.causal_losses(self.model, tokens, targets).sum().item()
            count += int((targets != NOT_LEARNED).sum())
        self.model.train()
        return total / max(1, count)

    def write(self) -> None:
        if self.settings.lora:
            if ezpz.get_rank() == 0:
                shutil.rmtree(self.folder / "adapter", ignore_errors=True)
            ezpz_tp.save_lora(self.model, self.folder / "adapter")
            return
        models.save_pretrained(self.model, self.folder / "model", self.tokenizer)


def train(settings: Settings) -> None:
    """Fine-tune on all ranks. Collective: every rank calls this."""
    if missing := [name for name in ("model", "data") if not getattr(settings, name)]:
        raise _settings.UsageError(f"--{missing[0]} is missing; expected --{missing[0]}=PATH")
    # An hour: ranks wait while one downloads the model, or makes tokens of the data.
    ezpz.setup_torch(seed=settings.seed, timeout=3600, tensor_parallel_size=settings.tp)
    run, last = _Run(settings), settings.steps
    loaded = ezpz.load_checkpoint(run.folder / "checkpoints", **run.state)
    first = loaded.step if loaded else 0
    tokens = settings.batch_size * settings.block
    rates = ezpz.Throughput(tokens_per_step=tokens, flops_per_token=run.flops, dtype=settings.dtype)
    _logger.info("ready", from_step=first, of=last, tp=settings.tp, data_parallel=run.replicas)
    with (
        ezpz.History(settings.outdir, cross_rank=True, system=True, resume=True) as history,
        ezpz.SnapshotOnSignal(run.save, within=120) as snapshot,
    ):
        run.model.train()
        for step in range(first + 1, last + 1):
            begun = time.perf_counter()
            metrics = run.step() | rates.metrics(time.perf_counter() - begun)
            if step % settings.evaluate_every == 0 or step == last:
                metrics["eval_loss"] = run.evaluate()
            said = history.update(metrics, step=step)
            if step % 10 == 0 or "eval_loss" in metrics:
                _logger.info(said)
            if step % settings.save_every == 0 or step == last:
                run.save(step)
            snapshot.step(step)
        _logger.info("writing the model")
        run.write()
        _logger.info("done", metrics=str(history.path))
    ezpz.cleanup()


if __name__ == "__main__":
    _settings.main(Settings, train)
