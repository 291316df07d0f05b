"""What the language models among the examples train on: text of this machine, bytes as tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, repeat
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

import ezpz
from ezpz.data import TokenBlocks, loader_options, python_sources, text_files
from ezpz.examples import _settings
from ezpz_dist import DataError

VOCABULARY = 256
HELD_OUT = 16  # blocks of the text's end that are evaluated


@dataclass(frozen=True, kw_only=True)
class Settings(_settings.Settings):
    """What every example that trains on text can be told.

    Attributes:
        steps: Optimizer steps.
        batch_size: Blocks of text a step, over all ranks together; rounded to as many on each.
        block: Tokens (bytes) in a block of text.
        lr: Learning rate of AdamW.
        data: A text file, or a folder of them; default: the Python standard library's sources.
    """

    steps: int = 60
    batch_size: int = 16
    block: int = 64
    lr: float = 3e-3
    data: str = ""


@dataclass(frozen=True)
class Text:
    blocks: Dataset[tuple[Tensor, Tensor]]
    tokens: Tensor
    targets: Tensor


def load(settings: Settings) -> Text:
    """Read the text on this rank; its bytes are the tokens."""
    if settings.data:
        files = text_files(Path(settings.data).expanduser(), "")
    else:
        files = python_sources(1_000_000)  # bytes: a moment to read
    text = bytearray(b"\0".join(file.read_bytes() for file in files))
    blocks = TokenBlocks(torch.frombuffer(text, dtype=torch.uint8), settings.block)
    last = len(blocks) - HELD_OUT
    if last < settings.batch_size:
        raise DataError(
            f"{len(blocks)} blocks of {settings.block} bytes; expected at least "
            f"{settings.batch_size + HELD_OUT}: give more text by --data"
        )
    held_out = [blocks[index] for index in range(last, len(blocks))]
    tokens, targets = (
        torch.stack(part).to(ezpz.get_torch_device()) for part in zip(*held_out, strict=True)
    )
    return Text(Subset(blocks, range(last)), tokens, targets)


def batches(text: Text, settings: Settings, replicas: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield step (from 1), tokens and targets, pass after pass through the text. Collective."""
    # Ranks of one tensor-, context- or pipeline-parallel group get what one of them reads.
    share = max(1, settings.batch_size // replicas)
    loader = ezpz.DataLoader(
        text.blocks, share, shuffle=True, seed=settings.seed, drop_last=True, one_reader=True,
        device=ezpz.get_torch_device(), **loader_options(),
    )  # fmt: skip
    endless = chain.from_iterable(repeat(loader))
    some = islice(endless, settings.steps)
    shown = ezpz.progress(some, total=settings.steps, desc="train", unit="step", every=2.0)
    for step, (tokens, targets) in enumerate(shown, 1):
        yield step, tokens, targets
