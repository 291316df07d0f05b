"""Folders of ``shards.json``, which ezpz_tp wrote before: they are read for one more release."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ezpz_tp._errors import ParallelError
from ezpz_tp._shard import Entry, Shard

from . import Format, Options, Source, Stored, load_json, pieces_of
from .safetensors import DTYPES, integers, open_safetensors

NAME = "shards.json"
_FILE = "pp{:02}-tp{:02}.safetensors"
_REST = {"param_groups", "values", "extra"}


def _open(path: Path, _: Options) -> Source:
    warnings.warn(
        f"{path}: the next release of ezpz_tp reads no folders with {NAME}; write it again by "
        "ezpz_tp.reshard(), for torch.distributed.checkpoint",
        DeprecationWarning,
        stacklevel=4,
    )
    index = path / NAME
    said = load_json(index)
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
    places = itertools.product(range(pp), range(tp))
    files = {(stage, rank): _tensors(path, save, rank, tp, stage, pp) for stage, rank in places}
    source = Source({key: said[key] for key in said.keys() & _REST})
    for name, (entry, stages) in held.items():
        for place in itertools.product(stages, range(tp)):
            stored, wanted = files[place].get(name), entry.shard.local_shape(place[1], tp)
            found = (stored.shape, stored.dtype) if stored else "none of that name"
            if found != (wanted, entry.dtype):
                raise ParallelError(
                    f"{path / _FILE.format(*place)}: has no tensor {name!r} of shape {wanted} and "
                    f"{entry.dtype}, rank {place[1]} of {tp}'s part of {entry.shard.full_shape}; "
                    f"found {found}"
                )
        parts = [files[stages[0], rank][name] for rank in range(tp)]
        source.add(name, entry.dtype, entry.shard, pieces_of(entry.shard, parts))
    return source


FORMAT = Format("ezpz_tp shards", lambda path: (path / NAME).is_file(), _open)


def _held(name: str, said: Mapping[str, Any], pp: int) -> tuple[Entry, tuple[int, ...]]:
    if odd := said.keys() - {"dtype", "shape", "dim", "blocks", "padded", "stages"}:
        raise ValueError(f"{name} has {sorted(odd)}")
    dim, padded, stages = said["dim"], said.get("padded") is True, integers(said["stages"])
    if dim is not None:
        (dim,) = integers((dim,))
    if not stages or max(stages) >= pp:
        raise ValueError(f"{name} is on stages {stages} of {pp}")
    shard = Shard(integers(said["shape"]), dim, integers(said.get("blocks", ())), padded)
    return Entry(name, DTYPES[said["dtype"]], shard), stages


def _tensors(
    folder: Path, save: str, rank: int, tp: int, stage: int, pp: int
) -> Mapping[str, Stored]:
    """Return a file's tensors, having made sure that it is the one that the index says."""
    path = folder / _FILE.format(stage, rank)
    tensors, metadata = open_safetensors(path)
    try:
        stamp = json.loads(metadata.get("ezpz_tp", "{}"))
        found = [stamp.get(key) for key in ("save", "tp", "tp_size", "pp", "pp_size")]
    except (ValueError, AttributeError) as error:
        raise ParallelError(f"{path}: its metadata are damaged: {error}") from error
    if found != (expected := [save, rank, tp, stage, pp]):
        raise ParallelError(
            f"{path}: is of save, tp, tp_size, pp, pp_size {found}; expected {expected}, as in "
            f"{NAME}: it was copied from elsewhere, or renamed"
        )
    return tensors
