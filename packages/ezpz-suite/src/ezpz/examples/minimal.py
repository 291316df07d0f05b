"""Train a small network on real handwritten digits, on every rank there is.

usage: ezpz-launch python -m ezpz.examples.minimal [--epochs=N] [--lr=X] [--use_fsdp] [--outdir=DIR]

The data are scikit-learn's 1,797 scanned digits of 8 x 8 pixels, which come with it:
nothing is downloaded. The same command trains on one rank (plain ``python``), under
ezpz-launch, mpiexec, torchrun and srun.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

import ezpz
from ezpz.data import digits
from ezpz.examples import _settings
from ezpz.models import MLP


@dataclass(frozen=True, kw_only=True)
class Settings(_settings.DigitsSettings):
    """Train a small network on handwritten digits.

    Attributes:
        use_fsdp: Shard the model (FSDP2) instead of copying it to each rank (DDP).
    """

    epochs: int = 8
    lr: float = 2e-3
    use_fsdp: bool = False


def train(settings: Settings) -> None:
    """Train on all ranks. Collective: every rank calls this."""
    ezpz.setup_torch(seed=settings.seed)
    logger = ezpz.get_logger("minimal")
    device, ranks = ezpz.get_torch_device(), ezpz.get_world_size()
    logger.info("ready", ranks=ranks, device=device, backend=ezpz.get_torch_backend())

    share = max(1, settings.batch_size // ranks)
    loader = ezpz.DataLoader(digits("train"), share, shuffle=True, seed=settings.seed)
    images, labels = (part.to(device) for part in digits("test").tensors)
    model = ezpz.wrap_model(MLP((64, 256, 10)), use_fsdp=settings.use_fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)

    # With what all ranks find: metrics.jsonl shows their mean, and that they agree.
    with ezpz.History(settings.outdir, cross_rank=True) as history:
        for epoch in range(settings.epochs):
            for batch, answers in loader:
                loss = cross_entropy(model(batch.to(device)), answers.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                right = model(images).argmax(dim=1) == labels
            accuracy = right.float().mean().item()
            metrics = {"epoch": epoch, "loss": loss.item(), "accuracy": accuracy}
            logger.info(history.update(metrics, step=(epoch + 1) * len(loader)))
        logger.info("done", accuracy=round(accuracy, 4), metrics=str(history.path))
    ezpz.cleanup()


if __name__ == "__main__":
    _settings.main(Settings, train)
