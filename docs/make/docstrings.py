"""Docstrings are plain text with Google's sections: what Markdown would misread is escaped."""

from __future__ import annotations

import re

import griffe


class PlainDocstrings(griffe.Extension):
    """Keep brackets from being read as links, and double backticks as they are."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        """Escape what stands outside of code in one docstring."""
        if obj.docstring:
            obj.docstring.value = escaped(obj.docstring.value)


def escaped(text: str) -> str:
    """The text, with ``[`` as a character wherever it is not in code or an example."""
    parts = re.split(r"(``.+?``|`[^`\n]+`|^[ ]*(?:>>>|\.\.\.).*$)", text, flags=re.MULTILINE)
    return "".join(
        part if place % 2 else part.replace("[", r"\[") for place, part in enumerate(parts)
    )
