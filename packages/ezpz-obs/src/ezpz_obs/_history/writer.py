"""The file of a `History`, which training never waits for and never fails for."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from ezpz_obs._records.file import LineFile
from ezpz_obs._records.lines import encode_anything, encode_record, seal

logger = logging.getLogger("ezpz_obs")

_LOOK = 1.0  # seconds between looks whether the file is still where it was


class Writer:
    """Writes lines as they come; of what cannot be written, one warning and the number.

    Args:
        file: Where to.
        checksum: Add a checksum to each line: about 1 µs a record.
        sync: Have the disk confirm each record (True), or one in so many seconds (a number).
    """

    def __init__(self, file: LineFile, *, checksum: bool, sync: bool | float) -> None:
        self._file = file
        self._checksum = checksum
        self._sync_every = (0.0 if sync is True else float(sync)) if sync is not False else None
        self._synced = self._looked = time.time()
        self._said = False
        self.lost = 0
        """Lines that are not in the file."""

    def put(self, line: Mapping[str, Any], now: float, *, look: bool = True) -> None:
        """Write a header, event or record.

        Args:
            line: What to write.
            now: Seconds since 1970.
            look: Where the folder is gone, make it anew.
        """
        text = encode_record(line) or encode_anything(line)
        try:
            self._file.write(seal(text) if self._checksum else text)
        except OSError as error:
            self.lost += 1
            self._fail(error)
        try:
            if self._sync_every is not None and now - self._synced >= self._sync_every:
                self._file.sync()
                self._synced = now
        except OSError as error:
            self._fail(error)
        if look and (now - self._looked >= _LOOK or now < self._looked):
            self._look(now)

    def _look(self, now: float) -> None:
        """Where somebody removed the folder, what is written goes nowhere: make it anew."""
        self._looked = now
        if self._file.is_there():
            return
        try:
            self._file.restore()
        except OSError as error:
            self._fail(error)
        else:
            logger.warning(
                "%s was removed while it was being written; it is there again, with all records",
                self._file.path,
            )

    def _fail(self, error: OSError) -> None:
        if not self._said:
            self._said = True
            logger.warning(
                "metrics cannot be written to %s (%s); expected room and permission there: "
                "training goes on, and so do the attempts to write",
                self._file.path, os.strerror(error.errno) if error.errno else error,
            )  # fmt: skip

    def close(self) -> None:
        """Close the file, and say how many lines are not in it. Harmless twice."""
        if self.lost:
            logger.warning("%d lines are missing in %s", self.lost, self._file.path)
            self.lost = 0
        self._file.close()
