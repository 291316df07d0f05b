"""Text as one NumPy file of tokens, mapped to memory and read in blocks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ezpz_dist import DataError


class TokenBlocks(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive blocks of tokens, each with the token that follows each of its tokens.

    A file is mapped to memory, and a rank reads those blocks only that it asks for. Processes of
    one node share what the system has cached.

    >>> tokens, targets = TokenBlocks(torch.arange(9), block=4)[1]
    >>> tokens.tolist(), targets.tolist()
    ([4, 5, 6, 7], [5, 6, 7, 8])

    Args:
        tokens: A file that `write_tokens` or `numpy.save` wrote, or the tokens: one dim of whole
            numbers.
        block: Tokens of a block, from 1.

    Raises:
        DataError: The file cannot be read, is truncated, has no whole numbers in one dim, or is
            too short for one block.
    """

    def __init__(self, tokens: str | Path | Tensor, block: int) -> None:
        self._source = tokens
        self.block: int = block
        self._tokens = _open(tokens)
        if block < 1 or len(self) < 1:
            raise DataError(
                f"blocks of {block} tokens; expected 1 to {len(self._tokens) - 1}: there are "
                f"{len(self._tokens):,} tokens, and the last is a target only"
            )

    def __len__(self) -> int:
        """Return the number of blocks; what is left behind the last is not used."""
        return (len(self._tokens) - 1) // self.block

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return tokens and targets of a block: each ``[block]``, int64."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        start = index % len(self) * self.block
        found = torch.from_numpy(self._tokens[start : start + self.block + 1].astype(np.int64))
        return found[:-1], found[1:]

    def __getstate__(self) -> dict[str, Any]:
        # A copy that goes to a worker maps the file itself.
        return {"_source": self._source, "block": self.block}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._tokens = _open(self._source)


def _open(tokens: str | Path | Tensor) -> Any:
    if isinstance(tokens, Tensor):
        return tokens.numpy()
    try:
        found = np.load(tokens, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{tokens}: {error}; expected a file of write_tokens()") from error
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise DataError(
            f"{tokens}: {found.dtype} of shape {found.shape}; expected whole numbers in one dim"
        )
    return found


def write_tokens(
    path: str | Path,
    files: Iterable[str | Path],
    *,
    encode: Callable[[str], Sequence[int]] | None = None,
    separator: int = 0,
) -> Path:
    """Write text files as one file of tokens, which `TokenBlocks` and `numpy.load` read.

    All tokens are in memory meanwhile. The file gets its name when it is whole. In a job one rank
    calls this; the others wait in `ezpz.barrier`.

    Args:
        path: Of the file; one that is there is replaced.
        files: Each a document, in UTF-8.
        encode: A tokenizer's ``encode``. None: the bytes are the tokens.
        separator: The token behind each document: a tokenizer's ``eos_token_id``.

    Returns:
        The path.

    Raises:
        DataError: There are no files, one cannot be read or is no UTF-8, or ``path`` cannot be
            written.
    """
    target = Path(path)
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    documents: list[Any] = []
    try:
        for file in files:
            text = Path(file).read_bytes()
            if encode is None:
                documents.append(np.frombuffer(text, np.uint8))
            else:
                documents.append(np.array(encode(text.decode("utf-8")), np.uint32))
            documents.append(np.array([separator], np.min_scalar_type(separator)))
        tokens = np.concatenate(documents)
        with open(aside, "wb") as stream:
            np.save(stream, tokens.astype(np.min_scalar_type(tokens.max())))
        aside.replace(target)
    except (OSError, ValueError) as error:
        raise DataError(f"write_tokens of {path}: {error}") from error
    finally:
        if aside.exists():
            aside.unlink()
    return target
