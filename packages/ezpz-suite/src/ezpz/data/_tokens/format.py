"""A file of tokens: a header, the tokens, where each document begins, and checksums.

Little-endian: 64 bytes of header, ``tokens`` numbers of 1, 2 or 4 bytes, at the next multiple of 8
``documents`` numbers of 8 bytes, and the crc32, 4 bytes each, of every 64 KiB of tokens, so that a
rank can check what it reads without reading more. The header has a checksum of the rest and one of
itself, and the size of the file follows from it.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ezpz_dist import DataError

MAGIC = b"EZPZTOK1"
_HEADER = struct.Struct("<8sIIQQQII")
HEADER_SIZE = 64
_KINDS: dict[int, np.dtype[Any]] = {n: np.dtype(f"<u{n}") for n in (1, 2, 4)}
CHUNK = 1 << 16
"""Bytes of tokens that have a checksum of their own."""

_PIECE = 1 << 22


@dataclass(frozen=True, slots=True)
class TokenHeader:
    """What is in a file of tokens.

    Attributes:
        vocab_size: Tokens are below it.
        tokens: How many there are, separators among them.
        documents: How many documents they are of.
        itemsize: Bytes of a token: 1, 2 or 4.
        checksum: crc32 of all that follows the header.
    """

    vocab_size: int
    tokens: int
    documents: int
    itemsize: int
    checksum: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the tokens."""
        return _KINDS[self.itemsize]

    @property
    def documents_at(self) -> int:
        """Byte at which the places of documents begin."""
        return HEADER_SIZE + -(-self.tokens * self.itemsize // 8) * 8

    @property
    def chunks(self) -> int:
        """How many chunks of tokens have a checksum of their own."""
        return -(-self.tokens * self.itemsize // CHUNK)

    @property
    def checksums_at(self) -> int:
        """Byte at which the checksums of chunks begin."""
        return self.documents_at + 8 * self.documents

    @property
    def file_size(self) -> int:
        """Bytes of the whole file."""
        return self.checksums_at + 4 * self.chunks

    def pack(self) -> bytes:
        """Return the header's bytes."""
        fields = (MAGIC, self.itemsize, 0, self.vocab_size, self.tokens, self.documents)
        raw = _HEADER.pack(*fields, self.checksum, 0)[:-4]
        return (raw + struct.pack("<I", zlib.crc32(raw))).ljust(HEADER_SIZE, b"\0")


def itemsize_for(vocab_size: int) -> int:
    """Return the bytes that a token of a vocabulary takes.

    Raises:
        DataError: The vocabulary is empty, or larger than 2**32.
    """
    if not 1 <= vocab_size <= 1 << 32:
        raise DataError(f"vocab_size={vocab_size}; expected 1 to 2**32")
    return 1 if vocab_size <= 1 << 8 else 2 if vocab_size <= 1 << 16 else 4


def read_header(path: str | Path, *, verify: bool = False) -> TokenHeader:
    """Return what a file of tokens says of itself, after checking that it is whole.

    Args:
        path: Of the file.
        verify: Read all of it (some 1 GB/s), and compare the checksum.

    Raises:
        DataError: It cannot be read, is no file of tokens, or is truncated, longer than it says,
            or, with ``verify``, damaged or mixed with another.
    """
    try:
        with open(path, "rb") as file:
            raw, size = file.read(HEADER_SIZE), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; write it by write_tokens()") from error
    if len(raw) < HEADER_SIZE or not raw.startswith(MAGIC):
        raise DataError(
            f"{path}: no file of tokens, it begins with {raw[:8]!r}; write one by write_tokens()"
        )
    _, itemsize, _, vocab, tokens, documents, checksum, own = _HEADER.unpack_from(raw)
    if zlib.crc32(raw[: _HEADER.size - 4]) != own or itemsize not in _KINDS:
        raise DataError(f"{path}: its header is damaged; write it again by write_tokens()")
    header = TokenHeader(vocab, tokens, documents, itemsize, checksum)
    if size != header.file_size:
        raise DataError(
            f"{path}: has {size:,} bytes; expected {header.file_size:,}: it is "
            f"{'truncated' if size < header.file_size else 'longer than it says'}; write or copy "
            "it again"
        )
    if verify:
        found = 0
        for piece in _pieces(path):
            found = zlib.crc32(piece, found)
        if found != checksum:
            raise DataError(
                f"{path}: checksum {found:08x}; expected {checksum:08x}: it is damaged, or mixed "
                "from two files; write or copy it again"
            )
    return header


def _pieces(path: str | Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        file.seek(HEADER_SIZE)
        while piece := file.read(_PIECE):
            yield piece
