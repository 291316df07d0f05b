"""A loop of Hugging Face's Accelerate, started by ezpz-launch: two lines more.

usage: ezpz-launch python -m ezpz.examples.accelerate [--epochs=N] [--lr=X] [--outdir=DIR]

Accelerate takes the process group that `ezpz.setup_torch` made, and so runs under any scheduler
and any launcher that ezpz knows, without `accelerate launch` and its configuration file.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import ezpz
from ezpz.data import digits
from ezpz.examples import _settings
from ezpz.models import MLP


@dataclass(frozen=True, kw_only=True)
class Settings(_settings.DigitsSettings):
    """Train by Hugging Face's Accelerate on handwritten digits.

    Attributes:
        batch_size: Images a batch, over all ranks together; rounded to as many on each.
        accumulate: Batches whose gradients make one step.
    """

    batch_size: int = 32
    accumulate: int = 2


def train(settings: Settings) -> None:
    """Train on all ranks. Collective: every rank calls this."""
    from accelerate import Accelerator  # type: ignore[import-untyped]

    ezpz.setup_torch(seed=settings.seed)
    cpu = ezpz.get_torch_device_type() == "cpu"
    accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=settings.accumulate)
    if accelerator.num_processes != ezpz.get_world_size():
        raise _settings.UsageError(
            f"Accelerate sees {accelerator.num_processes} processes of {ezpz.get_world_size()}"
        )
    logger = ezpz.get_logger("accelerate")
    share = max(1, settings.batch_size // accelerator.num_processes)
    model = MLP((64, 128, 10))
    model, optimizer, loader, tests = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=settings.lr),
        DataLoader(digits("train"), share, shuffle=True), DataLoader(digits("test"), 180),
    )  # fmt: skip
    with ezpz.History(settings.outdir, cross_rank=True) as history:
        for epoch in range(settings.epochs):
            for images, labels in loader:
                with accelerator.accumulate(model):
                    loss = cross_entropy(model(images), labels)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
            right = seen = 0
            for images, labels in tests:
                with torch.no_grad():
                    answers = model(images).argmax(dim=1)
                pair = accelerator.gather_for_metrics((answers, labels))
                right += int((pair[0] == pair[1]).sum())
                seen += len(pair[0])
            metrics = {"epoch": epoch, "loss": loss.item(), "accuracy": right / seen}
            logger.info(history.update(metrics, step=(epoch + 1) * len(loader)))
        logger.info("done", accuracy=round(right / seen, 4), metrics=str(history.path))
    ezpz.cleanup()


if __name__ == "__main__":
    _settings.main(Settings, train)
