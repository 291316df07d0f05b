"""What a rank calls, in words that all ranks must have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

WORDS = 200
"""Characters of a call that a message shows: a dict can have thousands of keys."""


class Call(NamedTuple):
    """One call of a collective, as far as all ranks must agree on it.

    Attributes:
        name: ``"all_reduce"``, ``"broadcast(root=0)"``, ``"barrier()"``.
        op: ``"sum"``, ``"mean"``, ... where it combines; else empty.
        leaves: Where it combines: by key in words, what is there (``"float32 [3]"``); the
            key is empty where the argument is no dict.
    """

    name: str
    op: str = ""
    leaves: Mapping[str, str] | None = None

    def signature(self) -> str:
        """Return all of it in words: equal where the calls fit together."""
        if self.leaves is None:
            return self.name
        inner = self.leaves.get("")
        if inner is None:
            inner = "{" + ", ".join([f"{key}: {kind}" for key, kind in self.leaves.items()]) + "}"
        return f"{self.name} of {inner} ({self.op})"


def shorten(signature: str) -> str:
    """Return a signature at a length that a line of a message can bear."""
    return signature if len(signature) <= WORDS else f"{signature[: WORDS - 1]}…"


def digest(text: str) -> bytes:
    """Return eight bytes that stand for a text, the same in every process."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
