"""Where check-points lie: a folder of a file system, or a URL that fsspec knows."""

from __future__ import annotations

import errno
import importlib
import math
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

from ezpz_dist._errors import CheckpointError

from .folder import MANIFEST, Name, is_gone, names_in, owner_of
from .owner import is_dead, owner_token

_ABANDONED = 3600.0
"""Seconds without a write after which an attempt of another host is taken for dead."""

_WRITING = ".writing-"

_NOT_SYNCED = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)
"""What file systems say that cannot sync a folder, and need not."""


class Store(Protocol):
    """What save and load need of a place. Paths are relative to its root, with slashes."""

    root: str

    def entries(self) -> list[str]:
        """Return the names in the root; none if there is no root yet."""

    def size(self, path: str) -> int | None:
        """Return a file's bytes; None: there is none."""

    def open(self, path: str, mode: str) -> IO[bytes]:
        """Open a file, ``"rb"`` or ``"wb"``."""

    def begin(self, name: Name) -> str:
        """Make the folder that a check-point is written into, and return its path."""

    def publish(self, working: str, name: Name) -> None:
        """Make the check-point, whose manifest is written, exist under its name."""

    def discard(self, working: str) -> None:
        """Remove what was written into a folder that will not be published."""

    def remove(self, name: Name) -> None:
        """Remove a check-point: at once it is one no longer, whatever happens."""

    def put(self, path: str, data: bytes) -> None:
        """Write a small file whole: a reader sees the old or the new one."""

    def remove_leftovers(self, working: str) -> list[str]:
        """Remove what dead attempts left, never a live one's or ``working``; return the names."""

    def free(self) -> float:
        """Return the bytes that there is room for; infinity where that cannot be told."""


def open_store(path: str | os.PathLike[str]) -> Store:
    """Return the store of a path, or of a URL such as ``s3://bucket/run``.

    Raises:
        ImportError: fsspec knows the protocol, but its package is not installed.
        ValueError: fsspec does not know the protocol.
    """
    text = os.fspath(path)
    return UrlStore(text) if "://" in text else FolderStore(text)


class FolderStore:
    """A folder: a check-point is written under a temporary name, and renamed when whole."""

    def __init__(self, path: str) -> None:
        self.root = str(Path(path).absolute())

    def _at(self, path: str) -> Path:
        return Path(self.root, path)

    def entries(self) -> list[str]:
        try:
            return os.listdir(self.root)
        except FileNotFoundError:
            return []

    def size(self, path: str) -> int | None:
        try:
            return self._at(path).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def open(self, path: str, mode: str) -> IO[bytes]:
        return self._at(path).open(mode)

    def begin(self, name: Name) -> str:
        root = self._at("")
        new = [path for path in (root, *root.parents) if not path.exists()]
        root.mkdir(parents=True, exist_ok=True)
        for path in new:
            _sync(path.parent)  # or all of it is gone after a power cut
        working = name.working(owner_token())
        self._at(working).mkdir()
        return working

    def publish(self, working: str, name: Name) -> None:
        _sync(self._at(working))
        # rename() replaces an empty folder of that name, and fails for any other.
        try:
            self._at(working).rename(self._at(str(name)))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise CheckpointError(
                f"{name} has appeared in {self.root} meanwhile; expected one job at a time to "
                "save there: give each its own folder"
            ) from error
        _sync(self._at(""))

    def discard(self, working: str) -> None:
        path = self._at(working)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def remove(self, name: Name) -> None:
        gone = name.gone(owner_token())
        with suppress(FileNotFoundError):  # another job was faster
            self._at(str(name)).rename(self._at(gone))
            self.discard(gone)

    def put(self, path: str, data: bytes) -> None:
        aside = self._at(f".{path}.tmp-{owner_token()}")
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self._at(path))

    def remove_leftovers(self, working: str) -> list[str]:
        # The file system's own clock, which other hosts' files were stamped by.
        now = self._at(working).stat().st_mtime
        removed = []
        for entry in self.entries():
            owner = owner_of(entry)
            mine = entry == working or (owner is None and not is_gone(entry))
            if mine or (owner is not None and not self._is_abandoned(entry, owner, now)):
                continue
            with suppress(OSError):  # another job may be removing it too
                self.discard(entry)
                removed.append(entry)
        return removed

    def free(self) -> float:
        try:
            about = os.statvfs(self.root)
        except OSError:
            return math.inf
        return about.f_bavail * about.f_frsize

    def _is_abandoned(self, entry: str, owner: str, now: float) -> bool:
        dead = is_dead(owner)
        if dead is not None:
            return dead
        try:
            return now - self._last_write(entry) > _ABANDONED
        except FileNotFoundError:
            return False  # renamed or removed while we look

    def _last_write(self, entry: str) -> float:
        path = self._at(entry)
        inside = path.iterdir() if path.is_dir() else ()
        times: list[float] = [each.stat().st_mtime for each in (path, *inside)]
        return max(times)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SYNCED:
            raise
    finally:
        os.close(descriptor)


