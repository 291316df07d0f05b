"""The files of one check-point, checksummed as they are written."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

from torch.distributed.checkpoint.filesystem import FileSystemBase

from .manifest import Written
from .store import Store


class _Summing(io.RawIOBase):
    """Passes bytes on to a file, and counts and sums them."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file = file
        self.crc32 = self.count = 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = self._file.write(data)
        except OSError as error:
            self.failure = error  # torch's writer, in between, raises something else
            raise
        self.crc32 = zlib.crc32(data, self.crc32)
        self.count += written
        return written

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.count

    def flush(self) -> None:
        """Nothing: DCP flushes after every tensor; `sync` does at the end."""

    def sync(self) -> None:
        self._file.flush()
        try:
            descriptor = self._file.fileno()
        except (AttributeError, OSError):
            return  # no file of this machine: closing it sends it
        os.fsync(descriptor)


class Files(FileSystemBase):
    """What `torch.distributed.checkpoint` writes and reads through.

    Args:
        store: Where.
        folder: Of the check-point.

    Attributes:
        written: The files that this process wrote, by name.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self._store, self._folder = store, folder
        self.written: dict[str, Written] = {}

    def write(self, name: str, data: bytes) -> None:
        """Write a file that is synced when this returns."""
        with self.create_stream(name, "wb") as stream:
            stream.write(data)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file; one that was written is synced and known afterwards.

        Raises:
            OSError: With the file's name, whatever torch made of it.
        """
        name = os.fspath(path)
        where = f"{self._folder}/{name}"
        if mode != "wb":
            with self._store.open(where, mode) as file:
                yield cast("io.IOBase", file)
            return
        summing: _Summing | None = None
        try:
            with self._store.open(where, mode) as file:
                summing = _Summing(file)
                yield summing
                summing.sync()
        except (OSError, RuntimeError) as error:
            origin = (summing and summing.failure) or error
            if not isinstance(origin, OSError):
                raise
            place = f"{self._store.root}/{where}"
            raise OSError(origin.errno, origin.strerror or str(origin), place) from error
        self.written[name] = Written(summing.count, summing.crc32)

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        """Return a file's name: the folder is known."""
        del path
        return suffix

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file that was written."""
        name, to = os.fspath(path), os.fspath(new_path)
        self._store.rename(f"{self._folder}/{name}", f"{self._folder}/{to}")
        self.written[to] = self.written.pop(name)

    def init_path(self, path: str | os.PathLike[str]) -> str:
        """Return the path as it is."""
        return os.fspath(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: rank 0 made the folder."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Return whether this process wrote the file: the folder was empty."""
        return os.fspath(path) in self.written

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Refuse: nothing is removed from a check-point."""
        raise OSError(f"{path} is not to be removed")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it can be a check-point's."""
        return bool(checkpoint_id)
