"""Texts of Hugging Face data sets that are on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from ezpz_dist import DataError

_BATCH = 1000
"""Rows that are decoded at once: as many as Arrow's files have in a batch."""


def huggingface_texts(
    source: str | Path | Any, column: str = "text", *, split: str = "train"
) -> Iterator[str]:
    """Yield the texts of a Hugging Face data set, for ``write_tokens(path, texts=...)``.

    Nothing is downloaded: fetch the data set once where there is a network, by
    ``datasets.load_dataset(...).save_to_disk(folder)``, and give the folder. A data set that is
    indexed by samples goes into a `DataLoader` as it is.

    Args:
        source: A folder that ``save_to_disk`` wrote, or a ``Dataset`` or ``DatasetDict``.
        column: Which has the texts.
        split: Of a ``DatasetDict``.

    Raises:
        DataError: When the first text is asked for: ``datasets`` is not installed; there is no
            such folder, split or column; or the column has something else than texts.
    """
    found: Any = _opened(source) if isinstance(source, (str, Path)) else source
    if not hasattr(found, "column_names"):
        raise DataError(f"a {type(found).__name__}; expected a Hugging Face Dataset, or a folder")
    if isinstance(found, dict):  # as a DatasetDict is
        if split not in found:
            raise DataError(f"no split {split!r}; expected one of {', '.join(map(repr, found))}")
        found = found[split]
    names = found.column_names or ()
    if column not in names:
        raise DataError(f"no column {column!r}; expected one of {', '.join(map(repr, names))}")
    for batch in found.select_columns([column]).iter(batch_size=_BATCH):
        for text in batch[column]:
            if not isinstance(text, str):
                raise DataError(f"column {column!r} has a {type(text).__name__}; expected texts")
            yield text


def _opened(folder: str | Path) -> object:
    try:
        load_from_disk: Any = import_module("datasets").load_from_disk  # an extra, without types
    except ImportError as error:
        raise DataError(
            f"{folder}: reading it takes datasets ({error}); pip install 'ezpz-suite[huggingface]'"
        ) from error
    # Asked for first, as datasets would take anything else for a name on the hub.
    if not Path(folder).is_dir():
        raise DataError(f"{folder}: no folder; expected one that Dataset.save_to_disk wrote")
    try:
        return load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: {error}; expected what Dataset.save_to_disk wrote") from error
