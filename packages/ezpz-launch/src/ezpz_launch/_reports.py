"""What the ranks' shims report, told apart from what the ranks themselves write.

A report travels on standard error, the one channel that every launcher brings from every host:
a record separator, ``ezpz``, the launch's id, what, rank, value, a unit separator, a newline. Each
is written twice, because srun and Open MPI cut streams into pieces of 1 or 4 kB and may put
another rank's piece between two of one; the two copies are too short for both to be cut.
"""

from __future__ import annotations

Report = tuple[str, int, int]
"""What happened, to which rank, with what value."""

_LONGEST = 160
"""Bytes of the longest report: what is longer and not ended is none."""


class Reports:
    """Take the reports of one launch out of a stream of bytes.

    Args:
        launch_id: By which its reports are told.
    """

    def __init__(self, launch_id: str) -> None:
        self._start = b"\x1eezpz " + launch_id.encode() + b" "
        self._held = b""

    def feed(self, chunk: bytes) -> tuple[bytes, list[Report]]:
        """Return the bytes that the ranks wrote, and what was reported between them.

        What may be the beginning of a report is held back until more comes.
        """
        data = self._held + chunk
        self._held = b""
        if b"\x1e" not in data:
            return data, []
        kept: list[bytes] = []
        found: list[Report] = []
        while True:
            before, separator, rest = data.partition(b"\x1e")
            kept.append(before)
            if not separator:
                break
            data = separator + rest
            end = data.find(b"\x1f\n", 0, _LONGEST)
            if not data.startswith(self._start[: len(data)]):
                kept.append(separator)
                data = rest
            elif end > 0:
                report = _read(data[len(self._start) : end])
                if report is None:
                    # Another rank's piece came between; its bytes are not ours to drop.
                    kept.append(data[len(self._start) : end])
                else:
                    found.append(report)
                data = data[end + 2 :]
            elif len(data) < _LONGEST:
                self._held = data
                break
            else:
                # Cut by another rank's piece: its second copy is whole.
                data = data[len(self._start) :]
        return b"".join(kept), found

    def rest(self) -> bytes:
        """Return what was held back and, at the end of the stream, is no report."""
        held, self._held = self._held, b""
        return b"" if held.startswith(self._start) else held


def _read(text: bytes) -> Report | None:
    words = text.split()
    if len(words) != 3 or not (words[1].isdigit() and words[2].isdigit()):
        return None
    return words[0].decode("ascii", "replace"), int(words[1]), int(words[2])
