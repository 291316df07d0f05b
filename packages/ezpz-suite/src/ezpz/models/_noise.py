"""How noise comes into images step by step, and out of them again."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from ._errors import ModelError

Denoiser = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Noisy images, times, labels; returns the noise: a `DiT`, wrapped or not."""

_OFFSET, _MOST = 0.008, 0.999


class NoiseSchedule:
    """Denoising diffusion (Ho et al., arXiv:2006.11239), with a cosine schedule.

    The schedule is that of Nichol and Dhariwal (arXiv:2102.09672, equation 17), the sampler DDIM
    (Song et al., arXiv:2010.02502, equation 12), without noise of its own.

    >>> schedule = NoiseSchedule(100)
    >>> bool(schedule.signal[0] > 0.99), bool(schedule.signal[-1] < 0.01)
    (True, True)

    Args:
        steps: From an image to noise.

    Attributes:
        steps: As given.
        signal: What share of the variance is the image's after each step, ``[steps]``, fp32.

    Raises:
        ModelError: There are fewer than 2 steps.
    """

    steps: int
    signal: Tensor

    def __init__(self, steps: int = 1000) -> None:
        if steps < 2:
            raise ModelError(f"NoiseSchedule({steps}); expected at least 2 steps")
        self.steps = steps
        at = torch.arange(steps + 1, dtype=torch.float64) / steps
        kept = ((at + _OFFSET) / (1 + _OFFSET) * math.pi / 2).cos().square()
        betas = (1 - kept[1:] / kept[:-1]).clamp(max=_MOST)
        self.signal = (1 - betas).cumprod(0).float()

    def add_noise(self, images: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Return images after so many steps (equation 4 of arXiv:2006.11239).

        Args:
            images: ``[batch, ...]``, in -1..1.
            noise: As ``images``, of variance 1.
            times: ``[batch]``, int64, 0 to ``steps - 1``.
        """
        kept = self._at(times, images)
        return kept.sqrt() * images + (1 - kept).sqrt() * noise

    def loss(
        self,
        model: Denoiser,
        images: Tensor,
        labels: Tensor,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return the mean squared error of the noise that a model predicts, a scalar.

        Args:
            model: Called once: ``model(noisy, times, labels)``.
            images: ``[batch, ...]``, in -1..1.
            labels: ``[batch]``, int64.
            generator: Of times and noise, on the images' device; torch's own if None.
        """
        where = images.device
        times = torch.randint(self.steps, (len(images),), device=where, generator=generator)
        noise = torch.randn(images.shape, dtype=images.dtype, device=where, generator=generator)
        return mse_loss(model(self.add_noise(images, noise, times), times, labels), noise)

    @torch.no_grad()
    def sample(
        self,
        model: Denoiser,
        labels: Tensor,
        shape: tuple[int, ...],
        *,
        steps: int = 50,
        guidance: float = 1.0,
        no_label: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return an image for each label, made out of noise.

        Put the model into ``eval()`` before. Collective where the model is sharded over ranks:
        every rank calls this.

        Args:
            model: Called ``steps`` times (twice as often with guidance).
            labels: ``[batch]``, int64.
            shape: Of an image, as ``(1, 8, 8)``.
            steps: Of the sampler, 1 to the schedule's.
            guidance: 1: as the label says; above: more than it says (arXiv:2207.12598).
            no_label: The label that means none, with guidance: ``config.classes`` of a `DiT`.
            generator: Of the first noise, on the labels' device; torch's own if None.

        Returns:
            ``[batch, *shape]``, fp32, in -1..1.

        Raises:
            ModelError: ``steps`` are too many, or there is guidance and no ``no_label``.
        """
        if not 1 <= steps <= self.steps:
            raise ModelError(f"sample(steps={steps}); expected 1 to {self.steps}")
        if guidance != 1.0 and no_label is None:
            raise ModelError(f"guidance={guidance} without no_label; expected a DiT's classes")
        size = (len(labels), *shape)
        images = torch.randn(size, device=labels.device, generator=generator)
        order = torch.linspace(self.steps - 1, 0, steps).round().long().tolist()
        for place, time in enumerate(order):
            times = torch.full_like(labels, time)
            noise = model(images, times, labels).float()
            if no_label is not None and guidance != 1.0:
                without = model(images, times, torch.full_like(labels, no_label)).float()
                noise = without + guidance * (noise - without)
            kept = self.signal[time].item()
            clean = ((images - math.sqrt(1 - kept) * noise) / math.sqrt(kept)).clamp(-1, 1)
            if place + 1 == len(order):
                return clean
            # The noise that fits the clamped image.
            noise = (images - math.sqrt(kept) * clean) / math.sqrt(1 - kept)
            after = self.signal[order[place + 1]].item()
            images = math.sqrt(after) * clean + math.sqrt(1 - after) * noise
        return images

    def _at(self, times: Tensor, like: Tensor) -> Tensor:
        kept = self.signal.to(like.device)[times].to(like.dtype)
        return kept.view(-1, *[1] * (like.dim() - 1))
