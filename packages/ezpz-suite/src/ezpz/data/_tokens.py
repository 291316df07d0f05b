"""Text as one file of tokens: a NumPy array, mapped to memory, and an index beside it.

``text.tokens`` is what `numpy.save` writes, one dim of 1, 2 or 4 little-endian bytes a token, and
`numpy.load` reads it. ``text.tokens.index.npz`` says what else a reader needs: the vocabulary,
where each document begins, and the checksum of all tokens. Both are written under other names and
renamed when they are on disk, the index first: tokens that are there are whole.

And where text comes from: files of this machine, and data sets of Hugging Face's that are on it.
"""

from __future__ import annotations

import os
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any, TypeVar
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist
from numpy.lib import format as npy
from torch import Tensor
from torch.utils.data import Dataset

import ezpz_dist
from ezpz_dist import DataError
from ezpz_topo import get_hostname, get_rank

T = TypeVar("T")

Encode = Callable[[str], Sequence[int]]
"""Text to tokens: a tokenizer's ``encode``."""

_START = 128  # bytes of NumPy's header, which it pads so that any number of tokens fits in
_ONE = (str, bytes, Path)  # what is given instead of a list of it, by mistake


@dataclass(frozen=True, slots=True)
class TokenHeader:
    """What is in a file of tokens.

    Attributes:
        vocab_size: Tokens are below it.
        tokens: How many there are, separators among them.
        documents: How many documents they are of.
        itemsize: Bytes of a token: 1, 2 or 4.
        checksum: crc32 of the tokens.
    """

    vocab_size: int
    tokens: int
    documents: int
    itemsize: int
    checksum: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the tokens."""
        return np.dtype(f"<u{self.itemsize}")


def read_header(path: str | Path, *, verify: bool = False) -> TokenHeader:
    """Return what the index of a file of tokens says, after checking that it fits the file.

    Args:
        path: Of the file.
        verify: Read all of it (some 1 GB/s), and compare the checksum.

    Raises:
        DataError: It cannot be read, is no file of tokens, has no index or another's, or is
            truncated, longer than its index says, or, with ``verify``, damaged.
    """
    header, tokens = _open(Path(path))
    if verify:
        _verify(path, header, tokens)
    return header


class TokenBlocks(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive blocks of tokens, each with the token that follows each of its tokens.

    The file is mapped to memory, and a rank reads those blocks only that it asks for:
    `DataLoader` deals them out. Processes of one node share what the system has cached. A copy
    that goes to a worker, forked or spawned, maps the file itself.

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
        verify: Read all of the file, some 1 GB/s, and compare its checksum. False where one rank
            has done so for all, as `write_tokens_once` does. That the file has the size that its
            index says is checked always.

    Attributes:
        header: What the index says of the file.
        block: Tokens of a block.

    Raises:
        DataError: The file is missing, no file of tokens, truncated, damaged, mixed from two
            files, or too short for one block.
    """

    header: TokenHeader

    def __init__(self, path: str | Path, block: int, *, verify: bool = True) -> None:
        self.path: Path = Path(path)
        self.block: int = block
        self.header, self._tokens = _open(self.path)
        if block < 1 or len(self) < 1:
            raise DataError(
                f"{path}: blocks of {block} tokens; expected 1 to {self.header.tokens - 1}: it has "
                f"{self.header.tokens:,} tokens, and the last is a target only"
            )
        if verify:
            _verify(path, self.header, self._tokens)

    def __len__(self) -> int:
        """Return the number of blocks; what is left behind the last is not used."""
        return (self.header.tokens - 1) // self.block

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return tokens and targets of a block: each ``[block]``, int64."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        start = index % len(self) * self.block
        found = torch.from_numpy(self._tokens[start : start + self.block + 1].astype(np.int64))
        return found[:-1], found[1:]

    @property
    def vocab_size(self) -> int:
        """Tokens are below it."""
        return self.header.vocab_size

    @property
    def documents(self) -> Tensor:
        """Where each document begins, counted in tokens: ``[documents]``, int64."""
        with np.load(_index_of(self.path)) as index:
            return torch.from_numpy(index["documents"])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_tokens"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._tokens = np.load(self.path, mmap_mode="r")


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
    part of it. It is an array of NumPy's; ``PATH.index.npz`` beside it belongs to it. Documents
    that are empty are left out.

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
    for name, given in (("files", files), ("texts", texts)):
        if isinstance(given, _ONE):
            raise DataError(f"write_tokens: {name}={given!r}; expected a list of them")
    if (encode is None) is not (vocab_size is None):
        raise DataError(
            f"write_tokens: encode={encode}, vocab_size={vocab_size}; expected both, or neither "
            "for bytes"
        )
    if encode is None and separator is None:
        separator = 0
    size = 256 if vocab_size is None else vocab_size  # without a tokenizer: bytes, in UTF-8
    if not 1 <= size <= 1 << 32:
        raise DataError(f"vocab_size={size}; expected 1 to 2**32")
    if separator is not None and not 0 <= separator < size:
        raise DataError(f"separator={separator}; expected a token, 0 to {size - 1}")
    documents: Iterable[bytes] = _documents(files, texts, encode, size)
    if progress:
        from ezpz_obs import progress as shown  # noqa: PLC0415  # only who wants it pays for it

        documents = shown(documents, desc=f"writing {Path(path).name}", unit="document")
    try:
        _replace(Path(path), documents, size, separator)
    except OSError as error:
        raise DataError(f"write_tokens: {error.filename or path}: {error.strerror}") from error
    return Path(path)