class UrlStore:
    """A URL: renaming is no single act there, so the manifest, written last, makes it exist."""

    def __init__(self, url: str) -> None:
        # 60 ms, for URLs only; it has no types.
        url_to_fs = importlib.import_module("fsspec.core").url_to_fs
        self.root = url.rstrip("/")
        fs, path = url_to_fs(self.root)
        self._fs: Any = fs
        self._path = str(path).rstrip("/")

    def _at(self, path: str) -> str:
        return f"{self._path}/{path}" if path else self._path

    def entries(self) -> list[str]:
        return self._names("")

    def _names(self, path: str) -> list[str]:
        # Another process may have written since; several file systems remember listings.
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._at(path), detail=False)
        except FileNotFoundError:
            return []
        return [str(each).rstrip("/").rpartition("/")[2] for each in found]

    def size(self, path: str) -> int | None:
        self._fs.invalidate_cache()
        try:
            return int(self._fs.size(self._at(path)))
        except FileNotFoundError:
            return None

    def open(self, path: str, mode: str) -> IO[bytes]:
        opened: IO[bytes] = self._fs.open(self._at(path), mode)
        return opened

    def begin(self, name: Name) -> str:
        self._fs.makedirs(self._at(str(name)), exist_ok=True)
        self.put(f"{name}/{_WRITING}{owner_token()}", b"")
        return str(name)

    def publish(self, working: str, name: Name) -> None:
        del name  # it has it already
        for entry in self._names(working):
            if entry.startswith(_WRITING):
                self._fs.rm_file(self._at(f"{working}/{entry}"))

    def discard(self, working: str) -> None:
        try:
            self._fs.rm(self._at(working), recursive=True)
        except FileNotFoundError:
            return

    def remove(self, name: Name) -> None:
        with suppress(FileNotFoundError):  # another job was faster
            self._fs.rm_file(self._at(f"{name}/{MANIFEST}"))
            self.discard(str(name))

    def put(self, path: str, data: bytes) -> None:
        with self.open(path, "wb") as file:
            file.write(data)

    def remove_leftovers(self, working: str) -> list[str]:
        now = self._last_write(working, self._names(working))  # by the store's own clock
        removed = []
        for name in map(str, names_in(self.entries())):
            files = self._names(name)
            if name == working or MANIFEST in files or not self._is_abandoned(name, files, now):
                continue
            self.discard(name)
            removed.append(name)
        return removed

    def free(self) -> float:
        return math.inf

    def _is_abandoned(self, name: str, files: list[str], now: float) -> bool:
        owners = [each.removeprefix(_WRITING) for each in files if each.startswith(_WRITING)]
        if not owners:
            return bool(files)  # being removed; its first file said who writes
        known = [dead for each in owners if (dead := is_dead(each)) is not None]
        if known:
            return all(known)
        return now - self._last_write(name, files) > _ABANDONED

    def _last_write(self, name: str, files: list[str]) -> float:
        """Return when a file was last written; infinity where that cannot be told."""
        try:
            times = [self._fs.modified(self._at(f"{name}/{each}")).timestamp() for each in files]
        except (FileNotFoundError, NotImplementedError):
            return math.inf
        return max(times, default=math.inf)
