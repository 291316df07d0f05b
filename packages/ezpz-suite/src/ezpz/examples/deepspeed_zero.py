"""Train by DeepSpeed's ZeRO: optimizer state, gradients and parameters shared out over the ranks.

usage: ezpz-launch python -m ezpz.examples.deepspeed_zero [--stage=0..3] [--dtype=bf16]

DeepSpeed gets the configuration that stands here and what it lacks. The process group is the one
that `ezpz.setup_torch` made, so no `deepspeed` launcher is needed.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch
from torch.nn.functional import cross_entropy

import ezpz
from ezpz.data import digits
from ezpz.examples import _settings
from ezpz.models import MLP


@dataclass(frozen=True, kw_only=True)
class Settings(_settings.DigitsSettings):
    """Train by DeepSpeed's ZeRO on handwritten digits.

    Attributes:
        stage: Shared out are: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters.
        dtype: fp32, bf16 or fp16.
        max_norm: Gradients are clipped to this norm.
    """

    stage: int = field(default=3, metadata={"least": 0})
    dtype: str = "fp32"
    epochs: int = 5
    max_norm: float = 1.0


def train(settings: Settings) -> None:
    """Train on all ranks. Collective: every rank calls this."""
    dtype = _settings.dtype_named(settings.dtype)
    if settings.stage > 3:
        raise _settings.UsageError(f"--stage={settings.stage}; expected 0, 1, 2 or 3")
    _settings.require("deepspeed")
    # DeepSpeed 0.19 calls what torch 2.13 has other names for, and would be told at each step.
    warnings.filterwarnings("ignore", ".*torch.distributed.*deprecated", FutureWarning)
    ezpz.setup_torch(framework="deepspeed", seed=settings.seed)
    logger = ezpz.get_logger("deepspeed_zero")
    logger.info("making the engine", stage=settings.stage)
    share = max(1, settings.batch_size // ezpz.get_world_size())
    # DeepSpeed makes the optimizer: what it knows it can shard.
    config = {"optimizer": {"type": "AdamW", "params": {"lr": settings.lr}}}
    engine, _, _, _ = ezpz.wrap_model_for_deepspeed(
        MLP((64, 256, 256, 10)), zero_stage=settings.stage, dtype=dtype, micro_batch_size=share,
        gradient_clipping=settings.max_norm, config=config,
    )  # fmt: skip
    logger.info("ready", ranks=ezpz.get_world_size(), stage=engine.zero_optimization_stage())
    device = engine.device
    loader = ezpz.DataLoader(digits("train"), share, shuffle=True, seed=settings.seed)
    images, labels = (part.to(device) for part in digits("test").tensors)

    def ask(batch: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = engine(batch.to(device, dtype))
        return logits.float()

    with ezpz.History(settings.outdir, cross_rank=True) as history:
        for epoch in range(settings.epochs):
            for batch, answers in loader:
                loss = cross_entropy(ask(batch), answers.to(device))
                engine.backward(loss)
                engine.step()
            with torch.no_grad():
                accuracy = (ask(images).argmax(dim=1) == labels).float().mean().item()
            metrics = {"epoch": epoch, "loss": loss.item(), "accuracy": accuracy}
            logger.info(history.update(metrics, step=engine.global_steps))
        logger.info("done", accuracy=round(accuracy, 4), metrics=str(history.path))
    ezpz.cleanup()


if __name__ == "__main__":
    _settings.main(Settings, train)
