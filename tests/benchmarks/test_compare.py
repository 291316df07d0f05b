"""What is worse beyond its own noise, and what is not."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import side_by_side
import table
from compare import FLOOR, FLOOR_OF_TIMES, changes, kind
from paired import Spread, alone, beside

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def spread(median, quarter=0.0, count=20):
    return Spread(median, median - quarter, median + quarter, median - 2 * quarter, count)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (spread(1.0), spread(1.04), "same"),  # within what runs differ
        (spread(1.0), spread(1.06), "worse"),
        (spread(1.06), spread(1.0), "better"),
        (spread(1.0, 0.2), spread(1.2, 0.2), "same"),  # within the noise
        (spread(1.0, 0.2), spread(1.4, 0.2), "same"),
        (spread(1.0, 0.2), spread(1.6, 0.2), "worse"),
        (spread(1.0, 0.2, 2000), spread(1.2, 0.2, 2000), "worse"),  # many samples know better
        (spread(0.0), spread(0.0), "same"),
        (spread(0.0), spread(1.0), "worse"),
    ],
)
def test_kinds(before, after, said):
    assert kind(before, after, FLOOR) == said


@pytest.mark.parametrize("count", [2, 3, 5, 6, 9])
def test_equal_machines_rarely_raise_an_alarm(count):
    draw = random.Random(8)
    ones = [Spread.of([draw.gauss(1.0, 0.3) for _ in range(count)]) for _ in range(10_000)]
    alarms = sum(kind(*pair, FLOOR) == "worse" for pair in zip(ones[::2], ones[1::2], strict=True))
    assert alarms <= 5000 * 0.003


def test_ratios_are_compared_across_machines_and_times_are_not():
    def rows(slow):
        return [
            beside("s/w/p", "w", "ms", ([1.0 * slow] * 3, [2.0 * slow] * 3), "p"),
            alone("s/alone", "w", "ms", [slow] * 3),
        ]

    there = changes(rows(1.0), rows(9.0), same_machine=False)
    assert [change.kind for change in there] == ["same", "machine"]
    here = changes(rows(1.0), rows(9.0), same_machine=True)
    assert [change.kind for change in here] == ["same", "worse"]


RISE = 1 + (FLOOR + FLOOR_OF_TIMES) / 2


@pytest.mark.parametrize(
    ("unit", "before", "after", "count", "said"),
    [
        # a time alone may rise further than memory or a count
        ("ms", 100.0, 100 * RISE, 3, "same"),
        *((unit, 100.0, 100 * RISE, 3, "worse") for unit in ("MB", "")),
        # a count or memory measured once is judged, and a time is not
        *((unit, 4.0, 5.0, 1, "worse") for unit in ("MB", "")),
        *((unit, 4.0, 5.0, 1, "once") for unit in ("ms", "s")),
        # memory measured once may rise by a tenth
        ("MB", 83.9, 88.3, 1, "same"),
        ("MB", 83.9, 100.0, 1, "worse"),
    ],
)
def test_what_may_rise(unit, before, after, count, said):
    rows = [alone("s/w", "w", unit, [figure] * count) for figure in (before, after)]
    assert [change.kind for change in changes(rows[:1], rows[1:], True)] == [said]
    if count == 1 and said != "same":
        rows = [beside("s/w/p", "w", unit, ([each], [7.0]), "p") for each in (before, after)]
        assert [change.kind for change in changes(rows[:1], rows[1:], True)] == [said]


def compare(*words):
    script = str(BENCHMARKS / "compare.py")
    return subprocess.run(
        [sys.executable, script, *map(str, words)], capture_output=True, text=True, check=False
    )


def test_the_command(tmp_path, recorded):
    document, rows = table.read(recorded)
    same = compare(recorded, recorded)
    assert same.returncode == 0, same.stderr
    assert "within the noise" in same.stdout
    key = "nodelists/expand-plain/python-hostlist"
    (slow,) = (row for row in rows if row.key == key)
    slower = beside(key, slow.what, slow.unit, ([3.0] * 9, [2.0] * 9), slow.peer)
    others = [row for row in rows if row.key != key and not row.key.startswith("dist/")]
    failed = side_by_side.failed("dist", "it broke")
    table.write(str(tmp_path / "b.json"), [*others, slower, failed])
    worse = compare(recorded, tmp_path / "b.json")
    assert worse.returncode == 1
    assert f"worse  {key}" in worse.stdout
    assert f"MISSED {key}" in worse.stdout
    # A section that failed is no good result.
    assert "gone   dist/barrier/torch: no such row" in worse.stdout
    assert "FAILED dist/section: it broke" in worse.stdout
    # What else differs is told, too.
    assert f"between load: {document['load']} -> None" in worse.stdout
    (tmp_path / "b.json").write_text("no")
    done = compare(recorded, tmp_path / "b.json")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "b.json: not a result of bench:all" in done.stderr
