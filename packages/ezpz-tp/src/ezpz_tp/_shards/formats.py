"""The formats of files that can be read: one table."""

from __future__ import annotations

from pathlib import Path

from ezpz_tp._errors import ParallelError

from . import huggingface, llama, megatron, reader
from .source import Format, Options, Source

FORMATS: tuple[Format, ...] = (
    reader.FORMAT,
    llama.FORMAT,
    megatron.FORMAT,
    huggingface.FORMAT,
)
"""In the order in which they are tried."""


def open_source(path: str | Path, options: Options | None = None) -> Source:
    """Open files of a model, of whichever format they are.

    Headers are read; of Meta's and Megatron-LM's files also what every rank holds whole, to see
    that it is the same in all of them.

    Raises:
        ParallelError: No format is recognized, or a file is missing, truncated or does not fit
            the others.
    """
    path = Path(path)
    for each in FORMATS:
        if each.recognizes(path):
            return each.open(path, options or Options())
    found = "there is no such file or folder"
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        found = (
            f"found {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
            if names
            else ("the folder is empty")
        )
    raise ParallelError(
        f"{path}: not a checkpoint of a known format ({', '.join(each.name for each in FORMATS)}); "
        f"{found}. A save that was interrupted has no index, and is not whole"
    )
