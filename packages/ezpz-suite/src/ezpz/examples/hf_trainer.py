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
        steps: Optimizer steps.
        batch_size: Blocks of text a step, over all ranks together; rounded to as many on each.
        block: Tokens (bytes) in a block of text.
        lr: Learning rate of AdamW at the start; it falls to 0 at the end.
        data: A text file, or a folder of them; default: the Python standard library's sources.
        seed: Seed of the run.
        outdir: Where metrics.jsonl goes; default: outputs/hf_trainer-DATE-TIME.
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
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
    from transformers.trainer_callback import PrinterCallback

    ezpz.setup_torch(seed=settings.seed)
    logger = ezpz.get_logger("hf_trainer")
    text = _text.load(settings)
    config = LlamaConfig(
        vocab_size=_text.VOCABULARY, hidden_size=64, intermediate_size=192,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=settings.block,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=settings.outdir,
        max_steps=settings.steps,
        per_device_train_batch_size=max(1, settings.batch_size // ezpz.get_world_size()),
        learning_rate=settings.lr,
        logging_steps=settings.log_every,
        seed=settings.seed,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        use_cpu=ezpz.get_torch_device_type() == "cpu",
    )

    # With what all ranks find: metrics.jsonl shows their mean, and that they agree.
    with ezpz.History(settings.outdir, cross_rank=True) as history:

        class Record(TrainerCallback):
            """Gives what the Trainer logs to the History."""

            def on_log(
                self,
                args: TrainingArguments,  # noqa: ARG002  # the Trainer gives it
                state: TrainerState,
                control: TrainerControl,  # noqa: ARG002  # as above
                **kwargs: Any,
            ) -> None:
                """Record and show numbers. Collective: the Trainer calls this on every rank."""
                kept = {name: value for name, value in kwargs["logs"].items() if name in RECORDED}
                if kept:
                    logger.info(history.update(kept, step=state.global_step))

        held_out = [(tokens, tokens) for tokens in text.tokens]
        trainer = Trainer(
            model=LlamaForCausalLM(config),
            args=arguments,
            train_dataset=text.blocks,
            eval_dataset=held_out,
            data_collator=collate,
            callbacks=[Record()],
        )
        trainer.remove_callback(PrinterCallback)  # it prints what the logger says
        trainer.train()
        eval_loss = trainer.evaluate()["eval_loss"]
        logger.info("done", eval_loss=round(eval_loss, 4), metrics=str(history.path))
    ezpz.cleanup()


if __name__ == "__main__":
    _settings.main(Settings, train)
