"""Fine-tune a causal language model of transformers with FSDP2; with adapters of peft if asked.

usage: ezpz-launch python -m ezpz.examples.finetune --model=Qwen/Qwen3-0.6B --data=text.txt
       ... --lora=16: train adapters of rank 16 only

The same command resumes from the newest checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import Subset, TensorDataset

import ezpz
from ezpz.data import python_sources, text_files
from ezpz.examples import _settings

_logger = ezpz.get_logger("finetune")


@dataclass(frozen=True, kw_only=True)
class Settings(_settings.Settings):
    """Fine-tune a causal language model.

    Attributes:
        model: A model's folder, or its name on the hub.
        data: A text file, or a folder of them; default: the Python standard library's sources.
        steps: Optimizer steps.
        batch_size: Blocks a step, over all ranks together; rounded to as many on each.
        block: Tokens of a block.
        lr: Learning rate of AdamW at the start; it falls to 0 (cosine).
        dtype: What is computed in: bf16 or fp32. Weights are fp32.
        lora: Rank of adapters; 0 trains all weights.
        save_every: Steps from one checkpoint to the next.
        outdir: Where metrics, checkpoints and the model go; its newest checkpoint is resumed.
    """

    model: str = ""
    data: str = ""
    steps: int = 100
    batch_size: int = 8
    block: int = 512
    lr: float = 2e-5
    dtype: str = field(default="bf16", metadata={"known": ["bf16", "fp32"]})
    lora: int = field(default=0, metadata={"least": 0})
    save_every: int = 50
    outdir: str = "outputs/finetune"


def _load_model(settings: Settings) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    if settings.lora:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(
            r=settings.lora, lora_alpha=2 * settings.lora, target_modules="all-linear"
        )
        model = get_peft_model(model, adapters)
    return model


def _load_blocks(settings: Settings, tokenizer: Any) -> TensorDataset:
    if settings.data:
        files = text_files(Path(settings.data).expanduser(), "")
    else:
        files = python_sources(1_000_000)
    text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    tokens = tokenizer(text)["input_ids"]
    count = len(tokens) // settings.block
    if count < 2 * settings.batch_size:
        raise _settings.UsageError(
            f"{count} blocks of {settings.block} tokens; expected {2 * settings.batch_size} for "
            f"--batch_size={settings.batch_size}: more text by --data, or a smaller --block"
        )
    return TensorDataset(torch.tensor(tokens[: count * settings.block]).view(count, -1))


def _save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write what ``from_pretrained`` loads. Collective: every rank calls this."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if ezpz.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
        tokenizer.save_pretrained(folder)


def train(settings: Settings) -> None:
    """Fine-tune on all ranks. Collective: every rank calls this."""
    if not settings.model:
        raise _settings.UsageError("--model is missing; expected --model=FOLDER or a hub's NAME")
    from transformers import AutoTokenizer

    # An hour: ranks wait while one downloads the model.
    ezpz.setup_torch(seed=settings.seed, timeout=3600)
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    model = ezpz.wrap_model_for_fsdp2(_load_model(settings), dtype=settings.dtype)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=settings.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)

    blocks = _load_blocks(settings, tokenizer)
    (held_out,) = blocks[-settings.batch_size :]
    rest = Subset(blocks, range(len(blocks) - settings.batch_size))
    share = max(1, settings.batch_size // ezpz.get_world_size())
    device = ezpz.get_torch_device()
    how: dict[str, Any] = {"shuffle": True, "seed": settings.seed, "drop_last": True}
    loader = ezpz.DataLoader(rest, share, device=device, **how)

    outdir = Path(settings.outdir)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    state |= {"scheduler": schedule, "data": loader}
    loaded = ezpz.load_checkpoint(outdir / "checkpoints", **state)
    first = loaded.step if loaded else 0
    _logger.info("ready", from_step=first, of=settings.steps)
    with ezpz.History(settings.outdir, cross_rank=True, resume=True) as history:
        endless = chain.from_iterable(repeat(loader))
        batches = islice(endless, settings.steps - first)
        for step, (tokens,) in enumerate(batches, first + 1):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(learned, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            line = history.update({"loss": loss.item()}, step=step)
            if step % 10 == 0:
                _logger.info(line)
            if step % settings.save_every == 0 or step == settings.steps:
                whole = not settings.lora
                ezpz.save_checkpoint(outdir / "checkpoints", step=step, frozen=whole, **state)
        model.eval()
        tokens = held_out.to(device)
        with torch.no_grad():
            eval_loss = model(input_ids=tokens, labels=tokens).loss.item()
        history.update({"eval_loss": eval_loss}, step=settings.steps)
    _save_model(model, tokenizer, outdir / ("adapter" if settings.lora else "model"))
    _logger.info("done", eval_loss=round(eval_loss, 4), metrics=str(history.path))
    ezpz.cleanup()


if __name__ == "__main__":
    _settings.main(Settings, train)
