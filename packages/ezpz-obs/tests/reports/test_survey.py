import json
import math
import sys

import numpy as np
import pytest

from ezpz_obs import read_run
from ezpz_obs._report.content import attempts, metrics, notices, ranks, tiles
from ezpz_obs._report.survey import Series, StepTimes, survey

of = sys.modules["ezpz_obs._report.survey"]  # whose name in its package is the function's


def look(folder):
    return survey(read_run(folder))


def end(message, time=1_732_000_100.0):
    return {"event": "end", "time": time, "step": 3, "message": message}


@pytest.mark.parametrize(
    ("message", "age", "outcome"),
    [("closed", 0, ("good", "finished")), ("exit", 0, ("good", "finished: the script ended")),
     ("ValueError: no", 0, ("bad", "failed: ValueError: no")),
     (None, 0, ("open", "running, or killed just now: no end was written yet")),
     (None, 3600, ("bad", "killed, or stuck: no end was written, and nothing for 1 h"))],
)  # fmt: skip
def test_cause_of_end(write_run, records, message, age, outcome):
    lines = records(range(4), loss=1.0) + ([end(message)] if message else [])
    found = look(write_run(*lines))
    found.age = age
    assert found.outcome == outcome


# An attempt between the two may have ended before it had a History.
@pytest.mark.parametrize(("number", "fault"), [(10, "; the fault of n1: gone"), (11, "")])
def test_a_restart_supersedes(*, write_run, records, header, number, fault):
    begun = 1_732_000_000.0
    folder = write_run(
        header(launch_attempt="2026-a.9"),
        *records(range(10), loss=1.0),
        {"event": "end", "time": begun + 5, "step": 9, "message": "RuntimeError: rank 3 is gone"},
        header(
            attempt=1,
            time=begun + 100,
            continues=9,
            launch_attempt=f"2026-a.{number}",
            last_fault="the fault of n1: gone",
        ),
        *[{**line, "replay": True} for line in records(range(6, 10), start=begun + 100, loss=2.0)],
        *records(range(10, 20), start=begun + 100, loss=2.0),
        end("closed", begun + 120),
    )
    found = look(folder)
    assert found.records == 20
    assert found.series["loss"].mean == pytest.approx((6 * 1 + 14 * 2) / 20)
    rows = attempts(found).rows
    assert [row[4] for row in rows] == ["\N{EN DASH}", "4"]
    assert [row[3] for row in rows] == ["0 \N{EN DASH} 5", "6 \N{EN DASH} 19"]
    assert rows[0][5].endswith(f"rank 3 is gone{fault}")
    assert attempts(found).marked == {0}
    assert found.outcome[0] == "good"


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_records(write_run, records, count):
    found = look(write_run(*records(range(count), loss=0.5, odd="NaN")))
    assert found.records == count
    assert found.last_step == (count - 1 if count else None)
    assert len(metrics(found).rows) == min(count, 1) * 2
    assert metrics(found).marked == ({1} if count else set())
    assert bool(tiles(found)) == bool(count)
    found = look(write_run(*records(range(3), loss="NaN"), folder="nan"))
    assert tiles(found)[0].value == "NaN"


def test_metrics_at_different_steps(write_run, records):
    lines = []
    for record in records(range(100), loss=1.0):
        lines.append(record)
        if record["step"] % 10 == 0:
            lines.append({"step": record["step"], "time": record["time"], "eval/acc": 0.5})
    found = look(write_run(*lines))
    assert (found.series["loss"].count, found.series["eval/acc"].count) == (100, 10)
    assert found.step_times.count == 99


def test_statistics_over_ranks_are_one_metric(write_run, records):
    spread = {"loss/mean": 1.0, "loss/std": 0.1, "loss/min": 0.8, "loss/max": 1.2,
              "loss/min_rank": 0, "loss/max_rank": 3, "step_s/mean": 1.0, "step_s/std": 0.1,
              "step_s/min": 0.9, "step_s/max": 1.5, "step_s/min_rank": 1,
              "step_s/max_rank": lambda step: 2 if step % 4 else 0}  # fmt: skip
    folder = write_run(*records(range(40), loss=1.1, step_s=1.0, lr=0.1, **spread))
    found = look(folder)
    assert found.groups == {"loss": True, "step_s": True, "lr": False}
    table = ranks(found)
    assert table.rows[0][:3] == ("step_s", "rank 2 (75 %)", "rank 1 (100 %)")


