"""A loop of Lightning Fabric, started by ezpz-launch: Fabric finds the ranks that are there.

usage: ezpz-launch python -m ezpz.examples.lightning_fabric [--steps=N] [--lr=X] [--outdir=DIR]

Fabric is told how many devices a node and how many nodes there are; that the processes run
already it learns from the environment that ezpz-launch sets.
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

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")
"""Fabric's, without those of fp16: 16-true trains without a loss scale, and says nothing."""


@dataclass(frozen=True, kw_only=True)
class Settings(_settings.DigitsSettings):
    """Train by Lightning Fabric on handwritten digits.

    Attributes:
        max_norm: Gradients are clipped to this norm.
        precision: Fabric's name of it: 32-true, 64-true, bf16-mixed or bf16-true.
    """

    max_norm: float = 1.0
    precision: str = "bf16-mixed"


def train(settings: Settings) -> None:
    """Train on all ranks. Collective: every rank calls this."""
    if settings.precision not in PRECISIONS:
        raise _settings.UsageError(
            f"--precision={settings.precision}; expected one of {', '.join(PRECISIONS)}"
        )
    from lightning_fabric import Fabric

    ezpz.setup_torch(seed=settings.seed)
    ranks, nodes = ezpz.get_world_size(), ezpz.get_num_nodes()
    if nodes * ezpz.get_local_world_size() != ranks:
        raise _settings.UsageError(
            f"{ezpz.get_local_world_size()} of {ranks} ranks on one of {nodes} nodes; expected as "
            "many on each: Fabric counts nodes times devices"
        )
    fabric = Fabric(
        accelerator=ezpz.get_torch_device_type(), devices=ezpz.get_local_world_size(),
        num_nodes=nodes, strategy="ddp" if ranks > 1 else "auto",
        precision=settings.precision,  # type: ignore[arg-type]  # one of Fabric's own names
    )  # fmt: skip
    fabric.launch()  # starts nothing: the ranks are there
    logger = ezpz.get_logger("lightning_fabric")
    bare = MLP((64, 128, 10))
    model, optimizer = fabric.setup(bare, torch.optim.AdamW(bare.parameters(), lr=settings.lr))
    share = max(1, settings.batch_size // ranks)
    loader = fabric.setup_dataloaders(DataLoader(digits("train"), share, shuffle=True))
    tests, answers = (part.to(fabric.device) for part in digits("test").tensors)
    with ezpz.History(settings.outdir, cross_rank=True) as history:
        for epoch in range(settings.epochs):
            for images, labels in loader:
                loss = cross_entropy(model(images), labels)
                fabric.backward(loss)
                norm = fabric.clip_gradients(model, optimizer, max_norm=settings.max_norm)
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                accuracy = (model(tests).argmax(dim=1) == answers).float().mean().item()
            metrics = {"epoch": epoch, "loss": loss, "norm": norm, "accuracy": accuracy}
            logger.info(history.update(metrics, step=(epoch + 1) * len(loader)))
        logger.info("done", accuracy=round(accuracy, 4), metrics=str(history.path))
    ezpz.cleanup()


if __name__ == "__main__":
    _settings.main(Settings, train)
