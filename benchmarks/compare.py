"""What became slower between two results: ``scripts/bench --compare A.json B.json``.

A figure is worse when it rose by more than five standard errors of the difference of the medians
(each from the quartiles and the number of samples in its file, which of few samples are rough, so
that eight or more are asked for), and by more than runs differ on one machine anyway: 5 % of a
ratio, of memory (10 % where it was measured once) or of a count, 50 % of a time that has nothing
beside it.
"""

import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fire
from paired import Row, Spread
from table import ResultError, read

FLOOR = 0.05
FLOOR_OF_TIMES = 0.5
"""Of a time alone: this machine was seen to change its speed by so much within minutes."""
FLOOR_OF_MEMORY_ONCE = 0.1
"""Of memory that was measured once."""
_ERRORS = ((6, 5), (3, 8), (0, 15))
"""From so many samples on so many standard errors: of a thousand figures that stayed the same, one
or two are taken for worse."""
_TIMES = frozenset({"s", "ms", "us", "ns", "min"})


@dataclass(frozen=True)
class Change:
    """A figure in two results: the ratio to a peer where there is one, else our own.

    Attributes:
        key: Of the row.
        before: In the first result.
        after: In the second.
        kind: worse, better, same, once (one sample of a time has no spread), or machine (times of
            two machines are not compared).
        note: What else changed: the peer's version.
    """

    key: str
    before: Spread
    after: Spread
    kind: str
    note: str = ""


def standard_error(spread: Spread) -> float:
    """Return that of the median: of a normal distribution, from the distance of its quartiles."""
    return 1.2533 * (spread.high - spread.low) / 1.349 / math.sqrt(spread.count)


def changes(before: Sequence[Row], after: Sequence[Row], same_machine: bool) -> list[Change]:
    """Return what became of each figure that both results have."""
    then = {row.key: row for row in before}
    found = []
    for row in after:
        earlier = then.get(row.key)
        if earlier is None or earlier.ours is None or row.ours is None:
            continue
        if earlier.ratio is not None and row.ratio is not None:
            one, other, floor = earlier.ratio, row.ratio, FLOOR
        else:
            one, other = earlier.ours, row.ours
            floor = FLOOR_OF_TIMES if row.unit in _TIMES else FLOOR
        is_time = row.unit in _TIMES
        note = "" if row.peer == earlier.peer else f"  ({earlier.peer} -> {row.peer})"
        if is_time and row.ratio is None and not same_machine:
            said = "machine"
        elif is_time and min(one.count, other.count) < 2:
            said = "once"
        else:
            if row.unit == "MB" and min(one.count, other.count) < 2:
                floor = FLOOR_OF_MEMORY_ONCE
            said = kind(one, other, floor)
        found.append(Change(row.key, one, other, said, note))
    return found


def kind(before: Spread, after: Spread, floor: float) -> str:
    """Say what became of one figure; a single sample has no error (memory, a count)."""
    fewest = min(before.count, after.count)
    errors = next(errors for count, errors in _ERRORS if fewest >= count)
    noise = errors * math.hypot(standard_error(before), standard_error(after))
    rise = after.median - before.median
    if rise > max(noise, floor * before.median):
        return "worse"
    return "better" if -rise > max(noise, floor * after.median) else "same"


def lines(
    one: Mapping[str, Any], rows: Sequence[Row], other: Mapping[str, Any], later: Sequence[Row]
) -> Iterator[str]:
    """Return what changed, line by line: between what, how, what is gone, and the goals."""
    for name in sorted(one["machine"].keys() | other["machine"].keys()):
        then, now = one["machine"].get(name), other["machine"].get(name)
        if then != now:
            yield f"between {name}: {then} -> {now}"
    if one.get("load") != other.get("load"):  # a busy machine does not change both sides alike
        yield f"between load: {one.get('load')} -> {other.get('load')}"
    found = changes(rows, later, same_machine(one, other))
    for kind_ in ("worse", "better", "once"):
        yield from (_line(change) for change in found if change.kind == kind_)
    yield from _gone(rows, later, {change.key for change in found})
    held = {field["key"] for field in one["rows"] if field["holds"]}
    for field in other["rows"]:
        if field["holds"] is False and field["key"] in held:
            yield f"MISSED {field['key']}: its goal held before"
    counts = {name: sum(change.kind == name for change in found) for name in _SAID}
    yield ", ".join(f"{counts[name]} {said}" for name, said in _SAID.items() if counts[name])


def _line(change: Change) -> str:
    then, now = change.before.median, change.after.median
    times = f"  {now / then:.2f} x" if then else ""
    return f"{change.kind:<7}{change.key:<52}{then:>10.4g} ->{now:>10.4g}{times}{change.note}"


def _gone(rows: Sequence[Row], later: Sequence[Row], kept: Collection[str]) -> Iterator[str]:
    there = {row.key: row for row in later}
    for row in rows:
        if row.ours is not None and row.key not in kept:
            why = there[row.key].missing if row.key in there else "no such row"
            yield f"gone   {row.key}: {why}"
    for row in later:
        if row.key.endswith("/section"):
            yield f"FAILED {row.key}: {row.missing}"


def same_machine(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether times of two results may be compared."""
    return all(one["machine"][name] == other["machine"][name] for name in ("processor", "cores"))


def main(before: str, after: str) -> None:
    """Print what changed; exit status 1 if anything is worse or a section failed, 2 for no result.

    Args:
        before: A file of ``bench:all --json``.
        after: A later one.
    """
    try:
        (one, rows), (other, later) = read(before), read(after)
    except ResultError as error:
        print(f"compare: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    found = list(lines(one, rows, other, later))
    print("\n".join(found))
    if any(line.startswith(("worse", "FAILED")) for line in found):
        raise SystemExit(1)


_SAID = {
    "worse": "worse",
    "better": "better",
    "same": "within the noise",
    "once": "times measured once, not judged",
    "machine": "times of another machine, not judged",
}

if __name__ == "__main__":
    fire.Fire(main)
