"""Hugging Face's layout: ``model-00001-of-00002.safetensors``, ... and an index, or one file.

Full tensors; how they are split is known by their names, or said by a plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ezpz_tp._errors import ParallelError

from .names import ALL
from .plan import Splits, unknown
from .safetensors import TensorFile
from .source import Entry, Format, Options, Source

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class FullTensors:
    """A `Source` of full tensors in safetensors files.

    Attributes:
        entries: The tensors, by name.
        metadata: Nothing.
    """

    def __init__(self, entries: Mapping[str, Entry], files: Mapping[str, TensorFile]) -> None:
        self.entries, self._files = entries, files
        self.metadata: dict[str, Any] = {}

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill ``out`` with a stretch of a full tensor (`Source.read_into`)."""
        self._files[name].read_into(name, self.entries[name].shard.dim or 0, start, out)


def _recognizes(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".safetensors"
    return (path / INDEX).is_file() or (path / SINGLE).is_file()


def open_huggingface(path: Path, options: Options) -> Source:
    """Open a folder, or one file, of full tensors; `open_source` says what is raised."""
    files = _files(path)
    splits = Splits(ALL, options)
    entries: dict[str, Entry] = {}
    lost: dict[str, tuple[int, ...]] = {}
    for name, file in files.items():
        stored = file.tensors[name]
        shard = splits.shard(name, stored.shape)
        if shard is None:
            lost[name] = stored.shape
        else:
            entries[name] = Entry(name, stored.dtype, shard)
    if lost:
        raise unknown(path, lost)
    return FullTensors(entries, files)


FORMAT = Format("Hugging Face's safetensors", _recognizes, open_huggingface)


def _files(path: Path) -> dict[str, TensorFile]:
    """Return the file of each tensor, in the order of the index or of the file."""
    index = path / INDEX
    if not index.is_file():
        file = TensorFile.open(path if path.is_file() else path / SINGLE)
        return dict.fromkeys(file.tensors, file)
    names = load_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ParallelError(f"{index}: has no weight_map; expected names of files by tensor")
    files = {name: TensorFile.open(path / name) for name in dict.fromkeys(names.values())}
    for name, file in names.items():
        if name not in files[file].tensors:
            raise ParallelError(
                f"{path / file}: has no tensor {name}, which {INDEX} says is in it; the files are "
                "of different models: copy the folder again"
            )
    for file, opened in files.items():
        for name, stored in opened.tensors.items():
            if names.get(name) != file:
                raise ParallelError(
                    f"{path / file}: has a tensor {name} of shape {stored.shape}, which {INDEX} "
                    f"says is in {names.get(name, 'no file')}; the files are of different models: "
                    "copy the folder again"
                )
    return {name: files[file] for name, file in names.items()}


def load_object(file: Path) -> dict[str, Any]:
    """Return what a JSON file says.

    Raises:
        ParallelError: It is not an object.
    """
    try:
        said = json.loads(file.read_bytes())
    except ValueError as error:
        raise ParallelError(f"{file}: not JSON: {error}") from error
    if not isinstance(said, dict):
        raise ParallelError(f"{file}: holds a {type(said).__name__}; expected a JSON object")
    return said
