"""The files of shards that ezpz_tp wrote before."""

from __future__ import annotations

import functools
import json
import os
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ezpz_tp._errors import DegreeError, ParallelError
from ezpz_tp._groups.ranks import AXES
from ezpz_tp._groups.state import ParallelState
from ezpz_tp._shard import Entry, Held, Shard, optimizer_name, parameter_of
from ezpz_tp._state_dict import (
    Parts,
    Whole,
    all_or_none,
    groups_for,
    names_of,
    owners_of,
    part_of,
    set_groups,
    shard_in,
    state_or_alone,
    survey,
    tell_all,
)

from . import Format, Options
from .safetensors import DTYPES, TensorFile, TensorWriter, integers, name_of
from .stretches import sync

# The file beside the shards that says what they are: written last, so its presence means whole.

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


# Reads the shards that this package writes.


class ShardFiles:
    """A folder of shards as one source of full tensors.

    The headers of the files are read when first needed, or all at once by `check`.

    Attributes:
        path: The folder.
        index: What it says it holds.
        entries: The full tensors, by name.
        metadata: What else was saved.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index = Index.read(path)
        self.entries: Mapping[str, Entry] = {
            name: held.entry for name, held in self.index.tensors.items()
        }
        self.metadata: Mapping[str, Any] = self.index.metadata
        self._file = functools.cache(self._open)

    def check(self) -> None:
        """Compare every file with the index.

        Raises:
            ParallelError: A file is missing, truncated, of another save, or lacks a tensor, or a
                tensor has another shape or dtype.
        """
        for stage in range(self.index.pp):
            for index in range(self.index.tp):
                self._file(stage, index)

    def check_for(self, name: str, shard: Shard, index: int, degree: int) -> None:
        """Compare the files that `read_part` would read with the index.

        Raises:
            ParallelError: As of `check`.
        """
        stage = self.index.tensors[name].stages[0]
        for each in (index,) if self._is_kept(name, shard, degree) else range(self.index.tp):
            self._file(stage, each)

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill ``out`` with a stretch of a full tensor, see `Source`.

        Of a tensor that is not split, the first tensor-parallel rank's copy is read.
        """
        shard, stage = self.entries[name].shard, self.index.tensors[name].stages[0]
        if shard.dim is None:
            self._file(stage, 0).read_into(name, 0, start, out)
            return
        stop = start + out.shape[shard.dim]
        for index in range(self.index.tp):
            for begin, into, length in shard.overlap(index, self.index.tp, start, stop):
                wanted = out.narrow(shard.dim, into, length)
                self._file(stage, index).read_into(name, shard.dim, begin, wanted)

    def read_part(self, name: str, shard: Shard, index: int, degree: int, out: Tensor) -> None:
        """Fill ``out`` with what a rank holds of a tensor at any degree; padding is zero.

        At the degree of the files it is what that rank saved, padding included.
        """
        if self._is_kept(name, shard, degree):
            stage = self.index.tensors[name].stages[0]
            self._file(stage, index).read_into(name, 0, 0, out)
            return
        pieces, dim = shard.pieces(index, degree), shard.dim
        if dim is None:
            self.read_into(name, 0, out)
            return
        if sum(length for *_, length in pieces) < out.shape[dim]:
            out.zero_()
        for into, start, length in pieces:
            self.read_into(name, start, out.narrow(dim, into, length))

    def _is_kept(self, name: str, shard: Shard, degree: int) -> bool:
        """Whether each rank saved just what it is to hold."""
        return degree == self.index.tp and shard == self.entries[name].shard

    def _open(self, stage: int, index: int) -> TensorFile:
        """Open a file and check that it is what the index says."""
        name, tp = file_name(stage, index), self.index.tp
        path = self.path / name
        file = TensorFile.open(path)
        try:
            stamp = json.loads(file.metadata.get("ezpz_tp", "{}"))
            found = [stamp.get(key) for key in ("save", "tp", "tp_size", "pp", "pp_size")]
        except (ValueError, AttributeError) as error:
            raise ParallelError(f"{path}: its metadata are damaged: {error}") from error
        expected = [self.index.save, index, tp, stage, self.index.pp]
        if found != expected:
            raise ParallelError(
                f"{path}: is of save, tp, tp_size, pp, pp_size {found}; expected {expected}, as in "
                f"{NAME}: it was copied from elsewhere, or renamed"
            )
        for entry, stages in ((held.entry, held.stages) for held in self.index.tensors.values()):
            if stage not in stages:
                continue
            shape = entry.shard.local_shape(index, tp)
            stored = file.tensors.get(entry.name)
            if stored is None:
                raise ParallelError(
                    f"{path}: has no tensor {entry.name!r}; expected one of shape {shape}, rank "
                    f"{index} of {tp}'s part of {entry.shard.full_shape}"
                )
            if (stored.shape, stored.dtype) != (shape, entry.dtype):
                raise ParallelError(
                    f"{path}: tensor {entry.name!r} has shape {stored.shape} and {stored.dtype}; "
                    f"expected {shape} and {entry.dtype}, rank {index} of {tp}'s part of "
                    f"{entry.shard.full_shape}"
                )
        return file


