"""What all ranks hold together: the whole model, as they agree on it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ezpz_tp._errors import ParallelError
from ezpz_tp._groups.state import ParallelState

from .chunks import CHUNK, flat_bytes
from .exchange import agree, tell_all
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
    parts = Parts()
    error: ParallelError | None = None
    try:
        parts = parts_of(module, optimizer, state)
    except ParallelError as caught:  # DegreeError is one
        error = caught
    agree(error, state)
    entries = [Entry(name, part.tensor.dtype, part.shard) for name, part in parts.tensors.items()]
    agree(_unlike(entries, state), state)
    stages = tell_all((entries, parts.values, parts.groups), state, ("pipeline",))
    held: dict[str, Held] = {}
    values: dict[str, Any] = {}
    problem: ParallelError | None = None
    for stage, (found, others, _) in enumerate(stages):
        values |= others
        for entry in found:
            before = held.get(entry.name, Held(entry, ()))
            if before.entry != entry and problem is None:
                problem = _clash(before, stage, f"{before.entry} and {entry}")
            held[entry.name] = Held(entry, (*before.stages, stage))
    agree(problem, state)
    agree(_untied(parts, held, state), state)
    groups = None
    if optimizer is not None:
        try:
            groups = join_groups([found for _, _, found in stages])
        except ParallelError as caught:
            problem = caught
        agree(problem, state)
    return parts, Whole(held, values, groups)


def _unlike(entries: list[Entry], state: ParallelState) -> ParallelError | None:
    """Return how the ranks of this tensor group differ in what they hold, or None."""
    told = tell_all(hashlib.sha256(repr(entries).encode()).digest(), state, ("tensor",))
    if len(set(told)) == 1:
        return None
    first, *others = tell_all(entries, state, ("tensor",))
    for rank, other in enumerate(others, 1):
        odd = set(map(repr, first)) ^ set(map(repr, other))
        if odd or first != other:
            return ParallelError(
                f"tensor-parallel ranks 0 and {rank} of stage {state.index('pipeline')} hold parts "
                f"of other tensors: {', '.join(sorted(odd)[:4]) or 'in another order'}; expected "
                "the same model on each"
            )
    return None


def _untied(parts: Parts, held: dict[str, Held], state: ParallelState) -> ParallelError | None:
    """Return which tensor two stages hold under one name without being copies, or None."""
    several = [name for name, one in held.items() if len(one.stages) > 1]
    if not several:
        return None
    here = {name: _digest(parts.tensors[name].tensor) for name in several if name in parts.tensors}
    for stage, told in enumerate(tell_all(here, state, ("pipeline",))):
        for name, digest in told.items():
            first = held[name].stages[0]
            if stage == first:
                here[name] = digest
            elif here[name] != digest:
                return _clash(held[name], stage, "other values")
    return None


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
