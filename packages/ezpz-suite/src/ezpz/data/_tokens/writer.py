"""Text, turned into one file of tokens: all of it, or no file."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import numpy as np

from ezpz_dist import DataError

from .format import CHUNK, HEADER_SIZE, TokenHeader, itemsize_for

Encode = Callable[[str], Sequence[int]]
"""Text to tokens: a tokenizer's ``encode``."""

BYTES = 256
"""The vocabulary without a tokenizer: a text's bytes, in UTF-8."""


def write_tokens(
    path: str | Path,
    files: Iterable[str | Path] = (),
    *,
    texts: Iterable[str] = (),
    encode: Encode | None = None,
    vocab_size: int | None = None,
    separator: int | None = None,
    progress: bool = True,
) -> Path:
    """Write documents as one file of tokens, which `TokenBlocks` reads.

    One process writes; `write_tokens_once` lets one rank do it while the others wait. The file
    appears under its name when it is whole and on disk, and not before: a reader never sees a
    part of it. Documents that are empty are left out.

    >>> from tempfile import mkdtemp
    >>> path = write_tokens(mkdtemp() + "/two.tokens", texts=["ab", "c"], progress=False)
    >>> from ezpz.data import TokenBlocks
    >>> TokenBlocks(path, block=4)[0][0].tolist()
    [97, 98, 0, 99]

    Args:
        path: Of the file; one that is there is replaced.
        files: Each a document.
        texts: Each a document, for example `huggingface_texts`; after the files.
        encode: Turns a text into tokens. None: its bytes are the tokens, and nothing is decoded.
        vocab_size: Tokens are below it; with ``encode`` only, and then needed.
        separator: A token to put behind each document: a tokenizer's ``eos_token_id``. Default:
            0 behind bytes, which no text has; with ``encode`` none.
        progress: Show how far it is, on rank 0 (`ezpz.progress`).

    Returns:
        The path.

    Raises:
        DataError: A file cannot be read or is no UTF-8; a token is outside of the vocabulary;
            there are no documents; or the file cannot be written. What was there stays then.
    """
    target = Path(path)
    for name, given in (("files", files), ("texts", texts)):
        if isinstance(given, (str, bytes, Path)):
            raise DataError(f"write_tokens: {name}={given!r}; expected a list of them")
    if (encode is None) is not (vocab_size is None):
        raise DataError(
            f"write_tokens: encode={encode}, vocab_size={vocab_size}; expected both, or neither "
            "for bytes"
        )
    if encode is None and separator is None:
        separator = 0
    size = BYTES if vocab_size is None else vocab_size
    itemsize_for(size)
    if separator is not None and not 0 <= separator < size:
        raise DataError(f"separator={separator}; expected a token, 0 to {size - 1}")
    documents: Iterable[tuple[str, str | bytes]]
    documents = _documents(files, texts, encode is not None)
    if progress:
        from ezpz_obs import progress as shown  # noqa: PLC0415  # only who wants it pays for it

        documents = shown(documents, desc=f"writing {target.name}", unit="document")
    # In the same folder, as a rename is atomic within one file system only.
    temporary = target.with_name(f".{target.name}.{uuid4().hex}")
    try:
        with open(temporary, "xb") as file:
            try:
                _write(file, documents, encode, size, separator)
                temporary.replace(target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise DataError(f"write_tokens: {error.filename or path}: {error.strerror}") from error
    return target


def _write(
    file: IO[bytes],
    documents: Iterable[tuple[str, str | bytes]],
    encode: Encode | None,
    vocab_size: int,
    separator: int | None,
) -> None:
    itemsize = itemsize_for(vocab_size)
    tokens, starts = 0, list[int]()
    kind = np.dtype(f"<u{itemsize}")
    end = b"" if separator is None else separator.to_bytes(itemsize, "little")
    out = _Checked(file)
    file.write(bytes(HEADER_SIZE))  # which is known last
    for name, content in documents:
        if isinstance(content, bytes):
            raw = content
        elif encode is None:
            raw = content.encode()
        else:
            raw = _encoded(name, content, encode, vocab_size, kind)
        if not raw:
            continue
        starts.append(tokens)
        out.put_tokens(raw + end)
        tokens += (len(raw) + len(end)) // itemsize
    if not starts:
        raise DataError("write_tokens: no documents; expected at least one with text")
    checksums = out.chunks()
    out.put(bytes(-tokens * itemsize % 8))
    out.put(struct.pack(f"<{len(starts)}Q", *starts))
    out.put(struct.pack(f"<{len(checksums)}I", *checksums))
    file.seek(0)
    file.write(TokenHeader(vocab_size, tokens, len(starts), itemsize, out.checksum).pack())
    file.flush()
    os.fsync(file.fileno())


class _Checked:
    """Writes, and keeps the checksum of all of it, and of each chunk of tokens."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.checksum = file, 0
        self._chunks, self._size = [0], 0

    def put(self, raw: bytes | memoryview) -> None:
        self._file.write(raw)
        self.checksum = zlib.crc32(raw, self.checksum)

    def put_tokens(self, raw: bytes) -> None:
        rest = memoryview(raw)
        while rest:
            if self._size == CHUNK:
                self._chunks.append(0)
                self._size = 0
            piece = rest[: CHUNK - self._size]
            self.put(piece)
            self._chunks[-1] = zlib.crc32(piece, self._chunks[-1])
            self._size += len(piece)
            rest = rest[len(piece) :]

    def chunks(self) -> list[int]:
        """Return the checksums of the chunks, the last of which may be shorter."""
        return self._chunks


def _encoded(
    name: str,
    text: str,
    encode: Encode,
    vocab_size: int,
    kind: np.dtype[Any],
) -> bytes:
    found = np.asarray(encode(text), dtype=np.int64)
    if found.ndim != 1:
        raise DataError(f"{name}: encode() returned {found.ndim} dims; expected a list of tokens")
    if found.size and not (found.min() >= 0 and found.max() < vocab_size):
        wrong = int(found.min() if found.min() < 0 else found.max())
        raise DataError(f"{name}: token {wrong}; expected 0 to vocab_size - 1 = {vocab_size - 1}")
    return found.astype(kind).tobytes()


def _documents(
    files: Iterable[str | Path], texts: Iterable[str], decode: bool
) -> Iterator[tuple[str, str | bytes]]:
    for file in files:
        raw = Path(file).read_bytes()
        try:
            yield str(file), raw.decode() if decode else raw
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: {error}; expected UTF-8") from error
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"texts[{number}] is {type(text).__name__}; expected a text")
        yield f"texts[{number}]", text