def _replace(
    target: Path, documents: Iterable[bytes], vocab_size: int, separator: int | None
) -> None:
    """Write tokens and index, and give them their names when they are whole."""
    # In the same folder, as a rename is atomic within one file system only.
    names = _index_of(target), target
    made = [name.with_name(f".{name.name}.{uuid4().hex}") for name in names]
    try:
        with open(made[0], "xb") as index, open(made[1], "xb") as file:
            _write(file, index, documents, vocab_size, separator)
        for temporary, name in zip(made, names, strict=True):
            temporary.replace(name)
    except BaseException:  # also Ctrl-C: no half file stays; raised again
        for temporary in made:
            temporary.unlink(missing_ok=True)
        raise


def write_tokens_once(
    path: str | Path,
    files: Iterable[str | Path] | Callable[[], Iterable[str | Path]] = (),
    *,
    texts: Iterable[str] | Callable[[], Iterable[str]] = (),
    per: str = "job",
    reuse: bool = False,
    timeout: float = 3600.0,
    **options: Any,
) -> Path:
    """Write a file of tokens on one rank, and return on all of them when it is there.

    Collective: every rank calls this. Between documents the writer says twice a second that it is
    at work. So the others wait as long as it takes, and know at once that it has failed or ended.

    Args:
        path: Of the file; see ``per``.
        files: As of `write_tokens`; or a function that returns them, which the writer alone calls:
            `python_sources`, or ``lambda: text_files(folder)``.
        texts: As of `write_tokens`; or a function likewise.
        per: ``"job"``: rank 0 writes, onto a file system that all nodes share. ``"node"``: the
            first rank of each node, onto a disk of its own.
        reuse: Take a file that is there already and whole, whatever text it is of.
        timeout: Seconds until it has to be there; looked at between documents.
        options: As of `write_tokens`.

    Returns:
        The path. The writer has its checksum: `TokenBlocks` need not verify it again.

    Raises:
        DataError: On every rank: the writer failed, or was not done in time. Or where it is so:
            the file is not to be seen.
        NotSetUpError: There are several ranks and `ezpz.setup_torch` was not called.
        ValueError: ``per`` is neither.
    """
    if per not in ("job", "node"):
        raise ValueError(f"per={per!r}; expected 'job' or 'node'")
    target = Path(path)
    group = ezpz_dist.node_group() if per == "node" else None
    root = 0 if group is None else dist.get_process_group_ranks(group)[0]

    def tell(status: str, header: TokenHeader | None = None) -> tuple[str, TokenHeader | None]:
        return ezpz_dist.broadcast((status, header), root, group)

    def write() -> TokenHeader:
        if not (reuse and target.exists()):
            alive = _Alive(lambda: tell(_WRITING), timeout)
            write_tokens(target, alive.in_all(files), texts=alive.in_all(texts), **options)
        return read_header(target, verify=reuse)

    status, header, cause = _WRITING, None, None
    if get_rank() == root:
        try:
            status, header = "", write()
        except Exception as error:  # noqa: BLE001  # whatever it is, every rank raises it
            status, cause = f"{type(error).__name__}: {error}", error
        tell(status, header)
    while status == _WRITING:
        status, header = tell("")
    if header is None:
        raise DataError(f"rank {root}, which writes {target}, failed: {status}") from cause
    _wait_for(target, header)
    return target


