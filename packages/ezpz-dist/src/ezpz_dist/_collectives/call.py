"""What a rank calls, in words that all ranks must have in common."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NamedTuple

WORDS = 200
"""Characters of a call that a message shows: a dict can have thousands of keys."""


class Call(NamedTuple):
    """One call of a collective, as far as all ranks must agree on it.

    Attributes:
        name: ``"all_reduce"``, ``"broadcast(root=0)"``, ``"barrier()"``.
        op: ``"sum"``, ``"mean"``, ... where it combines; else empty.
        leaves: Where it combines: for each key in words what is there (``"float32 [3]"``);
            the key is empty where the argument is no dict.
    """

    name: str
    op: str = ""
    leaves: tuple[tuple[str, str], ...] | None = None

    def signature(self) -> str:
        """Return all of it in words: equal where the calls fit together."""
        if self.leaves is None:
            return self.name
        inner = "{" + ", ".join([f"{key}: {kind}" for key, kind in self.leaves]) + "}"
        if len(self.leaves) == 1 and not self.leaves[0][0]:
            inner = self.leaves[0][1]
        return f"{self.name} of {inner} ({self.op})"


@lru_cache(32)  # a training loop calls the same few again and again
def summary(call: Call) -> tuple[bytes, str]:
    """Return eight bytes that stand for a call, and words for whoever asks what is going on."""
    signature = call.signature()
    return digest(signature), shorten(signature)


def shorten(signature: str) -> str:
    """Return a signature at a length that a line of a message can bear."""
    return signature if len(signature) <= WORDS else f"{signature[: WORDS - 1]}…"


def digest(text: str) -> bytes:
    """Return eight bytes that stand for a text, the same in every process."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
