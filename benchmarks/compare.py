"""What became slower between two results: ``scripts/bench --compare A.json B.json``.

A figure is worse when it rose by more than five standard errors of the difference of the medians
(each from the quartiles and the number of samples in its file, which of few samples are rough), and
by more than runs differ on one machine anyway: 5 % of a ratio, of memory or of a count, 50 % of a
time that has nothing beside it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import fire
from paired import Row, Spread
from table import ResultError, read

FLOOR = 0.05
FLOOR_OF_TIMES = 0.5
"""Of a time alone: this machine was seen to change its speed by so much within minutes."""
_ERRORS = 5
"""With five samples a side, 7 of 1000 figures that stayed the same are taken for worse."""
_TIMES = frozenset({"s", "ms", "us", "ns", "min"})


@dataclass(frozen=True)
class Change:
    """A figure in two results: the ratio to a peer where there is one, else our own.

    Attributes:
        key: Of the row.
        before: In the first result.
        after: In the second.
        kind: worse, better, same, once (one sample has no spread), or machine (times of two
            machines are not compared).
    """

    key: str
    before: Spread
    after: Spread
    kind: str


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
        alone = row.ratio is None and not same_machine
        found.append(Change(row.key, one, other, "machine" if alone else kind(one, other, floor)))
    return found


def kind(before: Spread, after: Spread, floor: float) -> str:
    """Say what became of one figure."""
    if min(before.count, after.count) < 2:
        return "once"
    noise = _ERRORS * math.hypot(standard_error(before), standard_error(after))
    rise = after.median - before.median
    if rise > max(noise, floor * before.median):
        return "worse"
    return "better" if -rise > max(noise, floor * after.median) else "same"


def main(before: str, after: str) -> None:
    """Print what changed; exit status 1 if anything is worse.

    Args:
        before: A file of ``bench:all --json``.
        after: A later one.
    """
    try:
        (one, rows), (other, later) = read(before), read(after)
    except ResultError as error:
        raise SystemExit(f"compare: {error}") from None
    same = {name: one["machine"][name] == other["machine"][name] for name in ("processor", "cores")}
    found = changes(rows, later, all(same.values()))
    for name in ("worse", "better"):
        for change in found:
            if change.kind == name:
                then, now = change.before.median, change.after.median
                print(f"{name:<7}{change.key:<52}{then:>10.4g} ->{now:>10.4g}  {now / then:.2f} x")
    for row in rows:
        if row.ours is not None and row.key not in {change.key for change in found}:
            print(f"gone   {row.key}")
    held = {field["key"] for field in one["rows"] if field["holds"]}
    for field in other["rows"]:
        if field["holds"] is False and field["key"] in held:
            print(f"MISSED {field['key']}: its goal held before")
    counts = {name: sum(change.kind == name for change in found) for name in _SAID}
    print(", ".join(f"{counts[name]} {said}" for name, said in _SAID.items() if counts[name]))
    if counts["worse"]:
        raise SystemExit(1)


_SAID = {
    "worse": "worse",
    "better": "better",
    "same": "within the noise",
    "once": "measured once, not judged",
    "machine": "times of another machine, not judged",
}

if __name__ == "__main__":
    fire.Fire(main)
