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
    from ._huggingface import huggingface_texts
    from ._loader import DataLoader, loader_options
    from ._tokens.blocks import TokenBlocks
    from ._tokens.files import python_sources, text_files
    from ._tokens.format import TokenHeader, read_header
    from ._tokens.once import write_tokens_once
    from ._tokens.writer import write_tokens

_HOMES = {
    "DataLoader": "_loader",
    "TokenBlocks": "_tokens.blocks",
    "TokenHeader": "_tokens.format",
    "digits": "_digits",
    "huggingface_texts": "_huggingface",
    "loader_options": "_loader",
    "python_sources": "_tokens.files",
    "read_header": "_tokens.format",
    "text_files": "_tokens.files",
    "write_tokens": "_tokens.writer",
    "write_tokens_once": "_tokens.once",
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
