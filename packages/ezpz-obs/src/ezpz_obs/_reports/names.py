"""What people called their runs and metrics, fit to be shown, whatever it is."""

from __future__ import annotations

import re
import zlib

from ezpz_topo import redact

_PLAIN = re.compile(r"[a-z0-9_]{1,40}")
_OTHER = re.compile(r"[^a-z0-9_]+")


def clean(text: object) -> str:
    r"""Return a text in one line, without secrets: what cannot be seen is written as its escape.

    Line ends, terminal codes and marks that turn the direction of writing are among that.

    >>> clean("a" + chr(10) + "b" + chr(0x202E))
    'a\\nb\\u202e'
    """
    said = redact(str(text))
    if said.isprintable():
        return said
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in said
    )


def shorten(text: object, limit: int = 60) -> str:
    """Return a text as `clean` does, its middle left out where it is longer than ``limit``."""
    said = clean(text)
    if len(said) <= limit:
        return said
    tail = (limit - 1) // 3
    return f"{said[: limit - 1 - tail]}…{said[-tail:]}"


def file_name(kind: str, name: str) -> str:
    """Return a name for a plot's file that every file system takes, one for each metric.

    >>> file_name("curve", "loss"), file_name("curve", "a/b")
    ('curve-loss', 'curve-a-b-07f4401c')
    """
    if _PLAIN.fullmatch(name):
        return f"{kind}-{name}"
    slug = _OTHER.sub("-", name[:200].lower()).strip("-")[:40]
    parts = [kind, slug, f"{zlib.crc32(name.encode(errors='backslashreplace')):08x}"]
    return "-".join(part for part in parts if part)


def distinct(names: list[str], paths: list[str]) -> list[str]:
    """Return labels for runs, with what tells them apart where several have one name."""
    labels = []
    for name, path in zip(names, paths, strict=True):
        labels.append(f"{name} ({path})" if names.count(name) > 1 else name)
    return [
        f"{label} #{place + 1}" if labels.count(label) > 1 else label
        for place, label in enumerate(labels)
    ]
