"""Batches of the text that the model learns: bytes of the standard library's sources."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

import ezpz_dist
import ezpz_tp
from ezpz.data import python_sources

_BYTES = 2 << 20
"""So much is read, by one rank, and sent to the others."""


def load_text() -> Tensor:
    """Return text, uint8 ``[bytes]``, the same on every rank. Collective: every rank calls this."""
    text = None
    if torch.distributed.get_rank() == 0:
        sources = b"".join(path.read_bytes() for path in python_sources(most=_BYTES))
        text = torch.frombuffer(bytearray(sources), dtype=torch.uint8)
    found = ezpz_dist.broadcast(text, root=0)
    assert found is not None  # rank 0 has some
    return found.cpu()


def batch(text: Tensor, step: int, *, seed: int, sequences: int, length: int) -> Tensor:
    """Return the tokens of a step, int64 ``[sequences, length + 1]``, on the host.

    Ranks of another data-parallel index get others; those that split one model get the same.
    """
    replica = ezpz_tp.get_data_parallel_rank()
    # Any two steps of any two replicas draw by themselves.
    drawn = hashlib.blake2b(f"{seed} {step} {replica}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(drawn, "little"))
    starts = torch.randint(len(text) - length, (sequences, 1), generator=generator)
    return text[starts + torch.arange(length + 1)].long()
