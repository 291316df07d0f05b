"""Where a rank stands: the line of the user's code that its main thread is in."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
from dataclasses import asdict, dataclass
from functools import cache
from types import FrameType, TracebackType
from typing import Any

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass(frozen=True, slots=True)
class Standing:
    """What a rank says of itself.

    Attributes:
        rank: The rank.
        host: Its host's name.
        line: ``"train.py:41 in load_batch"``: the innermost frame of code that is neither
            Python's own, installed, nor ours.
        inside: The innermost Python function that this line called; empty where it is the
            line's own (a C function, such as ``time.sleep``, has no frame).
        doing: The collective that it waits in, in words; empty where it is in none of ours.
        stack: The whole stack, outermost first; only where it was asked for.
        collectives: torch's last ones, ours or not, the latest last.
    """

    rank: int
    host: str
    line: str
    inside: str = ""
    doing: str = ""
    stack: tuple[str, ...] = ()
    collectives: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    @staticmethod
    def from_json(said: dict[str, Any]) -> Standing:
        """Return what `as_json` was made of."""
        lists = {name: tuple(said[name]) for name in ("stack", "collectives")}
        return Standing(**{**said, **lists})

    def __str__(self) -> str:
        """Return ``"rank 1 on nodeB: train.py:41 in load_batch, in barrier()"``."""
        inside = f", in {self.doing or self.inside}" if self.doing or self.inside else ""
        return f"rank {self.rank} on {self.host}: {self.line}{inside}"


def describe_frames(frame: FrameType | None) -> tuple[str, str]:
    """Return (the user's line, the innermost function where it is another), from a frame."""
    innermost = frame
    line = ""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            line = _short(frame)
            break
        frame = frame.f_back
    if innermost is None:
        return "no Python frame", ""
    if frame is innermost:
        return line, ""
    module = innermost.f_globals.get("__name__", "?")
    inside = f"{module}.{innermost.f_code.co_qualname}"
    return line or _short(innermost), inside if line else ""


def main_frame() -> FrameType | None:
    """Return the frame that the main thread is in."""
    # The interpreter's documented way to another thread's frame, for debuggers.
    return sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001


def whole_stack(frame: FrameType | None) -> tuple[str, ...]:
    """Return the stack that leads to a frame, outermost first, a line of text each."""
    if frame is None:
        return ()
    found = traceback.extract_stack(frame)
    return tuple(
        f"{entry.filename}:{entry.lineno} in {entry.name}: {entry.line or ''}".rstrip(": ")
        for entry in found
    )


def calling_line() -> str:
    """Return the user's line that called us: ``"train.py:31"``."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # inspect's takes 100 times longer
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "?"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def raising_line(trace: TracebackType | None) -> str:
    """Return the user's line that an exception passed last: ``"train.py:12 in step"``."""
    line = "?"
    while trace is not None:
        code = trace.tb_frame.f_code
        if line == "?" or is_users(code.co_filename):
            line = f"{os.path.basename(code.co_filename)}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return line


def is_users(path: str) -> bool:
    """Say whether a file is neither Python's own, installed, nor ours."""
    if path.startswith("<"):
        # A cell of a notebook, `python -c`; but not importlib's frozen modules.
        return not path.startswith("<frozen")
    return not path.startswith(_libraries())


@cache
def _libraries() -> tuple[str, ...]:
    # sysconfig reads a large file for it: not at import.
    paths = {os.path.abspath(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    return (_OURS, *paths)


def _short(frame: FrameType) -> str:
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