_WRITING = "writing"
_ROUND = 0.5  # seconds between two words from the writer: far within a collective's time
# Seconds after which a file on a shared file system is there for every node: longer than the
# attributes of a folder are cached.
_VISIBLE = 30.0


class _Alive:
    """Tells the other ranks that the writer is at work, whenever it takes the next document."""

    def __init__(self, tell: Callable[[], object], timeout: float) -> None:
        self._tell, self._timeout = tell, timeout
        self._begun = self._said = time.monotonic()

    def in_all(self, given: Iterable[T] | Callable[[], Iterable[T]]) -> Iterable[T]:
        found = given() if callable(given) else given
        if isinstance(found, _ONE):
            return found  # type: ignore[return-value]  # which write_tokens refuses
        return map(self._in, found)

    def _in(self, document: T) -> T:
        now = time.monotonic()
        if now - self._begun > self._timeout:
            raise DataError(f"it is not done after {self._timeout:g} s; give a longer timeout=")
        if now - self._said > _ROUND:
            self._said = now
            self._tell()
        return document


def _wait_for(path: Path, header: TokenHeader) -> None:
    """Wait until this host sees the new file: another node may remember an old one for a while."""
    start = time.monotonic()
    while True:
        try:
            if (found := read_header(path)) == header:
                return
            seen = f"it has {found.tokens:,} tokens, and {header.tokens:,} were written"
        except DataError as error:
            seen = str(error)
        if time.monotonic() - start > _VISIBLE:
            raise DataError(
                f"{path} was written, but rank {get_rank()} on {get_hostname()} does not see it: "
                f"{seen}; give a path that all nodes share, or per='node'"
            )
        time.sleep(0.1)


def _index_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.index.npz")


_AGAIN = "write or copy it again, with its index"


def _open(path: Path) -> tuple[TokenHeader, Any]:
    """Return what the index says and the array, mapped, after checking that the two fit."""
    try:
        with open(path, "rb") as file:
            start, size = file.read(8), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; write it by write_tokens()") from error
    if not start.startswith(npy.MAGIC_PREFIX):
        said = f"it begins with {start!r}"
        raise DataError(f"{path}: no file of tokens, {said}; write one by write_tokens()")
    index = _index_of(path)
    try:
        with np.load(index) as found:
            header = TokenHeader(*map(int, found["header"]))
    except FileNotFoundError as error:
        raise DataError(f"{path}: {index.name} is not beside it; {_AGAIN}") from error
    except Exception as error:  # what zipfile raises of damage has many classes
        raise DataError(f"{index}: {error}; expected a whole index; {_AGAIN}") from error
    expected = _START + header.tokens * header.itemsize
    if size != expected:
        raise DataError(
            f"{path}: has {size:,} bytes; expected {expected:,}: it is "
            f"{'truncated' if size < expected else 'longer than its index says'}; {_AGAIN}"
        )
    try:
        tokens = np.load(path, mmap_mode="r")
    except Exception as error:  # what NumPy raises of damage has many classes, too
        raise DataError(f"{path}: its header is damaged: {error}; {_AGAIN}") from error
    if (tokens.dtype, tokens.shape) != (header.dtype, (header.tokens,)):
        raise DataError(
            f"{path}: has {tokens.dtype} of shape {tokens.shape}; expected {header.dtype} of shape "
            f"({header.tokens},), as its index says; {_AGAIN}"
        )
    return header, tokens


