"""Meta's Llama: `consolidated.00.pth`, ... beside a `params.json`."""

from __future__ import annotations

import math
import re
from pathlib import Path

from ezpz_tp._errors import ParallelError

from . import LLAMA, Format, Options, Source, Split, Splits, same_names
from .huggingface import load_object
from .torch_file import FilePart, JoinedTensors, StoredTensor, TorchFile

_FILE = re.compile(r"consolidated\.(\d+)\.pth")
_EMBEDDING = "tok_embeddings.weight"


def _recognizes(path: Path) -> bool:
    return path.is_dir() and any(_FILE.fullmatch(entry.name) for entry in path.iterdir())


def open_llama(path: Path, options: Options) -> Source:
    """Open a folder of Meta's files; `open_source` says what is raised."""
    files = [TorchFile(file) for file in _files(path)]
    tensors = [_tensors(file) for file in files]
    _check_count(files, tensors[0])
    splits = Splits({**LLAMA, **_embedding_split(files, tensors)}, options)
    params = path / "params.json"
    source = JoinedTensors("llama", load_object(params) if params.is_file() else {})
    for file, found in zip(files, tensors, strict=True):
        same_names(file.path, found, files[0].path, tensors[0])
    for name in tensors[0]:
        pairs = zip(files, tensors, strict=True)
        source.take(name, [FilePart(file, found[name]) for file, found in pairs], splits)
    source.check_known(path)
    return source


FORMAT = Format("Meta's consolidated.NN.pth", _recognizes, open_llama)


def _files(path: Path) -> list[Path]:
    numbers = sorted(int(m[1]) for entry in path.iterdir() if (m := _FILE.fullmatch(entry.name)))
    for expected, number in enumerate(numbers):
        if number != expected:
            raise ParallelError(
                f"{path / file_name(expected)}: there is no such file, but there "
                f"is {file_name(number)}; expected one for each of {numbers[-1] + 1} ranks"
            )
    return [path / file_name(number) for number in numbers]


def file_name(number: int) -> str:
    """Return the name of a rank's file."""
    return f"consolidated.{number:02d}.pth"


def _tensors(file: TorchFile) -> dict[str, StoredTensor]:
    contents = file.contents
    if not isinstance(contents, dict):
        raise ParallelError(
            f"{file.path}: holds a {type(contents).__name__}; expected a state dict"
        )
    found = file.tensors(contents)
    if not found:
        raise ParallelError(f"{file.path}: holds no tensors; expected a state dict")
    return found


def _embedding_split(
    files: list[TorchFile], tensors: list[dict[str, StoredTensor]]
) -> dict[str, Split]:
    """Return which dim of the embedding is split: the one that is not the model's own."""
    embedding, norm = tensors[0].get(_EMBEDDING), tensors[0].get("norm.weight")
    if embedding is None or norm is None or len(files) == 1:
        return {}
    width = math.prod(norm.shape)
    if embedding.shape[-1:] == (width,):
        return {}  # rows are split, as the table says
    if math.prod(embedding.shape[-1:]) * len(files) == width:
        return {_EMBEDDING: Split(1)}
    raise ParallelError(
        f"{files[0].path}: tensor {_EMBEDDING} has shape {embedding.shape} in one of {len(files)} "
        f"files; expected {width} columns, or {width} / {len(files)}, as norm.weight is of "
        f"{width}: a file is missing, or is another model's"
    )


def _check_count(files: list[TorchFile], tensors: dict[str, StoredTensor]) -> None:
    """Raise `ParallelError` where the last files are missing: heads make up the model's width."""
    for name, tensor in tensors.items():
        if not name.endswith(".attention.wo.weight") or len(tensor.shape) != 2:
            continue
        rows, columns = tensor.shape
        if columns * len(files) < rows:
            raise ParallelError(
                f"{files[0].path.parent}: {len(files)} files, in which tensor {name} has shape "
                f"{tensor.shape}; expected ({rows}, {rows // len(files)}), or {rows // columns} "
                f"files: {file_name(len(files))} is missing"
            )
        return
