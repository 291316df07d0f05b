"""Megatron-LM's files: `iter_0000010/mp_rank_01_000/model_optim_rng.pt` for each model rank."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_tp._errors import ParallelError

from . import COLUMN, GATED, MEGATRON, Format, Options, Source, Split, Splits, same_names
from .torch_file import FilePart, JoinedTensors, StoredTensor, TorchFile, check_equal

_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
_LATEST = "latest_checkpointed_iteration.txt"
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_LAYER = re.compile(r"(?<=(?:de|en)coder\.layers\.)\d+(?=\.)")
_TIED = "output_layer.weight"
_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class _Chunk:
    """The layers of one chunk of a stage: each tensor-parallel rank's file and tensors."""

    files: list[TorchFile]
    tensors: list[dict[str, StoredTensor]]


def _recognizes(path: Path) -> bool:
    return path.is_dir() and ((path / _LATEST).is_file() or bool(_ranks(path)))


def open_megatron(path: Path, options: Options) -> Source:
    """Open a folder of Megatron-LM's files; `open_source` says what is raised."""
    folder = path if _ranks(path) else _latest(path)
    stages = _stages(folder)
    args = _arguments(stages[0][0])
    splits = Splits(_table(args), options)
    source = JoinedTensors("megatron", args)
    for names, chunk in _numbered(stages):
        for local, name in names.items():
            parts = [
                FilePart(f, held[local]) for f, held in zip(chunk.files, chunk.tensors, strict=True)
            ]
            if name in source.entries:
                raise ParallelError(
                    f"{chunk.files[0].path}: tensor {name} is in an earlier stage too; expected "
                    "each tensor on one stage, but for a tied output layer"
                )
            source.take(name, parts, splits)
            _drop_if_tied(source, name, parts, args)
    source.check_known(folder)
    return source


FORMAT = Format("Megatron-LM's mp_rank_NN", _recognizes, open_megatron)


