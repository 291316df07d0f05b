"""The file beside the shards that says what they are: written last, so its presence means whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ezpz_tp._errors import ParallelError

from .folder import sync
from .safetensors import DTYPES, integers, name_of
from .source import Entry, Held
from .spec import Shard

NAME = "shards.json"
KEPT = ("param_groups", "values", "extra")
"""What an index holds besides tensors."""

_FORMAT, _VERSION = "ezpz_tp shards", 1


def file_name(stage: int, index: int) -> str:
    """Return the name of the file of one rank of a pipeline stage's tensor group."""
    return f"pp{stage:02}-tp{index:02}.safetensors"


@dataclass(frozen=True, slots=True)
class Index:
    """What there is in a folder of shards.

    Attributes:
        tp: The tensor-parallel degree.
        pp: Number of pipeline stages.
        save: A word that every file of one save has, and no other's.
        tensors: By name, in the model's order.
        metadata: ``param_groups`` of the optimizer, ``values`` that are no tensors, ``extra``.
    """

    tp: int
    pp: int
    save: str
    tensors: Mapping[str, Held]
    metadata: Mapping[str, Any]

    def stamp(self, stage: int, index: int) -> dict[str, str]:
        """Return what a file's own metadata say, by which it is known as one of these."""
        place = {"tp": index, "tp_size": self.tp, "pp": stage, "pp_size": self.pp}
        said = {"format": _FORMAT, "version": _VERSION, "save": self.save, **place}
        held = {name: said_of(one) for name, one in self.tensors.items() if stage in one.stages}
        # "format" is for readers that ask which framework's tensors these are.
        return {"format": "pt", "ezpz_tp": json.dumps(said), "shards": json.dumps(held)}

    def write(self, folder: Path) -> None:
        """Write the index, under another name first."""
        said = {
            "format": _FORMAT,
            "version": _VERSION,
            "save": self.save,
            "tp": self.tp,
            "pp": self.pp,
            **self.metadata,
            "tensors": {name: said_of(held) for name, held in self.tensors.items()},
        }
        partial = folder / f".{NAME}.partial"
        try:
            with partial.open("w", encoding="utf-8") as file:
                json.dump(said, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(folder / NAME)
        except BaseException:  # also at Ctrl-C: no half a file stays; raised again
            if partial.is_file():
                partial.unlink()
            raise
        sync(folder)

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Read the index of a folder.

        Raises:
            ParallelError: There is none, it cannot be read, or it is of a later version.
        """
        path = folder / NAME
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ParallelError(
                f"{path}: there is no such file; the folder holds no shards, or their save was "
                "interrupted"
            ) from error
        except ValueError as error:
            raise ParallelError(f"{path}: it is no JSON: {error}") from error
        try:
            if (said["format"], said["version"]) != (_FORMAT, _VERSION):
                raise ParallelError(
                    f"{path}: is of format {said['format']!r}, version {said['version']}; expected "
                    f"{_FORMAT!r}, version {_VERSION}: a later ezpz_tp wrote it"
                )
            tensors = {name: _held(name, one) for name, one in said.pop("tensors").items()}
            rest = {key: said[key] for key in KEPT if key in said}
            tp, pp = integers((said["tp"], said["pp"]), least=1)
            for held in tensors.values():
                if not held.stages or max(held.stages) >= pp:
                    raise ValueError(f"{held.entry.name} is on stages {held.stages} of {pp}")
            return cls(tp, pp, said["save"], tensors, rest)
        except (KeyError, TypeError, AttributeError, ValueError) as error:  # DegreeError is one
            raise ParallelError(f"{path}: it does not say what it should: {error!r}") from error


def said_of(held: Held) -> dict[str, Any]:
    """Return what the files say of a tensor."""
    shard = held.entry.shard
    return {
        "dtype": name_of(held.entry.dtype, held.entry.name),
        "shape": list(shard.full_shape),
        "dim": shard.dim,
        **({"blocks": list(shard.blocks)} if shard.blocks else {}),
        **({"padded": True} if shard.padded else {}),
        "stages": list(held.stages),
    }


def plain(what: str, value: Any) -> Any:
    """Return a value as JSON has it: a tensor of one number (a learning rate) as that number.

    Raises:
        ParallelError: It is none that JSON has; says what it is.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return plain(what, value.item())
    if isinstance(value, list | tuple):
        return [plain(f"{what}[{number}]", one) for number, one in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ParallelError(
                    f"{what} has the key {key!r}, which files of shards would make a text; "
                    "expected texts as keys: give a list of pairs, say"
                )
        return {key: plain(f"{what}[{key!r}]", one) for key, one in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ParallelError(
        f"{what} is {value!r}, which files of shards cannot hold; expected a number, a text, None, "
        "or lists and dicts of these"
    )


def _held(name: str, said: Mapping[str, Any]) -> Held:
    odd = said.keys() - {"dtype", "shape", "dim", "blocks", "padded", "stages"}
    if odd:
        raise ValueError(f"{name} has {sorted(odd)}")
    dim, padded = said["dim"], said.get("padded") is True
    if dim is not None:
        (dim,) = integers((dim,))
    shard = Shard(integers(said["shape"]), dim, integers(said.get("blocks", ())), padded)
    return Held(Entry(name, DTYPES[said["dtype"]], shard), integers(said["stages"]))
