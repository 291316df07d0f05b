"""What the ranks' shims report, told apart from what the ranks themselves write.

A report travels on standard error, the one channel that every launcher brings from every host:
a record separator, ``ezpz``, the launch's id, then twice over, with ``|`` between, what, rank and
value; a unit separator; a newline. srun and Open MPI cut streams into pieces of 1 or 4 kB and may
put another rank's piece between two of one. So each report comes twice, too short for both to be
cut, and one whose halves differ has been cut.
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
        self._newline_follows = False

    def feed(self, chunk: bytes) -> tuple[bytes, list[Report]]:
        """Return the bytes that the ranks wrote, and what was reported between them.

        What may be the beginning of a report is held back until more comes.
        """
        if self._newline_follows and chunk:
            self._newline_follows = False
            chunk = chunk.removeprefix(b"\n")
        data, self._held = self._held + chunk, b""
        kept: list[bytes] = []
        found: list[Report] = []
        while data:
            before, separator, rest = data.partition(b"\x1e")
            kept.append(before)
            if not separator:
                break
            data = separator + rest
            if not data.startswith(self._start[: len(data)]):
                kept.append(separator)
                data = rest
                continue
            end = data.find(b"\x1f", 0, _LONGEST)
            if end < 0 and len(data) < _LONGEST:
                self._held = data
                break
            data = self._take(data, end, kept, found)
        return b"".join(kept), found

    def rest(self) -> bytes:
        """Return what was held back and, at the end of the stream, is no report."""
        held, self._held = self._held, b""
        return b"" if held.startswith(self._start) else held

    def _take(self, data: bytes, end: int, kept: list[bytes], found: list[Report]) -> bytes:
        """Take one report from the beginning of the data; return what follows it."""
        begin = len(self._start)
        if end < 0:
            # Cut, and no end in sight: its second copy is whole.
            return data[begin:]
        inner = data.rfind(b"\x1e", begin, end)
        if inner > 0:
            # Another rank's report came between, or what one wrote itself.
            kept.append(data[begin:inner])
            return data[inner:]
        report = _read(data[begin:end])
        if report is None:
            # Another rank's piece came between; its bytes are not ours to drop.
            kept.append(data[begin:end])
        else:
            found.append(report)
        if len(data) == end + 1:
            self._newline_follows = True
        return data[end + 1 :].removeprefix(b"\n")


def _read(text: bytes) -> Report | None:
    half, _, again = text.partition(b"|")
    words = half.split(b" ")
    if half != again or len(words) != 3 or not all(word.isdigit() for word in words[1:]):
        return None
    return words[0].decode("ascii", "replace"), int(words[1]), int(words[2])