def _ranks(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the folder of each tensor rank and stage."""
    if not folder.is_dir():
        return {}
    found: dict[tuple[int, int], Path] = {}
    for entry in folder.iterdir():
        if not entry.is_dir():
            continue
        if match := _RANK.fullmatch(entry.name):
            found[int(match[1]), int(match[2] or 0)] = entry
        elif entry.name.startswith("mp_rank_"):
            raise ParallelError(
                f"{entry}: expected mp_rank_TT, or mp_rank_TT_PPP; files of expert parallelism "
                "are not supported"
            )
    return found


def _latest(path: Path) -> Path:
    word = (path / _LATEST).read_text().strip()
    folder = path / (f"iter_{int(word):07d}" if word.isdecimal() else word)
    if not _ranks(folder):
        raise ParallelError(
            f"{folder}: there are no mp_rank_NN folders in it, but {path / _LATEST} says {word!r}; "
            "expected files of --ckpt-format torch (others are torch.distributed.checkpoint's)"
        )
    return folder


def _stages(folder: Path) -> list[list[TorchFile]]:
    """Return each stage's files, by tensor rank."""
    ranks = _ranks(folder)
    some = _file(next(iter(ranks.values())))
    args = _arguments(some)
    experts = args.get("expert_model_parallel_size") or 1
    if experts != 1:
        raise ParallelError(
            f"{some.path}: expert_model_parallel_size={experts}; files of expert parallelism are "
            "not supported"
        )
    # Of a degree that the arguments do not say, what is there is all.
    tensor = args.get("tensor_model_parallel_size") or 1 + max(index for index, _ in ranks)
    pipeline = args.get("pipeline_model_parallel_size") or 1 + max(stage for _, stage in ranks)
    if len(ranks) > tensor * pipeline:
        raise ParallelError(
            f"{folder}: {len(ranks)} mp_rank folders; expected {tensor * pipeline}, as its "
            f"arguments say tensor {tensor} x pipeline {pipeline}"
        )
    found = []
    for stage in range(pipeline):
        files = []
        for index in range(tensor):
            name = f"mp_rank_{index:02d}" + (f"_{stage:03d}" if pipeline > 1 else "")
            files.append(_file(ranks.get((index, stage), folder / name)))
        found.append(files)
    return found


def _file(folder: Path) -> TorchFile:
    for name in _FILES:
        if (folder / name).exists():
            break
    else:
        raise ParallelError(f"{folder / _FILES[0]}: there is no such file")
    file = TorchFile(folder / name)
    if not isinstance(file.contents, dict):
        raise ParallelError(
            f"{file.path}: holds a {type(file.contents).__name__}; expected a dict with 'model'"
        )
    return file


def _arguments(file: TorchFile) -> dict[str, Any]:
    args = file.contents.get("args")
    version = file.contents.get("checkpoint_version", 3.0)
    if isinstance(version, (int, float)) and version < 2.0:
        raise ParallelError(
            f"{file.path}: checkpoint_version {version}, whose queries, keys and values are in "
            "another order; expected 2.0 or later: load and save it by Megatron-LM"
        )
    return dict(vars(args)) if hasattr(args, "__dict__") else dict(args or {})


def _table(args: dict[str, Any]) -> dict[str, Split]:
    """Return the table of splits; a gated linear unit's gate and up are stacked in fc1."""
    said = [args[name] for name in ("swiglu", "gated_linear_unit") if name in args]
    if not said:
        return MEGATRON
    fc1 = GATED if any(said) else COLUMN
    return {"*.linear_fc1.weight": fc1, "*.linear_fc1.bias": fc1, **MEGATRON}


def _chunks(files: list[TorchFile]) -> list[_Chunk]:
    """Return the chunks of a stage."""
    keys = [key for key in files[0].contents if re.fullmatch(r"model\d*", str(key))]
    if not keys:
        raise ParallelError(
            f"{files[0].path}: has {', '.join(map(repr, files[0].contents))}; expected 'model'"
        )
    chunks = []
    for key in sorted(keys, key=lambda key: int(key.removeprefix("model") or 0)):
        tensors = [_tensors(file, key) for file in files]
        for file, found in zip(files, tensors, strict=True):
            same_names(f"{file.path}, {key!r}", found, files[0].path, tensors[0])
        chunks.append(_Chunk(files, tensors))
    return chunks


def _tensors(file: TorchFile, key: str) -> dict[str, StoredTensor]:
    if key not in file.contents:
        raise ParallelError(
            f"{file.path}: has no {key!r}, only {', '.join(map(repr, file.contents))}; expected "
            "the keys that the files of the same stage have"
        )
    model = file.contents[key]
    if not isinstance(model, dict) or any(isinstance(value, dict) for value in model.values()):
        raise ParallelError(
            f"{file.path}: {key!r} is not a state dict of Megatron Core; expected names such as "
            f"{_EMBEDDING}: load and save it by a Megatron-LM of 2024 or later"
        )
    return file.tensors(model)


def _numbered(stages: list[list[TorchFile]]) -> Iterator[tuple[dict[str, str], _Chunk]]:
    """Yield the whole model's name of each chunk's tensors, and the chunk, in the model's order.

    The first chunks of all stages come before the second ones.
    """
    chunks = [_chunks(files) for files in stages]
    for stage, found in enumerate(chunks):
        if len(found) != len(chunks[0]):
            raise ParallelError(
                f"{stages[stage][0].path}: {len(found)} chunks of the model; expected "
                f"{len(chunks[0])}, as {stages[0][0].path} has"
            )
    layers = 0
    for turn in zip(*chunks, strict=True):
        for chunk in turn:
            numbers = [int(m[0]) for name in chunk.tensors[0] if (m := _LAYER.search(name))]
            yield {name: _renumbered(name, layers) for name in chunk.tensors[0]}, chunk
            layers += 1 + max(numbers, default=-1)


def _renumbered(name: str, first: int) -> str:
    return _LAYER.sub(lambda match: str(int(match[0]) + first), name, count=1)


def _drop_if_tied(
    source: JoinedTensors, name: str, parts: list[FilePart], args: dict[str, Any]
) -> None:
    """Leave out the last stage's copy of the embedding, once it is known to be one."""
    if name != _TIED or args.get("untie_embeddings_and_output_weights", True):
        return
    if _EMBEDDING not in source.entries:
        raise ParallelError(
            f"{parts[0].file.path}: tensor {name} is tied to {_EMBEDDING}, as the arguments say, "
            "which no stage has"
        )
    for first, second in zip(source.parts(_EMBEDDING), parts, strict=True):
        check_equal(name, first, second)
    del source.entries[name]
