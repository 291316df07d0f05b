"""All the texts of a package's sources, with ``…`` for what is put into them."""

import ast
from functools import cache


@cache
def texts_of(folder):
    """Every string of the Python files under a folder, put together as the parser does."""
    return tuple(
        text
        for path in sorted(folder.rglob("*.py"))
        for text in _texts(ast.parse(path.read_text(encoding="utf-8")))
    )


def missing(message, texts):
    """The fixed parts of a message that no text has, one after another.

    Parts of one text may be left out of a message's end or start, but not of its middle: where a
    text goes on, the message has ``…``.
    """
    parts = [part.strip(" ;,.:()") for part in message.replace("\n", " ").split("…")]
    return [part for part in parts if part and not any(part in text for text in texts)]


def _texts(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
