"""Folders of ``shards.json`` and ``pp00-tp00.safetensors``, which ezpz_tp wrote before.

They are read for one more release.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ezpz_tp._errors import ParallelError
from ezpz_tp._shard import Entry, Shard

from . import Format, Options, Source, Stored, StoredPieces, load_object
from .safetensors import DTYPES, integers, open_safetensors

NAME = "shards.json"


def _open(path: Path, _: Options) -> Source:
    warnings.warn(
        f"{path}: the next release of ezpz_tp reads no folders with {NAME}; write it again by "
        "ezpz_tp.reshard(), for torch.distributed.checkpoint",
        DeprecationWarning,
        stacklevel=4,
    )
    index = path / NAME
    said = load_object(index)
    try:
        if (said["format"], said["version"]) != ("ezpz_tp shards", 1):
            raise ParallelError(
                f"{index}: is of format {said['format']!r}, version {said['version']}; expected "
                "'ezpz_tp shards', version 1"
            )
        tp, pp = integers((said["tp"], said["pp"]), least=1)
        held = {name: _held(name, one, pp) for name, one in said["tensors"].items()}
        save = said["save"]
    except (KeyError, TypeError, AttributeError, ValueError) as error:  # DegreeError is one
        raise ParallelError(f"{index}: it does not say what it should: {error!r}") from error
    files = [
        [_tensors(path, held, (save, tp, pp), stage, rank) for rank in range(tp)]
        for stage in range(pp)
    ]
    source = StoredPieces(
        {key: said[key] for key in ("param_groups", "values", "extra") if key in said}
    )
    for name, (entry, stages) in held.items():
        pieces = [
            (full, files[stages[0]][rank][name].part(local))
            for rank in range(tp if entry.shard.dim is not None else 1)
            for local, full in entry.shard.boxes(rank, tp)
        ]
        source.add(name, entry.dtype, entry.shard, pieces)
    return source


FORMAT = Format("ezpz_tp shards", lambda path: (path / NAME).is_file(), _open)


def _held(name: str, said: Mapping[str, Any], pp: int) -> tuple[Entry, tuple[int, ...]]:
    odd = said.keys() - {"dtype", "shape", "dim", "blocks", "padded", "stages"}
    if odd:
        raise ValueError(f"{name} has {sorted(odd)}")
    dim, padded, stages = said["dim"], said.get("padded") is True, integers(said["stages"])
    if dim is not None:
        (dim,) = integers((dim,))
    if not stages or max(stages) >= pp:
        raise ValueError(f"{name} is on stages {stages} of {pp}")
    shard = Shard(integers(said["shape"]), dim, integers(said.get("blocks", ())), padded)
    return Entry(name, DTYPES[said["dtype"]], shard), stages


def _tensors(
    folder: Path,
    held: Mapping[str, tuple[Entry, tuple[int, ...]]],
    save: tuple[str, int, int],
    stage: int,
    rank: int,
) -> Mapping[str, Stored]:
    """Return a file's tensors, having made sure that it is what the index says."""
    path = folder / f"pp{stage:02}-tp{rank:02}.safetensors"
    (tensors, metadata), tp = open_safetensors(path), save[1]
    try:
        stamp = json.loads(metadata.get("ezpz_tp", "{}"))
        found = [stamp.get(key) for key in ("save", "tp", "tp_size", "pp", "pp_size")]
    except (ValueError, AttributeError) as error:
        raise ParallelError(f"{path}: its metadata are damaged: {error}") from error
    expected = [save[0], rank, tp, stage, save[2]]
    if found != expected:
        raise ParallelError(
            f"{path}: is of save, tp, tp_size, pp, pp_size {found}; expected {expected}, as in "
            f"{NAME}: it was copied from elsewhere, or renamed"
        )
    for name, (entry, stages) in held.items():
        if stage not in stages:
            continue
        wanted = entry.shard.local_shape(rank, tp), entry.dtype
        stored = tensors.get(name)
        has = (stored.shape, stored.dtype) if stored else None
        if has != wanted:
            raise ParallelError(
                f"{path}: has no tensor {name!r} of shape {wanted[0]} and {wanted[1]}, rank {rank} "
                f"of {tp}'s part of {entry.shard.full_shape}; found {has or 'none of that name'}"
            )
    return tensors
