"""Hugging Face's Trainer under ezpz-launch: a Llama from a configuration, text of this machine.

usage: ezpz-launch python -m ezpz.examples.hf_trainer [--steps=N] [--data=PATH] [--outdir=DIR]

Nothing is fetched from the hub. The Trainer takes the process group that `ezpz.setup_torch` made;
what it logs goes into metrics.jsonl by a callback of a few lines.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ezpz
from ezpz.examples import _settings, _text

RECORDED = ("loss", "grad_norm", "learning_rate", "eval_loss")


@dataclass(frozen=True, kw_only=True)
class Settings(_text.Settings):
    """Train a Llama by Hugging Face's Trainer.

    Attributes:
        log_every: Steps from one record of metrics to the next.
        lr: Learning rate of AdamW at the start; it falls to 0 at the end.
    """

    log_every: int = 5
    lr: float = 4e-3


def collate(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return a batch as the model takes it; the model itself shifts the labels by one token."""
    tokens = torch.stack([tokens for tokens, _ in rows])
    return {"input_ids": tokens, "labels": tokens}


def train(settings: Settings) -> None:
    """Train on all ranks. Collective: every rank calls this."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers as hf
    from transformers.trainer_callback import PrinterCallback

    ezpz.setup_torch(seed=settings.seed)
    logger = ezpz.get_logger("hf_trainer")
    logger.info("ready", ranks=ezpz.get_world_size())
    text = _text.load(settings)
    config = hf.LlamaConfig(
        vocab_size=_text.VOCABULARY, hidden_size=64, intermediate_size=192,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=settings.block,
    )  # fmt: skip
    arguments = hf.TrainingArguments(
        output_dir=settings.outdir, max_steps=settings.steps, learning_rate=settings.lr,
        per_device_train_batch_size=max(1, settings.batch_size // ezpz.get_world_size()),
        logging_steps=settings.log_every, seed=settings.seed, save_strategy="no", report_to=[],
        disable_tqdm=True, ddp_find_unused_parameters=False,
        use_cpu=ezpz.get_torch_device_type() == "cpu",
    )  # fmt: skip
    logger.info("making the trainer")

    # With what all ranks find: metrics.jsonl shows their mean, and that they agree.
    with ezpz.History(settings.outdir, cross_rank=True) as history:

        class Record(hf.TrainerCallback):
            """Gives what the Trainer logs to the History."""

            def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
                """Record and show numbers. Collective: the Trainer calls this on every rank."""
                kept = {name: value for name, value in kwargs["logs"].items() if name in RECORDED}
                if kept:
                    logger.info(history.update(kept, step=state.global_step))

        trainer = hf.Trainer(
            model=hf.LlamaForCausalLM(config), args=arguments, train_dataset=text.blocks,
            eval_dataset=[(tokens, tokens) for tokens in text.tokens], data_collator=collate,
            callbacks=[Record()],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)  # it prints what the logger says
        trainer.train()
        eval_loss = trainer.evaluate()["eval_loss"]
        logger.info("done", eval_loss=round(eval_loss, 4), metrics=str(history.path))
    ezpz.cleanup()


if __name__ == "__main__":
    _settings.main(Settings, train)
