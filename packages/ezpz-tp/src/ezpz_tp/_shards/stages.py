"""Which pipeline stage holds a tensor: told from its name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from ezpz_tp._errors import DegreeError, ParallelError

from .source import Entry, parameter_of

StageOf = Callable[[str], int | Iterable[int]]
"""From a parameter's name to the stage that holds it, or to all those that do."""

_LAYER = re.compile(r"^(?:|.*?\.)(?:layers?|h|blocks)\.(\d+)\.")
_FIRST = re.compile(r"emb|\bwte\b|\bwpe\b", re.IGNORECASE)
_LAST = re.compile(r"norm|ln_f|head|output|logits|classifier|score", re.IGNORECASE)


def stages_of(
    entries: Mapping[str, Entry], pp: int, stage_of: StageOf | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the pipeline stages of every tensor.

    Layers are known by their number (``layers.N.``, ``h.N.``, ``blocks.N.``) and are shared out
    evenly, one more to the first stages where they do not divide. What comes before the first
    layer, and embeddings, are on the first stage; what comes after the last, and norms and heads,
    on the last. An embedding of the vocabulary is on both if the last has no head of its shape:
    it is tied. An optimizer's tensors are with their parameter.

    Args:
        entries: All tensors, in the model's order.
        pp: Number of stages.
        stage_of: Instead of all this, for parameters' names.

    Raises:
        DegreeError: There are fewer layers than stages, or ``stage_of`` gives no stage.
        ParallelError: There are two rows of layers, which could be divided in many ways.
    """
    names = {parameter_of(name)[0]: None for name in entries}
    if stage_of is not None:
        found = {name: _asked(name, stage_of(name), pp) for name in names}
    elif pp == 1:
        found = dict.fromkeys(names, (0,))
    else:
        found = _by_name(entries, list(names), pp)
    return {name: found[parameter_of(name)[0]] for name in entries}


def _by_name(entries: Mapping[str, Entry], names: list[str], pp: int) -> dict[str, tuple[int, ...]]:
    layers = {name: match for name in names if (match := _LAYER.match(name))}
    rows = {name[: match.start(1)] for name, match in layers.items()}
    if len(rows) > 1:
        raise ParallelError(
            f"layers of {len(rows)} kinds, {', '.join(sorted(rows))}: expected one row of layers "
            f"to divide over {pp} stages; give stage_of="
        )
    numbers = sorted({int(match[1]) for match in layers.values()})
    if len(numbers) < pp:
        raise DegreeError(
            f"{len(numbers)} layers (names with layers.N., h.N. or blocks.N.) for {pp} pipeline "
            "stages; expected at least as many: lower pp, or give stage_of="
        )
    each, more = divmod(len(numbers), pp)
    stage_by_number = {
        number: (at // (each + 1) if at < more * (each + 1) else (at - more) // each,)
        for at, number in enumerate(numbers)
    }
    first = min(names.index(name) for name in layers)
    found: dict[str, tuple[int, ...]] = {}
    for at, name in enumerate(names):
        if name in layers:
            found[name] = stage_by_number[int(layers[name][1])]
        elif _FIRST.search(name):
            found[name] = (0,)
        else:
            found[name] = (pp - 1,) if at > first or _LAST.search(name) else (0,)
    last = {entries[name].shard for name in names if found[name] == (pp - 1,) and name in entries}
    for name in names:
        entry = entries.get(name)
        if entry and found[name] == (0,) and entry.shard.padded and entry.shard not in last:
            found[name] = (0, pp - 1)
    return found


def _asked(name: str, stages: int | Iterable[int], pp: int) -> tuple[int, ...]:
    found = (stages,) if isinstance(stages, int) else tuple(sorted(set(stages)))
    if not found or not all(0 <= stage < pp for stage in found):
        raise DegreeError(
            f"stage_of({name!r}) gives {stages!r}; expected one or more of 0 to {pp - 1}"
        )
    return found