def _open_checked(path: Path, _: Options) -> ShardFiles:
    files = ShardFiles(path)
    files.check()
    return files


FORMAT = Format("ezpz_tp shards", lambda path: (path / NAME).is_file(), _open_checked)


# Each rank writes what it holds to a file of its own.


@torch.no_grad()
def save_shards(
    module: nn.Module,
    path: str | Path,
    *,
    optimizer: Optimizer | None = None,
    state: ParallelState | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Save what each rank holds in a file of its own; nothing is joined or sent.

    The folder has ``pp00-tp00.safetensors`` and so on, which any reader of safetensors reads, from
    the first data- and context-parallel replica; and ``shards.json``, which says what they are
    parts of. That is written last, once every file is on disk: a folder without it is what is
    left of a save that was interrupted, and may be saved to again. `load_shards` loads them at
    any degree, `reshard` writes them anew at another.

    Collective: every rank calls this, with the same arguments. What goes wrong on one rank is
    raised on all.

    Args:
        module: This rank's model, or stage of it. Stages have to use the names of the whole
            model.
        path: A folder on storage that all ranks share; made if it is not there.
        optimizer: Save its state as well.
        state: Whose groups; the default's if None.
        extra: What else to save, such as the step: numbers, texts, lists and dicts of these.

    Raises:
        ParallelError: The folder holds a save already; or as of `gather_state_dict`.
    """
    state = state_or_alone(state)
    parts, whole = survey(module, optimizer, state)
    lead = not any(state.index(axis) for axis in AXES)
    writes = not (state.index("data") or state.index("context"))
    stage, rank = state.index("pipeline"), state.index("tensor")
    with all_or_none(state):
        metadata = _metadata(whole, extra)
        file = Path(path) / file_name(stage, rank)
        if lead:
            _check_free(file.parent)
    save = tell_all(secrets.token_hex(8), state)[0]
    index = Index(state.size("tensor"), state.size("pipeline"), save, whole.tensors, metadata)
    try:
        with all_or_none(state):
            if writes:
                _write(file, parts, index.stamp(stage, rank))
        with all_or_none(state):
            if lead:
                index.write(file.parent)
    except ParallelError:
        if writes:
            file.unlink(missing_ok=True)
        raise


def _metadata(whole: Whole, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what the index says besides tensors."""
    found: dict[str, Any] = {
        "values": {name: plain(name, value) for name, value in whole.values.items()},
        "extra": plain("extra", dict(extra or {})),
    }
    if whole.groups is not None:
        found["param_groups"] = plain("param_groups", whole.groups)
    return found


def _check_free(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / NAME).exists():
        raise ParallelError(
            f"{folder}: holds a save already, {NAME}; expected a new folder, so that there is a "
            "whole save at any time. Give another, or remove it"
        )


def _write(path: Path, parts: Parts, stamp: Mapping[str, str]) -> None:
    """Write this rank's file."""
    tensors = {
        name: (part.tensor.dtype, tuple(part.tensor.shape)) for name, part in parts.tensors.items()
    }
    with TensorWriter(path, tensors, stamp) as writer:
        for name, part in parts.tensors.items():
            writer.write(name, part.tensor)


# A model's and optimizer's parts, read from files of shards of any degree.

_EXTRA = "_extra_state"


@torch.no_grad()
def load_shards(
    module: nn.Module,
    path: str | Path,
    *,
    optimizer: Optimizer | None = None,
    state: ParallelState | None = None,
) -> dict[str, Any]:
    """Load what `save_shards` or `reshard` wrote, at whatever degrees, into a model in place.

    A rank reads its own file if the tensor-parallel degree is that of the files, and else the
    stretches that it needs of the others; no tensor is ever whole here unless it is in the model.
    The pipeline may be divided in another way too. Parameters keep their dtype; the optimizer's
    state has the dtype that was saved.

    Collective: every rank calls this. What goes wrong on one rank is raised on all; what does not
    fit, before anything is loaded.

    Args:
        module: This rank's model, or stage of it, of any values, on any device but meta.
        path: The folder.
        optimizer: Load its state and hyperparameters as well.
        state: Whose groups; the default's if None.

    Returns:
        What was given to `save_shards` as ``extra``.

    Raises:
        DegreeError: A tensor has another full shape in the files; names both.
        ParallelError: A tensor is not in the files, or is in no stage of the model; a file is
            missing, truncated or of another save; there is no optimizer's state.
    """
    state = state_or_alone(state)
    with all_or_none(state):
        files = ShardFiles(Path(path))
        names = list(module.state_dict())
    known = {name for stage in tell_all(names, state, ("pipeline",)) for name in stage}
    with all_or_none(state):
        loader = _Loader(files, module, optimizer, state, known)
    with all_or_none(state):
        loader.load()
    extra: dict[str, Any] = files.metadata.get("extra", {})
    return extra


class _Loader:
    """Knows what to read for one rank once all of it is found to fit.

    ``known`` are the names that any stage of the model has.
    """

    def __init__(
        self,
        files: ShardFiles,
        module: nn.Module,
        optimizer: Optimizer | None,
        state: ParallelState,
        known: Collection[str],
    ) -> None:
        self.files, self.module, self.optimizer, self.state = files, module, optimizer, state
        self.place = state.index("tensor"), state.size("tensor")
        self.targets = owners_of(module)
        self.saved_values: Mapping[str, Any] = files.metadata.get("values", {})
        self.names = [name for name in module.state_dict() if not name.endswith(_EXTRA)]
        self._check_names(known)
        self.shards = {name: self._shard(name, name, self.targets[name]) for name in self.names}
        self.moments: dict[nn.Parameter, dict[str, str]] = {}
        if optimizer is not None:
            self._plan_optimizer(optimizer)

    def load(self) -> None:
        """Read everything, one tensor after another."""
        for name in self.names:
            self._read(name, self.shards[name], self.targets[name].detach())
        for name, submodule in self.module.named_modules(remove_duplicate=False):
            key = f"{name}.{_EXTRA}" if name else _EXTRA
            if key in self.files.entries:
                entry = self.files.entries[key]
                value = torch.empty(entry.shard.full_shape, dtype=entry.dtype)
                self._read(key, entry.shard, value)
                submodule.set_extra_state(value)
            elif key in self.saved_values:
                submodule.set_extra_state(self.saved_values[key])
        if self.optimizer is not None:
            self._load_optimizer(self.optimizer)

    def _check_names(self, known: Collection[str]) -> None:
        path, entries = self.files.path, self.files.entries
        wrong = [name for name in self.names if name not in entries]
        if wrong:
            raise ParallelError(
                f"{path / NAME}: has none of {len(wrong)} tensors of {type(self.module).__name__}, "
                f"as {', '.join(map(repr, wrong[:4]))}; it has {len(entries)}, as "
                f"{', '.join(map(repr, list(entries)[:4]))}. Is it of another model?"
            )
        unknown = [name for name in self.names if name not in self.targets]
        if unknown:
            raise ParallelError(
                f"{unknown[0]!r} is in the state dict, but is neither a parameter nor a buffer "
                "that could be loaded in place; use gather_state_dict and shard_state_dict"
            )
        more = [name for name in entries if parameter_of(name)[1] is None and name not in known]
        if more:
            raise ParallelError(
                f"{path / NAME}: has {len(more)} tensors that {type(self.module).__name__} has "
                f"not, as {', '.join(map(repr, more[:4]))}. Is it of another model?"
            )

    def _shard(self, name: str, entry_name: str, parameter: Tensor) -> Shard:
        """Return what the parameter's part is of the files' tensor, which has to be alike."""
        shard = part_of(name, parameter, shard_in(name, parameter, self.state), *self.place).shard
        found = self.files.entries[entry_name].shard
        if shard.full_shape != found.full_shape:
            raise DegreeError(
                f"{self.files.path / NAME}: {entry_name!r} has full shape {found.full_shape}; "
                f"expected {shard.full_shape}, of which this rank holds {tuple(parameter.shape)}"
            )
        self.files.check_for(entry_name, shard, *self.place)
        return shard

    def _plan_optimizer(self, optimizer: Optimizer) -> None:
        saved = self.files.metadata.get("param_groups")
        if saved is None:
            raise ParallelError(
                f"{self.files.path / NAME}: was saved without an optimizer; load without one"
            )
        self.groups = groups_for(saved, optimizer, self.module)
        keys: dict[str, dict[str, str]] = {}
        for entry in self.files.entries:
            parameter, key = parameter_of(entry)
            if key is not None:
                keys.setdefault(parameter, {})[key] = entry
        for owner, name in names_of(optimizer, self.module).items():
            self.moments[owner] = keys.get(name, {})
            for entry in self.moments[owner].values():
                shard = self.files.entries[entry].shard
                if shard.dim is not None or shard.full_shape == self.shards[name].full_shape:
                    self.shards[entry] = self._shard(name, entry, owner)
                else:
                    self.shards[entry] = shard
                    self.files.check_for(entry, shard, *self.place)

    def _load_optimizer(self, optimizer: Optimizer) -> None:
        set_groups(optimizer, self.groups)
        names = names_of(optimizer, self.module)
        for group in optimizer.param_groups:
            # Where torch.optim wants the count of steps.
            on_device = bool(group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                found: dict[str, Any] = {}
                for key, name in self.moments[parameter].items():
                    shape = self.shards[name].local_shape(*self.place)
                    moved = on_device or shape == tuple(parameter.shape)
                    device = parameter.device if moved else torch.device("cpu")
                    dtype = self.files.entries[name].dtype
                    found[key] = torch.empty(shape, dtype=dtype, device=device)
                    self._read(name, self.shards[name], found[key])
                start = optimizer_name(names[parameter], "")
                for name, value in self.saved_values.items():
                    if name.startswith(start):
                        found[name.removeprefix(start)] = value
                optimizer.state.pop(parameter, None)
                if found:
                    optimizer.state[parameter] = found

    def _read(self, name: str, shard: Shard, out: Tensor) -> None:
        dtype = self.files.entries[name].dtype
        if out.device.type == "cpu" and out.dtype == dtype:
            self.files.read_part(name, shard, *self.place, out)
            return
        values = torch.empty(out.shape, dtype=dtype)
        self.files.read_part(name, shard, *self.place, values)
        out.copy_(values)
