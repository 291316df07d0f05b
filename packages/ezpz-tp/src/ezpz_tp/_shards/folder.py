"""A folder that is there whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ezpz_tp._errors import ParallelError


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Yield a folder to write into that becomes ``path`` when the ``with`` block ends.

    It is beside ``path`` until then, and goes with all that is in it if the block fails.

    Raises:
        ParallelError: ``path`` is there already, and not an empty folder.
    """
    path = Path(path).resolve()  # also of a link: what it leads to
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ParallelError(
            f"{path}: exists, and is not an empty folder; expected none: nothing is overwritten. "
            "Give another, or remove it"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    partial.mkdir()
    try:
        yield partial
        sync(partial)
        partial.rename(path)  # also onto an empty folder
        sync(path.parent)
    except BaseException:  # also at Ctrl-C: no half a folder stays; raised again
        shutil.rmtree(partial, ignore_errors=True)
        raise


def sync(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
