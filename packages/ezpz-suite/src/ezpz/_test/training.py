"""The training of a test, and whether the ranks still agree after it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from pathlib import Path

import torch

import ezpz_dist
import ezpz_obs
import ezpz_tp
from ezpz.models import LlamaConfig
from ezpz_device import get_torch_device
from ezpz_topo import get_world_size

from .options import UsageError
from .result import Result
from .settings import Settings
from .text import batch, load_text
from .trainers import Trainer

_LINES = 8
"""So many lines tell how far the training is."""


def train(
    settings: Settings,
    trainer: Trainer,
    config: LlamaConfig,
    result: Result,
    folder: Path | None,
) -> None:
    """Train, until a value is not finite at the latest. Collective: every rank calls this.

    Args:
        settings: Without numbers that are chosen by the device.
        trainer: Of the model.
        config: Of the model.
        result: Takes the losses and times of the steps; on the rank with a folder the rates too.
        folder: Where rank 0 writes the metrics; None on the others, which write and say nothing.

    Raises:
        UsageError: A sequence is longer than the text.
    """
    log = ezpz_obs.get_logger("test")
    text = load_text()
    if len(text) <= settings.seq:
        raise UsageError(
            f"--seq={settings.seq}; expected fewer than the {len(text)} bytes of text that are read"
        )
    rates = ezpz_obs.Throughput(
        tokens_per_step=result.tokens_per_step,
        flops_per_token=config.flops_per_token(settings.seq),
        dtype=settings.dtype,
    )
    with contextlib.ExitStack() as stack:
        history = None
        if folder is not None:
            made = ezpz_obs.History(folder, config=dataclasses.asdict(settings))
            history = stack.enter_context(made)
        for step in range(settings.steps):
            drawn = batch(
                text, step, seed=settings.seed, sequences=settings.batch, length=settings.seq
            ).to(get_torch_device())
            begun = time.perf_counter()
            loss, norm = trainer.step(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())
            result.not_finite, mean = _over_ranks(loss, norm)
            # The sum over the ranks has waited for the device.
            seconds = time.perf_counter() - begun
            result.seconds.append(seconds)
            result.losses.append(mean)
            if history is not None:
                metrics = {"loss": mean, "gradient_norm": norm, "step_s": seconds}
                line = history.update({**metrics, **rates.metrics(seconds)}, step=step)
                if step % max(1, settings.steps // _LINES) == 0 or step == settings.steps - 1:
                    log.info(line)
            if result.not_finite:
                break
        if history is not None:
            result.rates = rates.metrics(result.median_seconds())


def _over_ranks(loss: torch.Tensor | None, norm: torch.Tensor) -> tuple[str, float]:
    """Return what is not finite, or nothing, and the mean loss. Collective."""
    own = None if loss is None else float(loss)
    bad_loss = own is not None and not math.isfinite(own)
    bad_norm = not math.isfinite(float(norm))
    total = ezpz_dist.all_reduce(
        {
            "loss": own or 0.0, "known": int(own is not None),
            "bad_losses": int(bad_loss), "bad_norms": int(bad_norm),
        }
    )  # fmt: skip
    ranks = get_world_size()
    said = [
        f"the {what} is not finite on {total[name]} of {ranks} ranks"
        for what, name in (("loss", "bad_losses"), ("gradient's norm", "bad_norms"))
        if total[name]
    ]
    return "; ".join(said), total["loss"] / total["known"]


def find_disagreement(trainer: Trainer) -> str:
    """Return in what ranks differ that should not, the same text on all; or nothing. Collective."""
    said = ""
    try:
        with _whole(trainer):
            ezpz_tp.verify_replicated(trainer.model)
    except ezpz_tp.ReplicaError as error:
        said = " ".join(str(error).split())
    # Only the ranks of one group may have seen it.
    return next((one for one in ezpz_dist.all_gather_object(said) if one), "")


def _whole(trainer: Trainer) -> contextlib.AbstractContextManager[object]:
    """Return the context in which the parameters are what ranks can compare."""
    if trainer.wrap != "fsdp":
        return contextlib.nullcontext()
    from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415  # 0.6 s

    # FSDP1 keeps shards where parameters were: compared is what they make together.
    return FullyShardedDataParallel.summon_full_params(trainer.model, writeback=False)
