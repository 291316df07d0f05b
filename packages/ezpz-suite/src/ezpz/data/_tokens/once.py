"""One rank writes a file of tokens; the others wait for it, and know for what."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

import ezpz_dist
from ezpz_dist import DataError
from ezpz_topo import get_hostname, get_rank

from .format import TokenHeader, read_header
from .writer import write_tokens

_ROUND = 0.5
"""Seconds between two words from the writer: far within the time that a collective may take."""

_VISIBLE = 30.0
"""Seconds after which a file on a shared file system is there for every node: longer than the
attributes of a folder are cached."""

_WRITING = "writing"


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

    Collective: every rank calls this. The writer says twice a second that it is at work, so that
    the others wait as long as it takes, know within a moment that it has failed or gone, and do
    not wait longer than ``timeout``.

    Args:
        path: Of the file; see ``per``.
        files: As of `write_tokens`; or a function that returns them, which the writer alone calls:
            `python_sources`, or ``lambda: text_files(folder)``.
        texts: As of `write_tokens`; or a function likewise.
        per: ``"job"``: rank 0 writes, onto a file system that all nodes share. ``"node"``: the
            first rank of each node, onto a disk of its own.
        reuse: Take a file that is there already and whole, whatever text it is of.
        timeout: Seconds until it has to be there.
        options: As of `write_tokens`.

    Returns:
        The path.

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

    def write() -> TokenHeader:
        if not (reuse and target.exists()):
            read_from = files() if callable(files) else files
            write_tokens(target, read_from, texts=texts() if callable(texts) else texts, **options)
        return read_header(target)

    writer = _Writer(write, timeout) if get_rank() == root else None
    status = _WRITING
    while status == _WRITING:
        status = ezpz_dist.broadcast("" if writer is None else writer.status(), root, group)
    if status:
        cause = None if writer is None else writer.error
        raise DataError(f"rank {root}, which writes {target}, failed: {status}") from cause
    header = ezpz_dist.broadcast(None if writer is None else writer.header, root, group)
    assert header is not None  # the writer's
    _wait_for(target, header)
    return target


class _Writer:
    """Writes in a thread of its own, so that its rank can answer meanwhile."""

    def __init__(self, write: Callable[[], TokenHeader], timeout: float) -> None:
        self.error: Exception | None = None
        self.header: TokenHeader | None = None
        self._write, self._timeout = write, timeout
        self._start = time.monotonic()
        # A daemon: a rank that is told to end does not wait for it; the file has no name yet.
        self._thread = threading.Thread(target=self._run, name="write_tokens", daemon=True)
        self._thread.start()

    def status(self) -> str:
        """Return how it stands, within a round: nothing means done."""
        self._thread.join(min(_ROUND, self._timeout))
        if not self._thread.is_alive():
            if self.error is not None:
                return f"{type(self.error).__name__}: {self.error}"
            return "" if self.header is not None else "its thread has ended before it was done"
        if time.monotonic() - self._start < self._timeout:
            return _WRITING
        return f"it is not done after {self._timeout:g} s; give a longer timeout="

    def _run(self) -> None:
        try:
            self.header = self._write()
        except Exception as error:  # noqa: BLE001  # whatever it is, every rank raises it
            self.error = error


def _wait_for(path: Path, header: TokenHeader) -> None:
    """Wait until this host sees the new file: another node may remember an old one for a while."""
    start = time.monotonic()
    while True:
        try:
            found = read_header(path)
        except DataError as error:
            seen = str(error)
        else:
            if found == header:
                return
            seen = f"it has {found.tokens:,} tokens, and {header.tokens:,} were written"
        if time.monotonic() - start > _VISIBLE:
            raise DataError(
                f"{path} was written, but rank {get_rank()} on {get_hostname()} does not see it: "
                f"{seen}; give a path that all nodes share, or per='node'"
            )
        time.sleep(0.1)
