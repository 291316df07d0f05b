"""Blocks of a file of tokens, in the order of the file."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ezpz_dist import DataError

from .format import CHUNK, HEADER_SIZE, TokenHeader, read_header


class TokenBlocks(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive blocks of tokens, each with the token that follows each of its tokens.

    The file is mapped to memory, and a rank reads those blocks only that it asks for:
    `DataLoader` deals them out. Processes of one node share what the system has cached. A copy
    that goes to a worker, forked or spawned, maps the file anew.

    >>> from tempfile import mkdtemp
    >>> from ezpz.data import python_sources, write_tokens
    >>> files = python_sources(most=100_000)
    >>> path = write_tokens(mkdtemp() + "/stdlib.tokens", files, progress=False)
    >>> tokens, targets = TokenBlocks(path, block=256)[0]
    >>> bool((tokens[1:] == targets[:-1]).all())
    True

    Args:
        path: What `write_tokens` wrote.
        block: Tokens of a block, from 1.
        verify: Compare the checksum of each 64 KiB when this process reads of it first, which
            takes some 0.05 ms. That the file has the size that its header says is checked always.

    Attributes:
        header: What the file says of itself.
        block: Tokens of a block.

    Raises:
        DataError: The file is missing, no file of tokens, truncated, or too short for one block;
            or, when a block is read: it is damaged there, or mixed from two files.
    """

    path: Path
    block: int
    verify: bool
    header: TokenHeader

    def __init__(self, path: str | Path, block: int, *, verify: bool = True) -> None:
        self.path, self.block, self.verify = Path(path), block, verify
        self.header = read_header(path)
        if block < 1 or len(self) < 1:
            raise DataError(
                f"{path}: blocks of {block} tokens; expected 1 to {self.header.tokens - 1}: it has "
                f"{self.header.tokens:,} tokens, and the last is a target only"
            )
        self._map()

    def __len__(self) -> int:
        """Return the number of blocks; what is left behind the last is not used."""
        return (self.header.tokens - 1) // self.block

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return tokens and targets of a block: each ``[block]``, int64."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        start = index % len(self) * self.block
        if self.verify:
            self._check(start, start + self.block + 1)
        found = torch.from_numpy(self._tokens[start : start + self.block + 1].astype(np.int64))
        return found[:-1], found[1:]

    @property
    def vocab_size(self) -> int:
        """Tokens are below it."""
        return self.header.vocab_size

    @property
    def documents(self) -> Tensor:
        """Where each document begins, counted in tokens: ``[documents]``, int64."""
        header = self.header
        places = np.fromfile(
            self.path, dtype="<u8", count=header.documents, offset=header.documents_at
        )
        return torch.from_numpy(places.astype(np.int64))

    def _check(self, start: int, stop: int) -> None:
        """Compare the checksums of the chunks that these tokens are in, once in a process."""
        size = self.header.itemsize
        for chunk in range(start * size // CHUNK, (stop * size - 1) // CHUNK + 1):
            if self._checked[chunk]:
                continue
            first = chunk * CHUNK // size
            found = zlib.crc32(self._tokens[first : first + CHUNK // size].data)
            if found != self._checksums[chunk]:
                raise DataError(
                    f"{self.path}: checksum {found:08x} of the {CHUNK >> 10} KiB from token "
                    f"{first:,} on; expected {self._checksums[chunk]:08x}: it is damaged, or mixed "
                    "from two files; write or copy it again"
                )
            self._checked[chunk] = 1

    def _map(self) -> None:
        header = self.header
        self._tokens = np.memmap(self.path, header.dtype, "r", HEADER_SIZE, (header.tokens,))
        self._checksums = np.memmap(self.path, "<u4", "r", header.checksums_at, (header.chunks,))
        self._checked = bytearray(header.chunks)

    def __getstate__(self) -> dict[str, Any]:
        here = "_tokens", "_checksums", "_checked"
        return {name: value for name, value in vars(self).items() if name not in here}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._map()
