"""Comparing, by their checksums, values that should be equal on all ranks of an axis."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ._current import get_state
from ._errors import ParallelError, ReplicaError
from ._grads import is_shared, is_tied, laid_out_gradient, local_part
from ._init import sending_device
from ._mappings import all_gather
from ._random import MODEL_PARALLEL_RNG, checksum, get_rng_tracker
from ._state import ParallelState

_ROW = 1024
"""Numbers that are sent first: as many by all, so that ranks with other parameters can say so."""

_SHOWN = 5
_DIFFERS = "should be the same on all of them"
_SAME = "should be another one on each of them, and is the same"
_SEEDS = "the ranks were seeded alike: initialize a shard by the layers or initialize_shard"


@dataclass(frozen=True, slots=True)
class _Item:
    """One value to compare. ``differs`` says that it should be another one on each rank."""

    name: str
    digest: int
    differs: bool = False
    fix: str = ""


def verify_replicated(
    model: nn.Module, *, gradients: bool = False, state: ParallelState | None = None
) -> None:
    """Raise if values that should be equal on all ranks are not.

    * Along the data and context axes every parameter is compared, but an expert's
      (``allreduce`` False), and what FSDP2 has sharded over them.
    * Along the tensor axis those that are not sharded are compared. Sharded ones, and the
      stream "model-parallel-rng", should differ between ranks, unless they are constant. Equal
      ones come from equal seeds.
    * A tied embedding is compared between the stages that hold it; all but one copy should be
      ``shared``, or the norm of the gradient counts it twice.

    Checksums are sent, 8 bytes a value: one collective for each axis of degree above 1, or two
    for more than a thousand values. Call it after a few steps; within a step, after
    `finalize_grads` and the reduction over data, also with ``gradients``.

    Collective: every rank calls this, with its part of the model.

    Args:
        model: Whose parameters are compared.
        gradients: Compare their gradients too.
        state: Whose groups; the default's if None.

    Raises:
        ReplicaError: Names the parameters, the axis, the ranks that differ, and the mend.
        ParallelError: A parameter is on the meta device, and has no value.
    """
    state = state or get_state()
    parameters = list(model.named_parameters())
    devices = [one.device for _, one in parameters if not one.is_meta]
    device = devices[0] if devices else torch.device("cpu")
    compared = {}
    for axis in ("tensor", "context", "data"):
        if state.size(axis) > 1:
            items: list[_Item] = []
            for name, parameter in parameters:
                items += _items(name, parameter, axis, gradients, state)
            if axis == "tensor":
                items += _streams()
            compared[axis] = items
    if state.size("pipeline") > 1 and state.has("embedding"):
        compared["embedding"] = list(_tied(parameters))
    # All collectives before the first error: other ranks may have none, and wait.
    tables = {axis: _gather(items, axis, state, device) for axis, items in compared.items()}
    for name, parameter in parameters:
        if parameter.is_meta:
            raise ParallelError(
                f"verify_replicated: {name} {tuple(parameter.shape)} is on the meta device and has "
                "no values; initialize it first (to_empty, reset_parameters)"
            )
    lines: list[str] = []
    for axis, table in tables.items():
        lines += _problems(compared[axis], axis, table, state.ranks(axis))
    if lines:
        raise ReplicaError("verify_replicated:\n  " + "\n  ".join(lines))


def _items(
    name: str, parameter: Tensor, axis: str, gradients: bool, state: ParallelState
) -> Iterator[_Item]:
    split = hasattr(parameter, "device_mesh") and _is_split(parameter, set(state.ranks(axis)))
    if not getattr(parameter, "allreduce", True) or (split and axis != "tensor"):
        return
    sharded = axis == "tensor" and (split or getattr(parameter, "tensor_model_parallel", False))
    value = local_part(parameter.detach())
    if not sharded:
        yield _Item(name, _digest(value), fix=_advice(parameter, axis))
    else:  # a constant, 0, is not compared
        digest = 0
        if _is_mixed(value):
            digest = _digest(value)
        yield _Item(name, digest, differs=True, fix=_SEEDS)
    if gradients and not sharded:
        grad = laid_out_gradient(parameter)
        digest = 0
        if grad is not None:
            digest = _digest(local_part(grad))
        yield _Item(f"gradient of {name}", digest, fix=_advice(parameter, axis))


def _is_split(parameter: Any, ranks: set[int]) -> bool:
    """Whether ranks, this one among them, hold different parts of a DTensor."""
    mesh = parameter.device_mesh
    return any(
        not placement.is_replicate()
        and len(ranks.intersection(dist.get_process_group_ranks(mesh.get_group(dim)))) > 1
        for dim, placement in enumerate(parameter.placements)
    )


def _advice(parameter: Tensor, axis: str) -> str:
    if axis != "tensor":
        return (
            "sum gradients over the data and context axes, as DistributedDataParallel does over "
            'also=[("data", "context")], and start all ranks from the same values'
        )
    if getattr(parameter, "sequence_parallel", False):
        return "call finalize_grads once a step, before the optimizer"
    return (
        "give all tensor-parallel ranks the same seed; if it acts on a part of the sequence or of "
        "the heads, mark_sequence_parallel it and call finalize_grads"
    )


def _streams() -> Iterator[_Item]:
    states = get_rng_tracker().get_states()
    if MODEL_PARALLEL_RNG in states:
        yield _Item(
            f"the random stream {MODEL_PARALLEL_RNG!r}",
            _digest(states[MODEL_PARALLEL_RNG]),
            differs=True,
            fix="call seed_model_parallel(seed), which adds the tensor-parallel rank",
        )


def _tied(parameters: Sequence[tuple[str, Tensor]]) -> Iterator[_Item]:
    """A tied embedding and whether this copy is the one that counts."""
    for number, one in enumerate(p for _, p in parameters if is_tied(p) or is_shared(p)):
        fix = "call finalize_grads on every stage, and start all from the same values"
        yield _Item(f"tied embedding {number}", _digest(local_part(one.detach())), fix=fix)
        fix = "set `shared = True` on every copy but the first stage's: the norm counts it once"
        yield _Item(f"`shared` of tied embedding {number}", int(is_shared(one)), True, fix)


def _is_mixed(value: Tensor) -> bool:
    """Whether a shard has several values; what is not a number is one."""
    if value.is_meta or value.numel() < 2:
        return False
    first = value.reshape(-1)[0]
    same = value.isnan() if bool(first.isnan()) else value == first
    return not bool(same.all())


def _digest(value: Tensor) -> int:
    if value.is_meta:
        return 0
    return int(checksum(value).item())


def _gather(
    items: Sequence[_Item], axis: str, state: ParallelState, device: torch.device
) -> list[list[int]]:
    """Return what each rank of an axis has: how many values, what they are called, checksums."""
    group = state.group(axis)
    structure = hashlib.blake2b("\n".join(one.name for one in items).encode(), digest_size=7)
    row = [len(items), int.from_bytes(structure.digest(), "little"), *(i.digest for i in items)]
    first = row[:_ROW]
    rest = row[_ROW:]
    first += [0] * (_ROW - len(first))
    table = _send(first, group, device)
    if rest and not any(one[:2] != first[:2] for one in table):  # all ranks know the same of all
        more = _send(rest, group, device)
        table = [[*one, *other] for one, other in zip(table, more, strict=True)]
    return table


def _send(row: list[int], group: ProcessGroup, device: torch.device) -> list[list[int]]:
    sent = torch.tensor(row, dtype=torch.int64, device=sending_device(group, device))
    table: list[list[int]] = all_gather(sent.unsqueeze(0), 0, group).tolist()
    return table


def _problems(
    items: Sequence[_Item], axis: str, table: list[list[int]], ranks: Sequence[int]
) -> list[str]:
    odd = _find_outliers([tuple(row[:2]) for row in table], ranks)
    if odd:
        counts = ", ".join(f"{row[0]} on rank {r}" for row, r in zip(table, ranks, strict=True))
        problem = (
            f"ranks {_format_ranks(odd)} have other parameters ({counts} compared); build the "
            "same model on all of them"
        )
        problems = [problem]
    else:
        problems = list(_values(items, table, ranks))
    if not problems:
        return []
    lines = [f"{axis} axis, ranks {_format_ranks(ranks)}:"]
    for problem in problems[:_SHOWN]:
        lines += [f"  {problem}"]
    if len(problems) > _SHOWN:
        lines.append(f"  and {len(problems) - _SHOWN} more")
    return lines


def _values(items: Sequence[_Item], table: list[list[int]], ranks: Sequence[int]) -> Iterator[str]:
    for place, item in enumerate(items, 2):
        digests = [row[place] for row in table]
        if not item.differs:
            odd = _find_outliers(digests, ranks)
            if odd:
                yield f"{item.name} {_DIFFERS}, and differs on {_format_ranks(odd)}; {item.fix}"
        elif item.name.startswith("`shared`"):
            if digests.count(0) > 1:
                yield f"{item.name} is False on {digests.count(0)} stages; {item.fix}"
        else:
            counts = Counter(one for one in digests if one)  # 0 is a constant
            alike = [r for r, one in zip(ranks, digests, strict=True) if counts[one] > 1]
            if alike:
                yield f"{item.name} {_SAME} on {_format_ranks(alike)}; {item.fix}"


def _find_outliers(values: Sequence[object], ranks: Sequence[int]) -> list[int]:
    """The ranks that do not have what most have; of a draw, what the first rank has is right."""
    usual, _ = Counter(values).most_common(1)[0]
    return [rank for rank, value in zip(ranks, values, strict=True) if value != usual]


def _format_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    if len(ranks) <= 8:
        return shown
    return f"{shown} ... {ranks[-1]} ({len(ranks)} ranks)"