def test_a_user_may_call_a_metric_mean_and_with_one_rank_there_is_no_spread(write_run, records):
    found = look(write_run(*records(range(4), **{"val/mean": 1.0, "val/max": 2.0})))
    assert found.groups == {"val/mean": False, "val/max": False}
    spread = {f"loss/{part}": 1.0 for part in ("mean", "std", "min", "max")}
    found = look(write_run(*records(range(4), loss=1.0, **spread), world_size=1))
    assert found.groups == {"loss": False}
    assert ranks(found) is None


def test_warnings_of_events_and_logs(write_run, records):
    folder = write_run(
        *records(range(4), loss=1.0),
        {"event": "warning", "time": 1_732_000_001.0, "step": 2, "message": "loss spike"},
        {"event": "checkpoint", "time": 1_732_000_002.0, "step": 3, "message": "saved", "of": 1},
    )
    (folder / "logs").mkdir()
    slow = {"time": "2024-11-19T07:06:41.5+00:00", "level": "warning", "event": "slow", "rank": 1}
    crash = {"time": "2024-11-19T07:06:50+00:00", "level": "error", "event": "uncaught", "rank": 2,
             "exception": "Traceback (most recent call last):\n  ...\nValueError: no"}  # fmt: skip
    (folder / "logs" / "rank-00001.jsonl").write_bytes(
        b'{"level":"info","event":"hello"}\n' + (json.dumps(slow) + "\n").encode() * 5
        + b"not json\n" + json.dumps({**slow, "rank": 3}).encode() + b"\n[1]\n"
    )  # fmt: skip
    (folder / "logs" / "rank-00002.jsonl").write_text(json.dumps(crash) + "\n" + '{"level":"err')
    found = look(folder)
    table = notices(found.notices)
    said = [(row[2], row[3], row[4], row[5]) for row in table.rows]
    nothing = "\N{EN DASH}"
    assert said == [
        (nothing, "warning", "loss spike", ""),
        ("1, 3", "warning", "slow", "6 \N{MULTIPLICATION SIGN}"),
        (nothing, "checkpoint", "saved of=1", ""),
        ("2", "error", "uncaught: ValueError: no", ""),
    ]


def test_many_different_warnings_are_bounded(write_run, records):
    warnings = [
        {"event": "warning", "time": 1_732_000_000.0 + n, "step": n, "message": f"n {n}"}
        for n in range(1000)
    ]
    found = look(write_run(*records(range(4), loss=1.0), *warnings)).notices
    assert (len(found.shown), found.left_out) == (400, 600)
    assert (found.shown[0].text, found.shown[-1].text) == ("n 0", "n 999")


def test_a_header_that_lacks_most_or_is_lost(write_run, records):
    folder = write_run({"ezpz_obs": 1, "time": "soon"}, *records(range(3), loss=1.0))
    found = look(folder)
    assert found.attempts[0].begun is None
    assert attempts(found).rows
    path = folder / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    found = look(folder)
    assert found.records == 3
    assert attempts(found).rows


def test_ten_thousand_metrics(write_run):
    """Of which each once took a walk over all: minutes."""
    names = [f"layer{number}/norm" for number in range(10_000)]
    lines = [{"step": step, "time": 0.0, **dict.fromkeys(names, 0.5)} for step in range(150)]
    found = look(write_run(*lines))
    assert found.groups is found.groups
    assert (len(found.groups), found.records) == (10_000, 150)
    assert len(metrics(found).rows) == 10_000
    assert max(len(block.steps) for block in found.run.blocks()) < 150, "a part of 1.5e6 numbers"


def fill(values, *, block, name="loss"):
    series = Series(name)
    steps = np.arange(len(values), dtype=np.int64)
    for start in range(0, len(values), block):
        series.add(steps[start : start + block], values[start : start + block])
    return series


