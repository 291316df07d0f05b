"""Train with checkpoints: killed, preempted or out of time, the same command goes on.

usage: ezpz-launch --retries 3 --signal-before 5m python -m ezpz.examples.ddp_resume

A step is saved every ``--save_every`` steps, and once more when a signal (SIGUSR1, SIGTERM)
says that the job is to end: then all ranks agree on a step, save it, and exit with 75, which
schedulers and ezpz-launch take for "start me again". Started again, the run goes on in
mid-epoch; with as many ranks as before its loss curve is that of an undisturbed run, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import ezpz
from ezpz.data import digits
from ezpz.examples import _settings
from ezpz.models import MLP


@dataclass(frozen=True, kw_only=True)
class Settings(_settings.DigitsSettings):
    """Train with checkpoints, and go on from them.

    Attributes:
        lr: Learning rate of AdamW at the start; it falls to 0 at the end.
        save_every: Steps from one checkpoint to the next.
        outdir: Where metrics and checkpoints go; one that has checkpoints is gone on with.
    """

    epochs: int = 4
    save_every: int = 20
    outdir: str = "outputs/ddp_resume"


def train(settings: Settings) -> None:
    """Train from the newest checkpoint to the end. Collective: every rank calls this."""
    ezpz.setup_torch(seed=settings.seed)
    logger = ezpz.get_logger("ddp_resume")
    device = ezpz.get_torch_device()
    share = max(1, settings.batch_size // ezpz.get_world_size())
    loader = ezpz.DataLoader(digits("train"), share, shuffle=True, seed=settings.seed)
    images, labels = (part.to(device) for part in digits("test").tensors)
    model = ezpz.wrap_model(MLP((64, 128, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    steps = settings.epochs * len(loader)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    folder = Path(settings.outdir) / "checkpoints"
    # What a run is made of. Random streams are saved without being asked for.
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    state |= {"scheduler": scheduler, "data": loader}
    loaded = ezpz.load_checkpoint(folder, **state)
    step = loaded.step if loaded else 0
    logger.info("ready", from_step=step, of=steps, ranks=ezpz.get_world_size())

    def save(step: int) -> None:
        ezpz.save_checkpoint(folder, step=step, **state)

    with (
        ezpz.History(settings.outdir, cross_rank=True, resume=True) as history,
        ezpz.SnapshotOnSignal(save, within=60) as snapshot,
    ):
        for epoch in range(loader.epoch, settings.epochs):
            for batch, answers in loader:
                loss = cross_entropy(model(batch.to(device)), answers.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                step += 1
                history.record({"epoch": epoch, "loss": loss.item()}, step=step)
                if step % settings.save_every == 0 or step == steps:
                    save(step)
                    logger.info("saved", step=step, of=steps, loss=round(loss.item(), 4))
                # After a signal this saves, and ends the process.
                snapshot.step(step)
        with torch.no_grad():
            right = model(images).argmax(dim=1) == labels
        accuracy = right.float().mean().item()
        history.record({"accuracy": accuracy}, step=step)
        logger.info("done", accuracy=round(accuracy, 4), metrics=str(history.path))
    ezpz.cleanup()


if __name__ == "__main__":
    _settings.main(Settings, train)
