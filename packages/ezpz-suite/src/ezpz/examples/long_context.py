"""Train a Llama on long sequences: each rank holds a part, and attends to the whole.

usage: ezpz-launch python -m ezpz.examples.long_context [--attention=ring|ulysses] [--block=N]

With ring attention keys and values travel from rank to rank; with ulysses the ranks trade parts
of the sequence for heads. Either way a rank's activations are those of ``block / cp`` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import ezpz
import ezpz_tp
from ezpz.examples import _settings, _text
from ezpz.models import Llama, LlamaConfig


@dataclass(frozen=True, kw_only=True)
class Settings(_text.Settings):
    """Train a Llama with context parallelism.

    Attributes:
        cp: Ranks that share a sequence; all ranks where there are fewer.
        attention: ring or ulysses.
        batch_size: Sequences a step, over all ranks together; rounded to as many on each.
        block: Tokens (bytes) in a sequence; ``2 * cp`` divides it.
    """

    cp: int = 2
    attention: str = "ring"
    steps: int = 40
    batch_size: int = 4
    block: int = 512
    lr: float = 4e-3


def train(settings: Settings) -> None:
    """Train on all ranks. Collective: every rank calls this."""
    if settings.attention not in ("ring", "ulysses"):
        raise _settings.UsageError(f"--attention={settings.attention}; expected ring or ulysses")
    cp = min(settings.cp, ezpz.get_world_size())
    ezpz.setup_torch(seed=settings.seed, context_parallel_size=cp)
    logger = ezpz.get_logger("long_context")
    text = _text.load(settings)
    config = LlamaConfig(
        _text.VOCABULARY, dim=64, layers=2, heads=4, kv_heads=2, max_seq_len=settings.block
    )
    model = Llama(config, parallel=True, context_parallel=settings.attention, seed=settings.seed)
    model.to(ezpz.get_torch_device())
    replicas = ezpz_tp.get_data_parallel_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    logger.info("ready", tokens=settings.block, tokens_here=settings.block // cp)

    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of this rank's part of each sequence."""
        return model.loss(model.shard_sequence(tokens), model.shard_sequence(targets))

    with ezpz.History(settings.outdir, cross_rank=True) as history:
        for step, tokens, targets in _text.batches(text, settings, replicas):
            loss = loss_of(tokens, targets)
            optimizer.zero_grad()
            loss.backward()
            ezpz_tp.finalize_grads(model, average_over=("data", "context"))
            norm = ezpz_tp.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            history.record({"loss": loss, "gradient_norm": norm}, step=step)
        ezpz_tp.verify_replicated(model)
        with torch.no_grad():
            eval_loss = ezpz.all_reduce(loss_of(text.tokens, text.targets).item(), op="mean")
        history.record({"eval_loss": eval_loss}, step=settings.steps)
        logger.info("done", eval_loss=round(eval_loss, 4), metrics=str(history.path))
    ezpz.cleanup()


if __name__ == "__main__":
    _settings.main(Settings, train)
