import math
import os

import numpy as np
import pytest

from ezpz_obs import read_run
from ezpz_obs._report.series import Series, smooth
from ezpz_obs._report.summary import (
    describe_end,
    make_facts,
    make_metric_table,
    make_notice_table,
    make_rank_table,
    make_tables,
    make_tiles,
    summarize_run,
)


def summarize(folder):
    return summarize_run(read_run(folder), "run")


def find_table(summary, title):
    return next(table for table in make_tables(summary) if table.title == title)


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
    assert describe_end(message, age) == outcome
    folder = write_run(*records(range(4), loss=1.0), *([end(message)] if message else []))
    os.utime(folder / "metrics.jsonl", (0, read_run(folder).path.stat().st_mtime - age))
    assert summarize(folder).outcome == outcome


def test_a_restart_supersedes(write_run, records, header):
    began = 1_732_000_000.0
    folder = write_run(
        header(),
        *records(range(10), loss=1.0),
        {"event": "end", "time": began + 5, "step": 9, "message": "RuntimeError: rank 3 is gone"},
        header(attempt=1, time=began + 100, continues=9),
        *[{**line, "replay": True} for line in records(range(6, 10), start=began + 100, loss=2.0)],
        *records(range(10, 20), start=began + 100, loss=2.0),
        end("closed", began + 120),
    )
    summary = summarize(folder)
    assert summary.series["loss"].mean == pytest.approx((6 * 1 + 14 * 2) / 20)
    table = find_table(summary, "Attempts")
    assert [row[3] for row in table.rows] == ["0 \N{EN DASH} 5", "6 \N{EN DASH} 19"]
    assert [row[4] for row in table.rows] == ["failed: RuntimeError: rank 3 is gone", "finished"]
    assert table.marked == {0}
    assert make_facts(summary) == [
        "20 records, last step 19", "25 s", "4 ranks", "polaris", "1 restart",
    ]  # fmt: skip


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_records(write_run, records, count):
    summary = summarize(write_run(*records(range(count), loss=0.5, odd="NaN")))
    assert len(summary.times.steps) == count
    table = make_metric_table(summary)
    assert len(table.rows) == min(count, 1) * 2
    assert table.marked == ({1} if count else set())
    assert bool(make_tiles(summary)) == bool(count)
    summary = summarize(write_run(*records(range(3), loss="NaN"), folder="nan"))
    assert make_tiles(summary)[0].value == "NaN"


def test_metrics_at_different_steps(write_run, records):
    lines = []
    for record in records(range(100), loss=1.0):
        lines.append(record)
        if record["step"] % 10 == 0:
            lines.append({"step": record["step"], "time": record["time"], "eval/acc": 0.5})
    summary = summarize(write_run(*lines))
    assert [len(summary.series[name].values) for name in ("loss", "eval/acc")] == [100, 10]
    assert make_tiles(summary)[1].value == "500 ms"


def test_statistics_over_ranks_are_one_metric(write_run, records):
    spread = {"loss/mean": 1.0, "loss/std": 0.1, "loss/min": 0.8, "loss/max": 1.2,
              "loss/min_rank": 0, "loss/max_rank": 3, "step_s/mean": 1.0, "step_s/std": 0.1,
              "step_s/min": 0.9, "step_s/max": 1.5, "step_s/min_rank": 1,
              "step_s/max_rank": lambda step: 2 if step % 4 else 0}  # fmt: skip
    folder = write_run(*records(range(40), loss=1.1, step_s=1.0, lr=0.1, **spread))
    summary = summarize(folder)
    assert summary.groups == {"loss": True, "step_s": True, "lr": False}
    row = make_rank_table(summary).rows[0]
    assert row[:3] == ("step_s", "rank 2 (75 %)", "rank 1 (100 %)")


def test_a_user_may_call_a_metric_mean_and_with_one_rank_there_is_no_spread(write_run, records):
    summary = summarize(write_run(*records(range(4), **{"val/mean": 1.0, "val/max": 2.0})))
    assert summary.groups == {"val/mean": False, "val/max": False}
    spread = {f"loss/{part}": 1.0 for part in ("mean", "std", "min", "max")}
    summary = summarize(write_run(*records(range(4), loss=1.0, **spread), world_size=1))
    assert summary.groups == {"loss": False}
    assert make_rank_table(summary).rows == []