def _verify(path: str | Path, header: TokenHeader, tokens: Any) -> None:
    if (found := zlib.crc32(tokens)) != header.checksum:
        raise DataError(
            f"{path}: checksum {found:08x}; expected {header.checksum:08x}: it is damaged, or "
            f"mixed from two files; {_AGAIN}"
        )


def _write(
    file: IO[bytes], index: IO[bytes], documents: Iterable[bytes], size: int, separator: int | None
) -> None:
    """Write the tokens, then how many there are, and the index."""
    itemsize = _itemsize(size)
    end = b"" if separator is None else separator.to_bytes(itemsize, "little")
    tokens, checksum, starts = 0, 0, list[int]()
    file.seek(_START)
    for raw in documents:
        if raw:
            starts.append(tokens)
            whole = raw + end
            file.write(whole)
            checksum = zlib.crc32(whole, checksum)
            tokens += len(whole) // itemsize
    if not starts:
        raise DataError("write_tokens: no documents; expected at least one with text")
    header = TokenHeader(size, tokens, len(starts), itemsize, checksum)
    file.seek(0)
    told = {"descr": header.dtype.str, "fortran_order": False, "shape": (tokens,)}
    npy.write_array_header_1_0(file, told)
    assert file.tell() == _START, "NumPy's header has another size than any NumPy's had"
    np.savez(index, header=np.array(astuple(header)), documents=np.array(starts))
    for each in (file, index):
        each.flush()
        os.fsync(each.fileno())


def _itemsize(vocab_size: int) -> int:
    return 1 if vocab_size <= 1 << 8 else 2 if vocab_size <= 1 << 16 else 4


def _documents(
    files: Iterable[str | Path], texts: Iterable[str], encode: Encode | None, vocab_size: int
) -> Iterator[bytes]:
    for file in files:
        raw = Path(file).read_bytes()
        if encode is None:
            yield raw
            continue
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: {error}; expected UTF-8") from error
        yield _encoded(str(file), text, encode, vocab_size)
    for number, text in enumerate(texts):
        name = f"texts[{number}]"
        if not isinstance(text, str):
            raise DataError(f"{name} is {type(text).__name__}; expected a text")
        yield text.encode() if encode is None else _encoded(name, text, encode, vocab_size)


def _encoded(name: str, text: str, encode: Encode, vocab_size: int) -> bytes:
    found = np.asarray(encode(text), dtype=np.int64)
    if found.ndim != 1:
        raise DataError(f"{name}: encode() returned {found.ndim} dims; expected a list of tokens")
    if found.size and not (found.min() >= 0 and found.max() < vocab_size):
        wrong = int(found.min() if found.min() < 0 else found.max())
        raise DataError(f"{name}: token {wrong}; expected 0 to vocab_size - 1 = {vocab_size - 1}")
    return found.astype(f"<u{_itemsize(vocab_size)}").tobytes()


# Where text comes from.

