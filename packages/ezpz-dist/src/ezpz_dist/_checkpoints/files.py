"""The files of one check-point, checksummed as they are written."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

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
        """Nothing: torch flushes after every tensor; `sync` does at the end."""

    def sync(self) -> None:
        self._file.flush()
        try:
            descriptor = self._file.fileno()
        except (AttributeError, OSError):
            return  # no file of this machine: closing it sends it
        os.fsync(descriptor)


class Files:
    """The files of a check-point that this process writes.

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
        with self.open(name) as stream:
            stream.write(data)

    @contextmanager
    def open(self, name: str) -> Iterator[_Summing]:
        """Open a file to be written; it is synced and known afterwards.

        Raises:
            OSError: With the file's name, whatever torch made of it.
        """
        where = f"{self._folder}/{name}"
        summing: _Summing | None = None
        try:
            with self._store.open(where, "wb") as file:
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
