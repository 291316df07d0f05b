"""Real data for training, each rank reading its own part: digits, text as tokens, loaders.

>>> from ezpz.data import TokenBlocks, python_sources, write_tokens
>>> from tempfile import mkdtemp
>>> files = python_sources(most=100_000)
>>> path = write_tokens(mkdtemp() + "/stdlib.tokens", files, progress=False)
>>> tokens, targets = TokenBlocks(path, block=256)[0]
"""

from typing import TYPE_CHECKING

from ezpz._names import unknown

if TYPE_CHECKING:
    from ._digits import digits
    from ._loader import DataLoader, loader_options
    from ._texts import huggingface_texts, python_sources, text_files
    from ._tokens import TokenBlocks, TokenHeader, read_header, write_tokens, write_tokens_once

_HOMES = {
    "DataLoader": "_loader",
    "TokenBlocks": "_tokens",
    "TokenHeader": "_tokens",
    "digits": "_digits",
    "huggingface_texts": "_texts",
    "loader_options": "_loader",
    "python_sources": "_texts",
    "read_header": "_tokens",
    "text_files": "_texts",
    "write_tokens": "_tokens",
    "write_tokens_once": "_tokens",
}

__all__ = [
    "DataLoader",
    "TokenBlocks",
    "TokenHeader",
    "digits",
    "huggingface_texts",
    "loader_options",
    "python_sources",
    "read_header",
    "text_files",
    "write_tokens",
    "write_tokens_once",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise unknown(__name__, name, _HOMES)
    from importlib import import_module  # noqa: PLC0415  # importing this loads nothing

    value: object = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
