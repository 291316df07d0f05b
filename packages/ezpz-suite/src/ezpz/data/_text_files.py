"""Where text comes from: files of this machine."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from ezpz_dist import DataError

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
