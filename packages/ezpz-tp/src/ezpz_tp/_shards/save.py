"""Each rank writes what it holds to a file of its own."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ezpz_tp._errors import ParallelError
from ezpz_tp._groups.ranks import AXES
from ezpz_tp._groups.state import ParallelState

from .exchange import all_or_none, state_or_alone, tell_all
from .index import NAME, Index, file_name, plain
from .parts import Parts
from .safetensors import TensorWriter
from .whole import Whole, survey


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
