"""Checkpoints in a folder: names, atomic publication, removal."""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ezpz_dist._errors import CheckpointError

# Names.

_NAME = re.compile(r"step-(\d{8,18})(?:\.(\d{1,6}))?")
MAX_STEP = 10**18 - 1


@dataclass(frozen=True, slots=True, order=True)
class Name:
    """A checkpoint's folder: ``step-00000042``; ``step-00000042.1`` is a second of that step."""

    # A step that is saved again never touches the folder that exists: the second appears beside
    # it, whole, and only then the first is removed.

    step: int
    generation: int = 0

    def __str__(self) -> str:
        text = f"step-{self.step:08d}"
        if self.generation:
            text += f".{self.generation}"
        return text


def parse_name(text: str) -> Name | None:
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    return Name(int(match[1]), int(match[2] or 0))


def list_names(root: Path) -> list[Name]:
    """Return the names of the checkpoints in a folder, the highest step first."""
    try:
        entries = os.listdir(root)
    except FileNotFoundError:
        return []
    names = filter(None, map(parse_name, entries))
    return sorted(names, reverse=True)


def find_new_name(root: Path, step: int) -> Name:
    """Return a name for a step that no checkpoint has."""
    generations = [name.generation for name in list_names(root) if name.step == step]
    return Name(step, max(generations, default=-1) + 1)


def find_root(path: str | os.PathLike[str]) -> Path:
    text = os.fspath(path)
    if "://" in text:
        raise CheckpointError(f"{text} is a URL; expected a folder of a mounted file system")
    return Path(text).absolute()


# What appears, appears whole: written aside, flushed, renamed.

_TEMPORARY = re.compile(r"\..+\.(?:tmp|gone)-[0-9a-f]{8}")


def name_temporary(target: Path, kind: str = "tmp") -> Path:
    return target.with_name(f".{target.name}.{kind}-{uuid.uuid4().hex[:8]}")


def publish(aside: Path, target: Path) -> None:
    """Flush a folder whose files are flushed, and rename it to its name."""
    flush(aside)
    aside.rename(target)
    flush(target.parent)


def write_file(target: Path, data: bytes) -> None:
    """Write a small file whole: a reader sees the old or the new one."""
    # Not flushed: after a power cut an empty one is as good as none.
    aside = name_temporary(target)
    aside.write_bytes(data)
    aside.replace(target)


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot sync a folder, and need not.
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_folders(path: Path) -> None:
    """Make a folder and those above it, so that they outlast a power cut."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        flush(folder.parent)


# What disappears, disappears at once: renamed, then removed.


def remove(folder: Path) -> None:
    gone = name_temporary(folder, "gone")
    with suppress(FileNotFoundError):  # someone else was faster
        folder.rename(gone)
        discard(gone)


def discard(path: Path) -> None:
    """Remove a file or folder, of which nothing is needed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(root: Path) -> list[str]:
    """Remove what interrupted saves left, and return the names. Only for the folder's owner."""
    removed = []
    for entry in os.listdir(root):
        if _TEMPORARY.fullmatch(entry):
            with suppress(OSError):
                discard(root / entry)
                removed.append(entry)
    return removed


def find_size(path: Path) -> int | None:
    """Return a file's bytes; None if it does not exist."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return path.stat().st_size
    return None