def test_warnings_and_events(write_run, records):
    slow = {"event": "warning", "time": 1_732_000_001.0, "step": 2, "message": "slow"}
    saved = {"event": "checkpoint", "time": 1_732_000_002.0, "step": 3, "message": "saved", "of": 1}
    folder = write_run(*records(range(4), loss=1.0), slow, slow, saved)
    table = make_notice_table(summarize(folder))
    assert [row[1:] for row in table.rows] == [
        ("2", "warning", "slow", "2 \N{MULTIPLICATION SIGN}"),
        ("3", "checkpoint", "saved of=1", ""),
    ]
    assert table.marked == {0}


def test_many_different_warnings_are_bounded(write_run, records):
    warnings = [
        {"event": "warning", "time": 1_732_000_000.0 + n, "step": n, "message": f"n {n}"}
        for n in range(1000)
    ]
    rows = make_notice_table(summarize(write_run(*records(range(4), loss=1.0), *warnings))).rows
    assert len(rows) == 201
    assert rows[-1][3] == "800 later ones are left out"


def test_a_header_that_lacks_most_or_is_lost(write_run, records):
    folder = write_run({"ezpz_obs": 1, "time": "soon"}, *records(range(3), loss=1.0))
    assert summarize(folder).attempts[0].began is None
    path = folder / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    summary = summarize(folder)
    assert len(summary.times.steps) == 3
    assert find_table(summary, "Attempts").rows


def test_ten_thousand_metrics(write_run):
    """Of which each once took a walk over all: minutes."""
    names = [f"layer{number}/norm" for number in range(10_000)]
    lines = [{"step": step, "time": 0.0, **dict.fromkeys(names, 0.5)} for step in range(150)]
    summary = summarize(write_run(*lines))
    assert len(make_metric_table(summary).rows) == 10_000
    assert max(len(block.steps) for block in summary.run.blocks()) < 150, "a part of 1.5e6 numbers"


def make(values):
    return Series(np.arange(len(values)), np.array(values, np.float64))


@pytest.mark.parametrize("count", [1, 2, 400, 401, 50_000])
def test_a_curve_has_the_means_and_extremes_of_all_values(count):
    values = np.random.default_rng(0).normal(1e5, 20.0, count)
    curve = make(values).make_curve()
    assert len(curve.steps) <= 400
    starts = np.arange(0, count, math.ceil(count / 400))
    means = np.add.reduceat(values, starts) / np.diff([*starts, count])
    np.testing.assert_allclose(curve.mean, means)
    np.testing.assert_array_equal(curve.least, np.minimum.reduceat(values, starts))
    np.testing.assert_array_equal(curve.greatest, np.maximum.reduceat(values, starts))


def test_what_is_no_number_hides_nothing():
    values = np.ones(10_000)
    values[5000] = math.nan
    values[6000:6002] = math.inf
    assert make(values).mean == 1.0
    assert np.isfinite(make(values).make_curve().mean).all()
    assert make([math.nan] * 50).mean is None
    assert np.isnan(make([math.nan] * 50).make_curve().mean).all()
    assert np.isfinite(make([1.7e308] * 5000).make_curve().mean).all()


@pytest.mark.parametrize(
    ("values", "counts"),
    [([0, 0, 1, 1, 2], True), ([0, 64, 128], True), ([1, 1, 1], False), ([2, 1, 0], False),
     ([0, 1, 3], False), ([0.5, 1.5, 2.5], False), ([0, math.nan, 1], False), ([7], False)],
)  # fmt: skip
def test_what_only_counts_is_no_curve(values, counts):
    assert make(values).is_counter == counts


def test_noise_goes_and_steps_corners_and_gaps_stay():
    course = np.linspace(5, 1, 400)
    noise = np.random.default_rng(0).normal(0, 0.3, 400)
    assert np.abs(smooth(course + noise) - course).mean() < 0.5 * np.abs(noise).mean()
    for clean in (1 / np.arange(1.0, 401), np.minimum(np.arange(400.0), 90), np.arange(400) // 50):
        np.testing.assert_array_equal(smooth(clean), clean)
    gap = np.where(np.arange(400) // 10 == 20, np.nan, noise)
    np.testing.assert_array_equal(np.isnan(smooth(gap)), np.isnan(gap))
