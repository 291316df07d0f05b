"""Train a Llama with FSDP2 in mixed precision: parameters, gradients and optimizer state sharded.

usage: ezpz-launch python -m ezpz.examples.fsdp [--dtype=bf16] [--steps=N] [--data=PATH]

The model is built without memory (on the meta device), then filled and sharded block by block: no
rank ever holds all of it. Parameters stay fp32; blocks compute in ``--dtype``, and gradients
are reduced in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import ezpz
from ezpz.examples import _settings, _text
from ezpz.models import Llama, LlamaConfig


@dataclass(frozen=True, kw_only=True)
class Settings(_text.Settings):
    """Train a Llama with FSDP2.

    Attributes:
        dtype: What blocks compute in: bf16, fp16 or fp32.
        keep_gathered: Keep a block's parameters from forward to backward (ZeRO-2, not ZeRO-3).
    """

    dtype: str = "bf16"
    keep_gathered: bool = False


def train(settings: Settings) -> None:
    """Train on all ranks. Collective: every rank calls this."""
    dtype = _settings.dtype_named(settings.dtype)
    ezpz.setup_torch(seed=settings.seed)
    logger = ezpz.get_logger("fsdp")
    text = _text.load(settings)
    config = LlamaConfig(_text.VOCABULARY, dim=64, layers=2, heads=4, kv_heads=2)
    bare, reshard = Llama(config, seed=settings.seed, device="meta"), not settings.keep_gathered
    model = ezpz.wrap_model_for_fsdp2(bare, dtype=dtype, reshard_after_forward=reshard)
    # Afterwards: it has to see the shards.
    replicas = ezpz.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    # fp16 loses gradients below 6e-8: the loss is scaled, and a step that overflows is left out.
    device = ezpz.get_torch_device_type()
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)

    timer, rates = ezpz.StepTimer(), ezpz.Throughput()
    # With what all ranks find: metrics.jsonl shows their mean, and that they agree.
    with ezpz.History(settings.outdir, cross_rank=True) as history:
        for step, tokens, targets in _text.batches(text, settings, replicas):
            loss = model(tokens, targets)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            timer.step()
            speed = rates.metrics(timer.seconds, tokens=replicas * tokens.numel())
            history.record({"loss": loss, "gradient_norm": norm, **speed}, step=step)
        with torch.no_grad():
            eval_loss = model(text.tokens, text.targets).item()
        history.record({"eval_loss": eval_loss}, step=settings.steps)
        logger.info("done", eval_loss=round(eval_loss, 4), metrics=str(history.path))
    ezpz.cleanup()


if __name__ == "__main__":
    _settings.main(Settings, train)
