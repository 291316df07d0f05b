"""Plain TOML, read at a tenth of the cost of importing ``tomllib``."""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_STRING = r'"[^"\\\x00-\x08\x0a-\x1f\x7f]*"'
_ITEM = rf"(?:{_STRING}|0|[1-9][0-9]{{0,17}}(?![0-9]))"
_LIST = rf"\[[ \t\n]*(?:{_ITEM}[ \t\n]*,[ \t\n]*)*(?:{_ITEM}[ \t\n]*)?\]"
_PLAIN_LINE = (
    r"[ \t]*(?:"
    r"\[([A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)\]"
    rf"|([A-Za-z0-9_-]+)[ \t]*=[ \t]*({_ITEM}|{_LIST})"
    r")?[ \t]*(?:#[^\x00-\x08\x0a-\x1f\x7f]*)?(?:\n|\Z)"
)


def parse_plain(text: str) -> dict[str, Any] | None:
    """Parse TOML of comments, tables, strings, counts and lists; None where there is more to it.

    ``tomllib`` takes 4 to 10 ms to import (typing, datetime), more than all of `detect` may
    cost. What this accepts it reads as tomllib does, and a test holds it to that on every
    packaged file and on thousands of damaged ones; the rest is left to tomllib.
    """
    # Not at import: they take 1 ms to compile, which re remembers.
    line, item = re.compile(_PLAIN_LINE), re.compile(_ITEM)
    document: dict[str, Any] = {}
    table, at = document, 0
    while at < len(text):
        match = line.match(text, at)
        if match is None:
            return None
        at = match.end()
        head, key, value = match.groups()
        if head is not None:
            *outer, name = head.split(".")
            table = document
            for part in outer:
                table = table.setdefault(part, {})
                if not isinstance(table, dict):
                    return None
            # A table opens once; one that a deeper table made is tomllib's business.
            if name in table:
                return None
            table = table.setdefault(name, {})
        elif key is not None:
            if key in table:
                return None
            items = [v[1:-1] if v[0] == '"' else int(v) for v in item.findall(value)]
            table[key] = items if value[0] == "[" else items[0]
    return document
