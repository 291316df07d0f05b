"""What all ranks hold together: the whole model, as they agree on it."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ezpz_tp._errors import ParallelError
from ezpz_tp._groups.state import ParallelState

from .chunks import CHUNK, flat_bytes
from .exchange import all_or_none, tell_all
from .optimizer import Group, join_groups
from .parts import Parts, parts_of
from .source import Entry, Held


@dataclass(frozen=True, slots=True)
class Whole:
    """A model and its optimizer over all ranks.

    Attributes:
        tensors: The full tensors by name, and the pipeline stages that hold each.
        values: What is no tensor.
        groups: The optimizer's groups; None without one.
    """

    tensors: dict[str, Held]
    values: dict[str, Any]
    groups: list[Group] | None


def survey(
    module: nn.Module, optimizer: Optimizer | None, state: ParallelState
) -> tuple[Parts, Whole]:
    """Return what this rank holds, and what all do.

    Collective: every rank calls this. What is wrong on one rank is raised on all.

    Raises:
        ParallelError: As of `parts_of`; or the ranks of a tensor group hold other tensors; or two
            stages have one name for tensors that differ.
    """
    with all_or_none(state):
        parts = parts_of(module, optimizer, state)
        entries = [Entry(name, one.tensor.dtype, one.shard) for name, one in parts.tensors.items()]
        said = entries, parts.values, parts.groups
        if state.size("pipeline") > 1:
            pickle.dumps(said)  # what cannot be sent is known before anything is
    alike = tell_all((entries, optimizer is None), state, ("tensor",))
    stages = tell_all(said, state, ("pipeline",))
    with all_or_none(state):
        _check_alike(alike, state)
        held = _held([entries for entries, _, _ in stages])
        values = {name: value for _, found, _ in stages for name, value in found.items()}
        groups = join_groups([found for _, _, found in stages])
        tied = [name for name, one in held.items() if len(one.stages) > 1]
        digests = {
            name: _digest(parts.tensors[name].tensor) for name in tied if name in parts.tensors
        }
    told = tell_all(digests, state, ("pipeline",))
    with all_or_none(state):
        for name in tied:
            first, *others = held[name].stages
            for stage in others:
                if told[stage][name] != told[first][name]:
                    raise _clash(held[name], stage, "other values")
    return parts, Whole(held, values, groups)


def _check_alike(told: Sequence[tuple[list[Entry], bool]], state: ParallelState) -> None:
    """Raise `ParallelError` where the ranks of this tensor group differ in what they hold."""
    (first, without), *others = told
    for rank, (other, none) in enumerate(others, 1):
        if (first, without) != (other, none):
            odd = sorted(set(map(repr, first)) ^ set(map(repr, other)))
            same = "in another order" if first != other else "but one has an optimizer"
            what = ", ".join(odd[:4]) or same
            raise ParallelError(
                f"tensor-parallel ranks 0 and {rank} of stage {state.index('pipeline')} hold parts "
                f"of other tensors: {what}; expected the same model and optimizer on each"
            )


def _held(stages: Sequence[list[Entry]]) -> dict[str, Held]:
    """Return the full tensors, and the stages that have each."""
    held: dict[str, Held] = {}
    for stage, entries in enumerate(stages):
        for entry in entries:
            before = held.get(entry.name, Held(entry, ()))
            if before.entry != entry:
                raise _clash(before, stage, f"{before.entry} and {entry}")
            held[entry.name] = Held(entry, (*before.stages, stage))
    return held


def _clash(held: Held, stage: int, what: str) -> ParallelError:
    return ParallelError(
        f"pipeline stages {held.stages[0]} and {stage} both have {held.entry.name!r}, with {what}; "
        "expected a tied parameter, equal on both, or the names of the whole model: number the "
        "layers of a stage as they are in the model"
    )


def _digest(tensor: Tensor) -> bytes:
    """Return a hash of a tensor's bytes."""
    found = hashlib.blake2b(digest_size=16)
    for piece in flat_bytes(tensor).split(CHUNK):
        if len(piece):
            buffer = bytearray(len(piece))
            torch.frombuffer(buffer, dtype=torch.uint8).copy_(piece)
            found.update(buffer)
    return found.digest()
