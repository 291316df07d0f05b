"""Docstrings are plain text with Google's sections: what Markdown would misread is put right."""

from __future__ import annotations

import re
from collections.abc import Iterator

import griffe


class PlainDocstrings(griffe.Extension):
    """Keep brackets from being read as links, and examples from being read as quotations."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        """Put one docstring right."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """The text with its examples fenced, and ``[`` as a character outside of them and of code."""
    return "\n".join(_lines(text.splitlines()))


def _lines(lines: list[str]) -> Iterator[str]:
    fence: str | None = None  # the indent of an example
    literal = 0  # the indent of lines that stand there as they are
    margin, after_blank = 0, False  # of the line before
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            yield from () if fence is None else (f"{fence}```",)
            fence, after_blank = None, True
            yield line
            continue
        if fence is None and line.lstrip().startswith(">>> "):
            fence = " " * indent
            yield f"{fence}```pycon"
        # Indented after a blank line: code, as in Markdown. A section's lines follow its head.
        literal = literal if 0 < literal <= indent else 0
        if after_blank and indent >= margin + 4:
            literal = indent
        yield line if fence is not None or literal else _escaped(line)
        margin, after_blank = (margin if literal else indent), False
    yield from () if fence is None else (f"{fence}```",)


def _escaped(line: str) -> str:
    parts = re.split(r"(``.+?``|`[^`]+`)", line)
    return "".join(
        part if place % 2 else part.replace("[", r"\[") for place, part in enumerate(parts)
    )
