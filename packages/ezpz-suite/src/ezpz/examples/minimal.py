"""Train a small convolutional network on real handwritten digits, on every rank there is.

usage: ezpz-launch python -m ezpz.examples.minimal [--epochs=N] [--lr=X] [--use_fsdp] [--outdir=DIR]

The data are scikit-learn's 1,797 scanned digits of 8 x 8 pixels, which come with it:
nothing is downloaded. The same command trains on one rank (plain ``python``), under
ezpz-launch, mpiexec, torchrun and srun.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import fire
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, random_split

import ezpz
from ezpz_device import DeviceError
from ezpz_dist import DistError
from ezpz_topo import TopoError

Digits = Dataset[tuple[torch.Tensor, ...]]


def load_digits() -> tuple[Digits, Digits]:
    """Return training and test set: images (1, 8, 8) fp32 in 0..1, labels int64 in 0..9."""
    try:
        from sklearn.datasets import load_digits as bundled
    except ImportError as error:
        raise SystemExit(
            f"minimal: the digits come with scikit-learn ({error}); "
            "pip install 'ezpz-suite[examples]'"
        ) from error
    images, labels = bundled(return_X_y=True)
    data = TensorDataset(
        torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16,
        torch.tensor(labels, dtype=torch.int64),
    )
    # The same split on every rank, whatever its own seed.
    test_size = len(data) // 5
    train, test = random_split(
        data, [len(data) - test_size, test_size], torch.Generator().manual_seed(0)
    )
    return train, test


def make_model() -> nn.Module:
    """Return the network: (batch, 1, 8, 8) to (batch, 10) logits; 38,282 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, data: Digits, device: str) -> float:
    """Return the share of right answers. Collective: every rank takes every n-th batch."""
    rank, size = ezpz.get_rank(), ezpz.get_world_size()
    batches = list(DataLoader(data, batch_size=32))
    right = seen = 0
    for first in range(0, len(batches), size):
        # A sharded model answers only when all ranks ask: whoever has no batch left asks too.
        mine = min(first + rank, len(batches) - 1)
        images, labels = batches[mine]
        answers = model(images.to(device)).argmax(dim=1).cpu()
        if mine == first + rank:
            right += int((answers == labels).sum())
            seen += len(labels)
    return ezpz.all_reduce(right) / ezpz.all_reduce(seen)


@dataclass(frozen=True)
class Settings:
    """What can be set on the command line, as --name=value.

    Attributes:
        epochs: Passes over the training set.
        batch_size: Images a step, over all ranks together.
        lr: Learning rate of AdamW.
        seed: Seed of the run.
        use_fsdp: Shard the model (FSDP2) instead of copying it to each rank (DDP).
        outdir: Where metrics.jsonl goes; default: outputs/minimal-DATE-TIME.
    """

    epochs: int = 12
    batch_size: int = 64
    lr: float = 2e-3
    seed: int = 42
    use_fsdp: bool = False
    outdir: str = ""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UsageError(f"--{name}={value}; expected a whole number from 1")


class UsageError(Exception):
    """A setting that cannot be."""


def train(settings: Settings) -> float:
    """Train on all ranks and return the test accuracy."""
    rank = ezpz.setup_torch(seed=settings.seed)
    logger = ezpz.get_logger("minimal")
    device, size = ezpz.get_torch_device(), ezpz.get_world_size()
    logger.info("ready", ranks=size, device=device, backend=ezpz.get_torch_backend())

    train_set, test_set = load_digits()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
        train_set, num_replicas=size, rank=rank, seed=settings.seed
    )
    share = max(1, settings.batch_size // size)
    loader = DataLoader(train_set, batch_size=share, sampler=sampler)
    model = ezpz.wrap_model(make_model(), use_fsdp=settings.use_fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    # Fire takes --outdir=2024 for a number.
    folder = str(settings.outdir) or time.strftime("outputs/minimal-%Y%m%d-%H%M%S")

    test = 0.0
    with ezpz.History(folder) as history:
        for epoch in range(settings.epochs):
            sampler.set_epoch(epoch)
            losses = []
            for images, labels in loader:
                loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            mean_loss = ezpz.all_reduce(torch.stack(losses).mean().item(), op="mean")
            test = accuracy(model, test_set, device)
            metrics = {"epoch": epoch, "loss": mean_loss, "accuracy": test}
            logger.info(history.update(metrics, step=(epoch + 1) * len(loader)))
        logger.info("done", accuracy=round(test, 4), loss=mean_loss, metrics=str(history.path))
    ezpz.cleanup()
    return test


def main() -> None:
    """Run the example; what the user can mend is one line and exit status 2, not a traceback."""
    try:
        # Only the settings come from Fire: a misspelt one is refused before the training.
        train(fire.Fire(Settings, name="minimal", serialize=lambda _settings: None))
    except (UsageError, TopoError, DeviceError, DistError) as error:
        print(f"minimal: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
