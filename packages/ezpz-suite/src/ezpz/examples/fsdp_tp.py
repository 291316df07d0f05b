"""Train a Llama in two dimensions: tensor parallel within, FSDP2 across.

usage: ezpz-launch python -m ezpz.examples.fsdp_tp [--tp=2] [--steps=N] [--data=PATH]

Neighboring ranks, ``--tp`` of them, hold a part of each layer, and of the sequence between
layers; what each holds is sharded once more, with gradients and optimizer state, over the ranks
that hold the same part. The first weights are those of one process, whatever the degrees are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import ezpz
import ezpz_spmd
import ezpz_tp
from ezpz.examples import _settings, _text
from ezpz.models import Llama, LlamaConfig


@dataclass(frozen=True, kw_only=True)
class Settings(_text.Settings):
    """Train a Llama with tensor parallelism and FSDP2.

    Attributes:
        tp: Tensor-parallel ranks; all ranks where there are fewer.
        block: Tokens (bytes) in a block of text; ``tp`` divides it.
    """

    tp: int = 2


def train(settings: Settings) -> None:
    """Train on all ranks. Collective: every rank calls this."""
    tp = min(settings.tp, ezpz.get_world_size())
    ezpz.setup_torch(seed=settings.seed, tensor_parallel_size=tp)
    logger = ezpz.get_logger("fsdp_tp")
    if ezpz.get_rank() == 0:
        print(ezpz_spmd.describe_mesh(), flush=True)
    text = _text.load(settings)
    config = LlamaConfig(_text.VOCABULARY, dim=64, layers=2, heads=4, kv_heads=2)
    bare = Llama(config, parallel=True, sequence_parallel=True, seed=settings.seed)
    model = ezpz.wrap_model_for_fsdp2(bare)
    replicas = ezpz_tp.get_data_parallel_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)

    with ezpz.History(settings.outdir, cross_rank=True) as history:
        for step, tokens, targets in _text.batches(text, settings, replicas):
            loss = model(tokens, targets)
            optimizer.zero_grad()
            loss.backward()
            # The norms see a part of the sequence each: their gradients are summed here.
            ezpz_tp.finalize_grads(model)
            norm = ezpz_tp.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            history.record({"loss": loss, "gradient_norm": norm}, step=step)
        ezpz_tp.verify_replicated(model)
        with torch.no_grad():
            eval_loss = model(text.tokens, text.targets).item()
        history.record({"eval_loss": eval_loss}, step=settings.steps)
        logger.info("done", eval_loss=round(eval_loss, 4), metrics=str(history.path))
    ezpz.cleanup()


if __name__ == "__main__":
    _settings.main(Settings, train)
