"""Train a Llama as a pipeline: each rank builds and holds its own layers only.

usage: ezpz-launch python -m ezpz.examples.pipeline [--pp=2] [--schedule=1f1b|gpipe|interleaved]

A batch goes through in microbatches, by torch's schedules. The last stage alone knows the loss.
Where ranks are left, whole pipelines are data parallel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import ezpz
import ezpz_tp
from ezpz.examples import _settings, _text
from ezpz.models import LlamaConfig, llama_pipeline


@dataclass(frozen=True, kw_only=True)
class Settings(_text.Settings):
    """Train a Llama as a pipeline.

    Attributes:
        pp: Stages; all ranks where there are fewer.
        layers: Blocks of the model.
        microbatches: Parts of a rank's batch: 1, 2, 4, 8 or 16.
        schedule: 1f1b, gpipe, or interleaved (two chunks of layers a rank).
    """

    pp: int = 2
    layers: int = 4
    microbatches: int = 4
    schedule: str = "1f1b"


def train(settings: Settings) -> None:
    """Train on all ranks. Collective: every rank calls this."""
    if settings.schedule not in ("1f1b", "gpipe", "interleaved"):
        raise _settings.UsageError(
            f"--schedule={settings.schedule}; expected 1f1b, gpipe or interleaved"
        )
    if _text.HELD_OUT % settings.microbatches:
        raise _settings.UsageError(
            f"--microbatches={settings.microbatches}; expected a divisor of {_text.HELD_OUT}, the "
            "blocks that are evaluated at the end"
        )
    pp = min(settings.pp, ezpz.get_world_size())
    ezpz.setup_torch(seed=settings.seed, pipeline_parallel_size=pp)
    logger = ezpz.get_logger("pipeline")
    text = _text.load(settings)
    config = LlamaConfig(_text.VOCABULARY, dim=64, layers=settings.layers, heads=4, kv_heads=2)
    interleaved = settings.schedule == "interleaved" and pp > 1
    pipeline = llama_pipeline(
        config, microbatches=settings.microbatches, virtual=2 if interleaved else 1,
        schedule=settings.schedule if pp > 1 else "1f1b", seed=settings.seed,
    )  # fmt: skip
    model = pipeline.module.to(ezpz.get_torch_device())
    replicas = ezpz_tp.get_data_parallel_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    here = [number for chunk in pipeline.layers for number in chunk]
    logger.info("ready", layers_of_ranks=ezpz.all_gather_object(here))

    def known(losses: torch.Tensor | None) -> float:
        """Return the mean loss, on every rank of the pipeline."""
        mine = 0.0 if losses is None else losses.mean().item()
        return ezpz.all_reduce(mine, group=ezpz_tp.get_pipeline_parallel_group())

    with ezpz.History(settings.outdir, cross_rank=True) as history:
        for step, tokens, targets in _text.batches(text, settings, replicas):
            loss = known(pipeline.step(tokens, targets))
            # In place of DDP, which does not go around a stage.
            ezpz_tp.finalize_grads(model, average_over="data")
            norm = ezpz_tp.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            history.record({"loss": loss, "gradient_norm": norm}, step=step)
        eval_loss = known(pipeline.evaluate(text.tokens, text.targets))
        history.record({"eval_loss": eval_loss}, step=settings.steps)
        logger.info("done", eval_loss=round(eval_loss, 4), metrics=str(history.path))
    ezpz.cleanup()


if __name__ == "__main__":
    _settings.main(Settings, train)
