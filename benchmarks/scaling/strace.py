"""What strace writes, read: calls, the paths that they name, and what these belong to."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

MISSING = "strace is not installed"

_CALL = re.compile(r"(?:\d+ +)?(?:\[pid +\d+\] )?(\w+)\((.*)\) += (-?\d+|0x[0-9a-f]+)(<[^>]*>)?")
_PATH = re.compile(r'"((?:[^"\\]|\\.)*)"')
_DESCRIPTOR = re.compile(r"\d+<(/[^>]*)>")


class Call(NamedTuple):
    """A system call on a file.

    Attributes:
        name: ``openat``, ``newfstatat``, ...
        path: Absolute, as the program wrote it but for dots.
        ok: Whether it found something.
        by_name: Whether the path was named; else it was that of an open descriptor.
    """

    name: str
    path: str
    ok: bool
    by_name: bool


def done(line: str) -> re.Match[str] | None:
    """Return the groups of a call that came back: name, arguments, result."""
    return _CALL.search(line)


def looked_at(lines: list[str], folder: str = "/") -> list[Call]:
    """Return every call on a file that has a path.

    Args:
        lines: strace's, with ``-y``.
        folder: In which the process runs.
    """
    found = []
    for line in lines:
        match = done(line)
        if match is None:
            continue
        named, held = _PATH.search(match[2]), _DESCRIPTOR.match(match[2])
        ok = not match[3].startswith("-")
        if named and named[1]:
            # What does not begin with a slash is relative to a folder that is open.
            path = os.path.join(held[1] if held else folder, named[1])
            found.append(Call(match[1], os.path.normpath(path), ok, True))
        elif held:
            found.append(Call(match[1], held[1], ok, False))
    return found


def kinds(job: str = "") -> dict[str, str]:
    """Return folders by what their files are.

    Args:
        job: The folder of the script and of what it writes.
    """
    root = Path(__file__).resolve().parents[2]
    found = {
        str(root): "environment",
        sysconfig.get_path("purelib"): "environment",
        sysconfig.get_path("platlib"): "environment",
        sys.prefix: "environment",
        sys.base_prefix: "environment",
    }
    return found | ({job: "job"} if job else {})


def kind_of(path: str, folders: Mapping[str, str]) -> str:
    """Return what a path belongs to: environment, job, or the node itself."""
    for folder in sorted(folders, key=len, reverse=True):
        if path == folder or path.startswith(f"{folder}/"):
            return folders[folder]
    return "node"