_NOT_SOURCES = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def python_sources(most: int | None = None) -> list[Path]:
    """Return the files of Python's own standard library: real text, on every machine.

    In the order of their names, without tests and installed packages.

    >>> python_sources(most=10_000)[0].name
    '__future__.py'

    Args:
        most: Bytes; files are left out from the one on that would go beyond it. All (some 15 MB)
            if None.

    Raises:
        DataError: There are none: this Python has its library in a zip file, or ``most`` is less
            than the first of them has.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    return _within(most, _walk(folder, ".py"), folder)


def text_files(path: str | Path, suffix: str = ".txt", *, most: int | None = None) -> list[Path]:
    """Return a file, or all files with a suffix below a folder, in the order of their names.

    Args:
        path: A file, whatever its suffix, or a folder.
        suffix: Of the files wanted; empty: all.
        most: Bytes, as of `python_sources`.

    Raises:
        DataError: There is no such file, or none in the folder; or one of them, or a folder in
            it, cannot be read.
    """
    place = Path(path)
    found = [place] if place.is_file() else list(_walk(place, suffix))
    return _within(most, found, place)


def _walk(folder: Path, suffix: str) -> Iterable[Path]:
    for where, folders, names in os.walk(folder, onerror=_refuse):
        # What os.walk descends into next; sorted, so that it is the same everywhere.
        folders[:] = sorted(set(folders) - _NOT_SOURCES) if suffix == ".py" else sorted(folders)
        yield from (Path(where, name) for name in sorted(names) if name.endswith(suffix))


def _refuse(error: OSError) -> None:
    """Let no text be missing because of a folder that cannot be read, which os.walk passes over."""
    raise DataError(
        f"no text files in {error.filename}: {error.strerror}; expected a folder that can be read"
    ) from error


def _within(most: int | None, files: Iterable[Path], where: Path) -> list[Path]:
    kept, size = list[Path](), 0
    for file in files:
        try:
            size += file.stat().st_size
        except OSError as error:
            raise DataError(f"{file}: {error.strerror}; expected a file of text") from error
        if most is not None and size > most:
            break
        kept.append(file)
    if not kept:
        limit = "" if most is None else f" within {most:,} bytes"
        raise DataError(f"no text files in {where}{limit}; expected at least one")
    return kept


def huggingface_texts(
    source: str | Path | Any, column: str = "text", *, split: str = "train"
) -> Iterator[str]:
    """Yield the texts of a Hugging Face data set, for ``write_tokens(path, texts=...)``.

    Nothing is downloaded: fetch the data set once where there is a network, by
    ``datasets.load_dataset(...).save_to_disk(folder)``, and give the folder. A data set that is
    indexed by samples goes into a `DataLoader` as it is.

    Args:
        source: A folder that ``save_to_disk`` wrote, or a ``Dataset`` or ``DatasetDict``.
        column: Which has the texts.
        split: Of a ``DatasetDict``.

    Raises:
        DataError: When the first text is asked for: ``datasets`` is not installed; there is no
            such folder, split or column; or the column has something else than texts.
    """
    found: Any = _opened(source) if isinstance(source, (str, Path)) else source
    if not hasattr(found, "column_names"):
        raise DataError(f"a {type(found).__name__}; expected a Hugging Face Dataset, or a folder")
    if isinstance(found, dict):  # as a DatasetDict is
        if split not in found:
            raise DataError(f"no split {split!r}; expected one of {', '.join(map(repr, found))}")
        found = found[split]
    names = found.column_names or ()
    if column not in names:
        raise DataError(f"no column {column!r}; expected one of {', '.join(map(repr, names))}")
    # As many rows at once as Arrow's files have in a batch.
    for batch in found.select_columns([column]).iter(batch_size=1000):
        for text in batch[column]:
            if not isinstance(text, str):
                raise DataError(f"column {column!r} has a {type(text).__name__}; expected texts")
            yield text


def _opened(folder: str | Path) -> object:
    try:
        load_from_disk: Any = import_module("datasets").load_from_disk  # an extra, without types
    except ImportError as error:
        raise DataError(
            f"{folder}: reading it takes datasets ({error}); pip install 'ezpz-suite[huggingface]'"
        ) from error
    # Asked for first, as datasets would take anything else for a name on the hub.
    if not Path(folder).is_dir():
        raise DataError(f"{folder}: no folder; expected one that Dataset.save_to_disk wrote")
    try:
        return load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: {error}; expected what Dataset.save_to_disk wrote") from error
