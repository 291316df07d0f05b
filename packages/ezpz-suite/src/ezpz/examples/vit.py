"""Train a vision transformer on handwritten digits, and watch how fast and how steadily it goes.

usage: ezpz-launch python -m ezpz.examples.vit [--epochs=N] [--dtype=bf16] [--report]

Each record has the time of the step and of its phases, images per second, the gradient's norm and
memory; ``--report`` ends with a page of curves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

import ezpz
import ezpz_tp
from ezpz.data import digits
from ezpz.examples import _settings
from ezpz.models import VisionTransformer, ViTConfig
from ezpz_obs import memory_metrics


@dataclass(frozen=True, kw_only=True)
class Settings(_settings.DigitsSettings):
    """Train a vision transformer on handwritten digits.

    Attributes:
        patch: Height and width of a patch: 1, 2, 4 or 8.
        layers: Blocks of the model.
        lr: Learning rate of AdamW at its highest.
        dtype: What products are computed in, by autocast: bf16, fp16 or fp32.
        report: Write report/report.html at the end; needs ezpz-obs[report].
    """

    patch: int = 4
    layers: int = 2
    lr: float = 4e-3
    dtype: str = "fp32"
    report: bool = False


def train(settings: Settings) -> None:
    """Train on all ranks. Collective: every rank calls this."""
    dtype = _settings.dtype_named(settings.dtype)
    if settings.report:  # which is written last
        _settings.require("matplotlib", "jinja2")
    ezpz.setup_torch(seed=settings.seed)
    logger = ezpz.get_logger("vit")
    device, device_type = ezpz.get_torch_device(), ezpz.get_torch_device_type()
    share = max(1, settings.batch_size // ezpz.get_world_size())
    # Batches of one size: a rate is then that of any step.
    loader = ezpz.DataLoader(
        digits("train"), share, shuffle=True, seed=settings.seed, drop_last=True
    )
    if not len(loader):
        raise _settings.UsageError(f"--batch_size={settings.batch_size}; expected at most 1438")
    images, labels = (part.to(device) for part in digits("test").tensors)
    config = ViTConfig(patch_size=settings.patch, layers=settings.layers)
    model = ezpz.wrap_model(VisionTransformer(config))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    steps = settings.epochs * len(loader)
    scheduler = OneCycleLR(optimizer, settings.lr, steps, pct_start=0.2)
    # fp16 loses gradients below 6e-8: the loss is scaled, and a step that overflows is left out.
    scaler = torch.amp.GradScaler(device_type, enabled=dtype == torch.float16)
    timer = ezpz.StepTimer()
    rates = ezpz.Throughput(samples_per_step=share * ezpz.get_world_size())

    def ask(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type, dtype=dtype, enabled=dtype != torch.float32):
            logits: torch.Tensor = model(batch.to(device))
        return logits.float()

    with ezpz.History(settings.outdir, cross_rank=True) as history:
        for epoch in range(settings.epochs):
            model.train()
            for batch, answers in timer.data(loader):
                with timer("forward"):
                    loss = cross_entropy(ask(batch), answers.to(device), label_smoothing=0.05)
                with timer("backward"):
                    scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                norm = ezpz_tp.get_grad_norm(model.parameters())
                with timer("optimizer"):
                    scaler.step(optimizer)
                    scaler.update()
                    scheduler.step()
                    optimizer.zero_grad()
                timer.step()
                step = scheduler.last_epoch  # it counts steps
                numbers = {"epoch": epoch, "loss": loss, "gradient_norm": norm}
                numbers |= {"lr": scheduler.get_last_lr()[0], **memory_metrics()}
                history.record(numbers | timer.metrics() | rates.metrics(timer.seconds), step=step)
            model.eval()
            with torch.no_grad():
                accuracy = (ask(images).argmax(dim=1) == labels).float().mean().item()
            logger.info(history.update({"accuracy": accuracy}, step=step))
        logger.info("done", accuracy=round(accuracy, 4), metrics=str(history.path))
    if settings.report and ezpz.get_rank() == 0:
        ezpz.write_report(settings.outdir)
    ezpz.cleanup()


if __name__ == "__main__":
    _settings.main(Settings, train)
