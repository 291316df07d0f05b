"""The names of check-points in a folder, and which of them are there."""

from __future__ import annotations

import re
from dataclasses import dataclass

MANIFEST = "manifest.json"
INDEX = "index.json"
LATEST = "latest"
"""A text file with the newest folder's name: for people and shell scripts; loading lists."""

_NAME = re.compile(r"step-(\d{8,18})(?:\.(\d{1,6}))?")
_WORKING = re.compile(r"\.(?:step-\d+(?:\.\d+)?|latest)\.tmp-(?P<owner>.+)")
_GONE = re.compile(r"\.step-\d+(?:\.\d+)?\.gone-.+")

MAX_STEP = 10**18 - 1


@dataclass(frozen=True, slots=True, order=True)
class Name:
    """A check-point's folder: ``step-00000042``, or ``step-00000042.1`` for a second of that step.

    A step that is saved again never touches the folder that is there: the second appears
    beside it, whole, and only then the first goes.
    """

    step: int
    generation: int = 0

    def __str__(self) -> str:
        return f"step-{self.step:08d}" + (f".{self.generation}" if self.generation else "")

    def working(self, owner: str) -> str:
        """Return the name of the folder while it is written."""
        return f".{self}.tmp-{owner}"

    def gone(self, owner: str) -> str:
        """Return the name of the folder while it is removed."""
        return f".{self}.gone-{owner}"


def parse(name: str) -> Name | None:
    """Return what a folder's name says; None: it is no check-point's."""
    found = _NAME.fullmatch(name)
    return Name(int(found[1]), int(found[2] or 0)) if found else None


def names_in(entries: list[str]) -> list[Name]:
    """Return the check-points among a folder's entries, the newest first."""
    return sorted((name for each in entries if (name := parse(each))), reverse=True)


def owner_of(entry: str) -> str | None:
    """Return who writes what has a temporary name; None: it has not."""
    found = _WORKING.fullmatch(entry)
    return found["owner"] if found else None


def is_gone(entry: str) -> bool:
    """Return whether a folder was being removed."""
    return _GONE.fullmatch(entry) is not None


def next_name(step: int, entries: list[str]) -> Name:
    """Return a name for a step that no entry has."""
    taken = [name.generation for name in names_in(entries) if name.step == step]
    return Name(step, max(taken) + 1 if taken else 0)


def to_remove(names: list[Name], saved: Name, keep: int | None) -> list[Name]:
    """Return the check-points to remove once ``saved`` is complete.

    Earlier ones of its step, and all but the ``keep`` of the highest steps; never itself.
    """
    steps = sorted({name.step for name in names}, reverse=True)
    kept = set(steps if keep is None else steps[:keep])
    return [
        name
        for name in sorted(names)
        if name != saved and (name.step not in kept or name.step == saved.step)
    ]
