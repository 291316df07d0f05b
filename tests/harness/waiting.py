"""What tests wait for: a condition, the end of a process, all that a terminal is told."""

import contextlib
import os
import time
from pathlib import Path

PATIENCE = 500  # seconds: a test may take 600, and has to say what it waited for


def until(is_so, seconds=PATIENCE):
    """Wait for a condition and return its value; fail where it is false for so long."""
    end = time.monotonic() + seconds
    while not (value := is_so()):
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)
    return value


def is_left(pid, seconds=PATIENCE):
    """Whether a process still runs, some seconds after it was killed; a zombie is dead."""
    with contextlib.suppress(AssertionError):
        until(lambda: _has_ended(pid), seconds)
        return False
    return True


def _has_ended(pid):
    with contextlib.suppress(OSError):  # gone, or no /proc here
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def all_of(terminal):
    """Return what is written to a terminal whose other side is this one, to its end."""
    said = b""
    with contextlib.suppress(OSError):  # Linux' way to say that no one has it open
        while block := os.read(terminal, 1 << 16):
            said += block
    os.close(terminal)
    return said
