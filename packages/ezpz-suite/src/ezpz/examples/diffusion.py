"""Train a diffusion transformer on handwritten digits, and have it draw all ten.

usage: ezpz-launch python -m ezpz.examples.diffusion [--epochs=N] [--rows=N] [--outdir=DIR]

The model learns what noise was added to an image; at the end every rank draws some rows of
digits out of noise. OUTDIR/samples.png shows them: a column for each digit.
After the default of epochs they are rough; after 60 most can be read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from matplotlib.image import imsave

import ezpz
from ezpz.data import digits
from ezpz.examples import _settings
from ezpz.models import DiT, DiTConfig, NoiseSchedule


@dataclass(frozen=True, kw_only=True)
class Settings(_settings.DigitsSettings):
    """Train a diffusion transformer on handwritten digits.

    Attributes:
        patch: Height and width of a patch: 1, 2, 4 or 8.
        layers: Blocks of the model.
        noise_steps: Steps from an image to noise.
        sample_steps: Steps from noise to a sample.
        rows: Rows of samples that each rank draws.
        guidance: 1 draws as the label says; above, more than it says.
        outdir: Where metrics.jsonl and samples.png go; default: outputs/diffusion-DATE-TIME.
    """

    patch: int = 4
    layers: int = 2
    noise_steps: int = 200
    sample_steps: int = 25
    rows: int = 2
    guidance: float = 2.0


def train(settings: Settings) -> None:
    """Train on all ranks. Collective: every rank calls this."""
    ezpz.setup_torch(seed=settings.seed)
    logger = ezpz.get_logger("diffusion")
    device = ezpz.get_torch_device()
    share = max(1, settings.batch_size // ezpz.get_world_size())
    loader = ezpz.DataLoader(digits("train"), share, shuffle=True, seed=settings.seed)
    images, labels = (part.to(device) for part in digits("test").tensors)
    config = DiTConfig(patch_size=settings.patch, layers=settings.layers)
    model, schedule = ezpz.wrap_model(DiT(config)), NoiseSchedule(settings.noise_steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)

    with ezpz.History(settings.outdir, cross_rank=True) as history:
        for epoch in range(settings.epochs):
            model.train()
            losses = []
            for batch, digit in loader:
                # Each rank's times and noise are its own: `setup_torch` seeded them so.
                loss = schedule.loss(model, batch.to(device) * 2 - 1, digit.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            model.eval()
            with torch.no_grad():
                # The same times and noise in every epoch, and on every rank.
                same = torch.Generator(device).manual_seed(0)
                eval_loss = schedule.loss(model, images * 2 - 1, labels, generator=same).item()
            mean = torch.stack(losses).mean().item()
            metrics = {"epoch": epoch, "loss": mean, "eval_loss": eval_loss}
            logger.info(history.update(metrics, step=(epoch + 1) * len(loader)))

        wanted = torch.arange(config.classes, device=device).repeat(settings.rows)
        drawn = schedule.sample(
            model, wanted, (1, config.image_size, config.image_size),
            steps=min(settings.sample_steps, settings.noise_steps),
            guidance=settings.guidance, no_label=config.classes,
        )  # fmt: skip
        # (ranks * rows * 10, 8, 8) to one picture of 8 * 10 columns, black on white, enlarged.
        everyone = torch.cat(ezpz.all_gather_object(drawn.cpu())).squeeze(1)
        grid = everyone.unflatten(0, (-1, config.classes)).transpose(1, 2).flatten(2).flatten(0, 1)
        if history.path is not None:  # rank 0
            picture = ((1 - grid) / 2).kron(torch.ones(4, 4)).numpy()
            imsave(history.path.with_name("samples.png"), picture, cmap="gray", vmin=0, vmax=1)
        logger.info("done", eval_loss=round(eval_loss, 4), metrics=str(history.path))
    ezpz.cleanup()


if __name__ == "__main__":
    _settings.main(Settings, train)
