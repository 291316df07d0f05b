"""The names of check-points in a folder, and which of them are there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MANIFEST = "manifest.json"
INDEX = "index.json"
LATEST = "latest"
"""A text file with the newest folder's name: for people and shell scripts; loading lists."""
OWNER = "owner.json"
"""Who saves there."""

_NAME = re.compile(r"step-(\d{8,18})(?:\.(\d{1,6}))?")
_WORKING = re.compile(r"\.(?:step-\d+(?:\.\d+)?|latest|owner\.json)\.tmp-(?P<owner>.+)")
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
    """Return the check-points among a folder's entries, the highest step first."""
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


def newest_first(sequences: Mapping[Name, int]) -> list[Name]:
    """Return check-points in the order of loading: the last saved first.

    A run that goes back abandons what it had saved from that step on: that comes after all that
    the newest stands on.
    """
    trunk: list[Name] = []
    abandoned: list[Name] = []
    for name in sorted(sequences, key=lambda each: (sequences[each], each), reverse=True):
        (trunk if not trunk or name.step < trunk[-1].step else abandoned).append(name)
    return trunk + abandoned


def to_remove(names: Sequence[Name], saved: Name, keep: int | None) -> list[Name]:
    """Return the check-points to remove once ``saved`` is complete, the oldest first.

    Earlier ones of its step, and all but those of the ``keep`` newest steps; never itself.

    Args:
        names: The newest first.
        saved: The one just written.
        keep: None: all.
    """
    kept = set(list(dict.fromkeys(name.step for name in names))[:keep])
    return [
        name
        for name in reversed(names)
        if name != saved and (name.step not in kept or name.step == saved.step)
    ]
