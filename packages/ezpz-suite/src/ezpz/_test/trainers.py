"""The model of a test, wrapped and split as asked, and one step of its training."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import ezpz_dist
import ezpz_tp
from ezpz.models import Llama, LlamaConfig, llama_pipeline

from .settings import Settings

_LARGEST_NORM = 1.0
"""Gradients are clipped to it."""


class Trainer(Protocol):
    """A model in training.

    Attributes:
        model: What this rank holds of it.
        wrap: How it is wrapped, in the words of ``--wrap``.
    """

    model: nn.Module
    wrap: str

    def step(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor | None, Tensor]:
        """Train on a batch, ``[batch, s]`` each. Collective: every rank calls this.

        Returns:
            The loss, the mean over this rank's tokens, where this rank knows it; and the norm
            of the whole gradient.
        """
        ...


def make_trainer(settings: Settings, config: LlamaConfig, *, device: torch.device) -> Trainer:
    """Return the trainer that the settings ask for. Collective: every rank calls this.

    Args:
        settings: With a ``dtype``.
        config: Of the model.
        device: This rank's.
    """
    wrap = settings.wrap
    if wrap == "auto":
        replicas = ezpz_tp.get_state().size("data") * settings.cp
        wrap = "ddp" if replicas > 1 and settings.pp == 1 else "none"
    if settings.pp > 1:
        return _Pipelined(settings, config, device, wrap)
    model = Llama(config, parallel=_is_split(settings), seed=settings.seed)
    if wrap == "deepspeed":
        return _DeepSpeed(settings, model)
    return _Whole(settings, model, device, wrap)


def _is_split(settings: Settings) -> bool:
    return settings.tp * settings.cp > 1


def _axes(settings: Settings) -> tuple[str, ...]:
    """Return the axes whose ranks see other tokens."""
    return ("data", "context") if settings.cp > 1 else ("data",)


def _learning_rate(config: LlamaConfig) -> float:
    """Return the step width, smaller for wider models (3e-3 at 128, 3e-4 at 1280 and beyond)."""
    return max(3e-4, 3e-3 * min(1.0, 128 / config.dim))


def _computing(settings: Settings, device: torch.device, wrap: str) -> AbstractContextManager[Any]:
    """Return the context of a forward pass; FSDP casts by itself."""
    if settings.dtype != "bf16" or wrap in ("fsdp", "fsdp2"):
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


class _Whole:
    """All layers on each rank, whole or split by tensor and context parallel ranks."""

    def __init__(self, settings: Settings, model: Llama, device: torch.device, wrap: str) -> None:
        self._settings, self._bare, self._device, self.wrap = settings, model, device, wrap
        self.model: nn.Module = model
        rate = _learning_rate(model.config)
        dtype = "bf16" if settings.dtype == "bf16" else None
        if wrap == "none":
            model.to(device)
        elif wrap == "fsdp2":
            self.model = ezpz_dist.wrap_model_for_fsdp2(model, dtype=dtype)
        elif wrap == "fsdp":
            self.model = ezpz_dist.wrap_model_for_fsdp(model, dtype=dtype)
        else:
            self.model = ezpz_dist.wrap_model_for_ddp(model)
        self._optimizer: torch.optim.Optimizer
        if wrap == "zero1":
            self._optimizer = ezpz_dist.wrap_optimizer_for_zero1(
                torch.optim.AdamW, self.model.parameters(), lr=rate
            )
        else:
            self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)

    def step(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor | None, Tensor]:
        """See `Trainer`."""
        own = [self._bare.shard_sequence(each) for each in (tokens, targets)]
        with _computing(self._settings, self._device, self.wrap):
            loss: Tensor = self.model(*own)
        loss.backward()
        if self.wrap == "fsdp":
            norm: Tensor = self.model.clip_grad_norm_(_LARGEST_NORM)  # type: ignore[operator]  # FSDP1's own, which knows its shards
        else:
            axes = _axes(self._settings) if self.wrap == "none" else ()
            ezpz_tp.finalize_grads(self.model, average_over=axes)
            norm = ezpz_tp.clip_grad_norm_(self.model.parameters(), _LARGEST_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach(), norm


class _Pipelined:
    """Some of the layers on each rank, in a pipeline."""

    def __init__(
        self, settings: Settings, config: LlamaConfig, device: torch.device, wrap: str
    ) -> None:
        self._settings, self._device, self.wrap = settings, device, wrap
        # One forward, one backward wants as many parts as stages; twice as many idle less.
        parts = 2 * settings.pp if settings.batch % (2 * settings.pp) == 0 else settings.pp
        self._pipeline = llama_pipeline(config, microbatches=parts, seed=settings.seed)
        self.model = self._pipeline.module.to(device)
        if wrap == "fsdp2":
            ezpz_dist.wrap_model_for_fsdp2(
                self.model, dtype="bf16" if settings.dtype == "bf16" else None
            )
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=_learning_rate(config))

    def step(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor | None, Tensor]:
        """See `Trainer`."""
        if self._settings.cp > 1:
            tokens, targets = (ezpz_tp.shard_sequence(each, 1) for each in (tokens, targets))
        with _computing(self._settings, self._device, self.wrap):
            losses = self._pipeline.step(tokens, targets)
        axes = _axes(self._settings) if self.wrap == "none" else ()
        ezpz_tp.finalize_grads(self.model, average_over=axes)
        norm = ezpz_tp.clip_grad_norm_(self.model.parameters(), _LARGEST_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return (None if losses is None else losses.mean()), norm


class _DeepSpeed:
    """DeepSpeed's engine, ZeRO stage 1."""

    wrap = "deepspeed"

    def __init__(self, settings: Settings, model: Llama) -> None:
        self.model: nn.Module = model
        self._engine = ezpz_dist.wrap_model_for_deepspeed(
            model,
            torch.optim.AdamW(model.parameters(), lr=_learning_rate(model.config)),
            zero_stage=1,
            dtype="bf16" if settings.dtype == "bf16" else None,
            micro_batch_size=settings.batch,
            gradient_clipping=_LARGEST_NORM,
        )[0]

    def step(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor | None, Tensor]:
        """See `Trainer`."""
        loss: Tensor = self._engine(tokens, targets)
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach(), torch.as_tensor(self._engine.get_global_grad_norm())