@pytest.mark.parametrize("block", [1, 7, 1000, 16_384, 100_000])
@pytest.mark.parametrize("count", [1, 2, 2048, 2049, 50_000])
def test_the_statistics_are_those_of_all_values(block, count):
    if block == 1 and count > 3000:
        count = 3000
    values = np.random.default_rng(0).normal(1e5, 20.0, count)
    series = fill(values, block=block)
    assert series.count == count
    assert series.last == (count - 1, values[-1])
    assert series.min == (values.argmin(), values.min())
    assert series.max == (values.argmax(), values.max())
    assert series.mean == pytest.approx(values.mean(), rel=1e-14)
    assert series.std == pytest.approx(values.std(), rel=1e-9)
    table = series.buckets
    assert table.shape[1] <= of.BUCKETS
    width = series.width
    starts = np.arange(0, count, width)
    assert table[of.SIZE].sum() == count
    np.testing.assert_allclose(
        table[of.MEAN], np.add.reduceat(values, starts) / np.diff([*starts, count])
    )
    np.testing.assert_array_equal(table[of.LEAST], np.minimum.reduceat(values, starts))
    np.testing.assert_array_equal(table[of.GREATEST], np.maximum.reduceat(values, starts))
    np.testing.assert_array_equal(table[of.FROM], starts)
    np.testing.assert_array_equal(table[of.TO], np.append(starts[1:] - 1, count - 1))


def test_what_is_no_number_is_counted_and_hides_nothing():
    values = np.ones(10_000)
    values[5000] = math.nan
    values[6000:6002] = math.inf
    series = fill(values, block=4096)
    assert (series.nan, series.infinite, series.first_odd) == (1, 2, 5000)
    assert (series.mean, series.std, series.max) == (1.0, 0.0, (0, 1.0))
    table = series.curve(600)
    assert table[of.SIZE].sum() - table[of.COUNT].sum() == 3
    assert np.isfinite(table[of.MEAN]).all()


def test_nothing_but_nan_the_largest_doubles_and_ranks():
    series = fill(np.full(5000, math.nan), block=5000)
    assert (series.mean, series.std, series.min, series.max) == (None, None, None, None)
    assert np.isnan(series.buckets[of.MEAN]).all()
    assert math.isnan(series.last[1])
    series = fill(np.full(5000, 1.7e308), block=5000)
    assert series.mean == pytest.approx(1.7e308)
    assert np.isfinite(series.buckets[of.MEAN]).all()
    series = fill(np.array([3.0, 3.0, 1.0]), block=3, name="loss/max_rank")
    assert series.ranks == {3: 2, 1: 1}
    assert fill(np.array([3.0]), block=1).ranks is None


def feed(steps, times, begins=(0.0,), block=None):
    found = StepTimes(list(begins))
    steps, times = np.array(steps, np.int64), np.array(times, np.float64)
    for start in range(0, len(steps), block or len(steps)):
        end = start + (block or len(steps))
        found.add(steps[start:end], times[start:end])
    return found


@pytest.mark.parametrize("block", [None, 1, 7])
def test_quantiles_are_within_a_percent(block):
    took = np.random.default_rng(0).lognormal(-2, 0.5, 500)
    found = feed(np.arange(501), 10 + np.concatenate([[0], np.cumsum(took)]), block=block)
    assert found.count == 500
    for part in (0.5, 0.95):
        assert found.quantile(part) == pytest.approx(np.quantile(took, part), rel=0.02)


def test_steps_that_are_recorded_twice_or_seldom():
    found = feed([0, 1, 1, 2], [0.0, 1.0, 1.5, 2.0])
    assert (found.count, found.quantile(1.0)) == (2, pytest.approx(1.0, rel=0.02))
    assert feed([0, 10, 20], [0.0, 5.0, 10.0]).quantile(0.5) == pytest.approx(0.5, rel=0.02)
    found = StepTimes([])
    assert (found.count, found.quantile(0.5)) == (0, None)


def test_a_restart_is_no_step():
    found = feed([0, 1, 1, 2, 3], [1.0, 2.0, 503.0, 504.0, 505.0], begins=(0.0, 500.0))
    assert found.count == 3
    assert found.quantile(1.0) < 2
    reached = [(one.first_step, one.last_step) for one in found.attempts]
    assert reached == [(0, 1), (1, 3)]
