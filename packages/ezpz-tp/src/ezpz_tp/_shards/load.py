"""A model's and optimizer's parts, read from files of shards of any degree."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ezpz_tp._errors import DegreeError, ParallelError
from ezpz_tp._groups.state import ParallelState

from .exchange import all_or_none, state_or_alone, tell_all
from .index import NAME
from .optimizer import groups_for, names_of, set_groups
from .parts import owners_of, part_of, shard_in
from .reader import ShardFiles
from .source import optimizer_name, parameter_of
from .spec import Shard

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
