"""Text, turned into one file of tokens: all of it, or no file."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any

import numpy as np

from ezpz_dist import DataError

from .format import HEADER_SIZE, TokenHeader, itemsize_for

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
    temporary: Path | None = None
    try:
        # In the same folder, as a rename is atomic within one file system only.
        with NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            temporary = Path(file.name)
            _write(file, documents, encode, size, separator)
        temporary.chmod(0o644)
        temporary.replace(target)
    except OSError as error:
        raise DataError(f"write_tokens: {error.filename or path}: {error.strerror}") from error
    finally:
        if temporary is not None:
            with suppress(FileNotFoundError):
                temporary.unlink()
    return target


def _write(
    file: IO[bytes],
    documents: Iterable[tuple[str, str | bytes]],
    encode: Encode | None,
    vocab_size: int,
    separator: int | None,
) -> None:
    itemsize = itemsize_for(vocab_size)
    checksum, tokens, starts = 0, 0, list[int]()
    kind = np.dtype(f"<u{itemsize}")
    end = b"" if separator is None else separator.to_bytes(itemsize, "little")

    def put(raw: bytes) -> None:
        nonlocal checksum
        file.write(raw)
        checksum = zlib.crc32(raw, checksum)

    file.write(bytes(HEADER_SIZE))  # which is known last
    for name, content in documents:
        raw = content if isinstance(content, bytes) else b""
        if isinstance(content, str):
            raw = (
                content.encode()
                if encode is None
                else _encoded(name, content, encode, vocab_size, kind)
            )
        if not raw:
            continue
        starts.append(tokens)
        put(raw + end)
        tokens += (len(raw) + len(end)) // itemsize
    if not starts:
        raise DataError("write_tokens: no documents; expected at least one with text")
    put(bytes(-tokens * itemsize % 8))
    put(struct.pack(f"<{len(starts)}Q", *starts))
    file.seek(0)
    file.write(TokenHeader(vocab_size, tokens, len(starts), itemsize, checksum).pack())
    file.flush()
    os.fsync(file.fileno())


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
