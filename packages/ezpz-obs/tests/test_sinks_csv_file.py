import csv
import itertools
import math
import shutil

import pytest
from waiting import until

from ezpz_obs import History, SinkError, replay
from ezpz_obs._sinks.csv import CsvSink


def rows(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file, strict=True))


def write(folder, *batches):
    """Record steps, and hand them to a sink in these batches."""
    with History(folder) as history:
        for metrics in itertools.chain(*batches):
            history.record(metrics)
    records = iter(History.read(folder))
    sink = CsvSink()
    sink.open({}, folder)
    for batch in batches:
        sink.write(list(itertools.islice(records, len(batch))))
    sink.close()


def test_pandas_reads_what_a_run_recorded(tmp_path):
    pandas = pytest.importorskip("pandas")
    with History(tmp_path, sinks=["csv"], summary=False) as history:
        for step in range(1000):
            history.record({"loss": 1 / (step + 1), "flag": step % 2 == 0, "big": 1 << 70})
        history.record({"loss": math.nan, "flag": True, "big": 10**400}, step=2000)
    table = pandas.read_csv(tmp_path / "metrics.csv")
    assert list(table.columns) == ["step", "time", "loss", "flag", "big"]
    assert table["step"].tolist() == [*range(1000), 2000]
    assert table["loss"][:1000].tolist() == [1 / (step + 1) for step in range(1000)]
    assert math.isnan(table["loss"][1000])
    assert table["flag"].dtype == bool
    assert table["big"][0] == 2.0**70
    assert table["big"][1000] == math.inf


def test_a_metric_that_comes_late_gets_a_column(tmp_path):
    write(tmp_path, [{"a": 1}, {"a": 2}], [{"b": 5, "a": 3}, {"c": 6}], [{"a": 4}])
    found = rows(tmp_path)
    assert [row["a"] for row in found] == ["1", "2", "3", "", "4"]
    assert [row["b"] for row in found] == ["", "", "5", "", ""]
    assert [row["c"] for row in found] == ["", "", "", "6", ""]
    assert list(found[0]) == ["step", "time", "a", "b", "c"]


def test_a_new_metric_at_each_step_loses_nothing(tmp_path):
    write(tmp_path, *([{f"m{step}": step}] for step in range(300)))
    found = rows(tmp_path)
    assert [int(row[f"m{step}"]) for step, row in enumerate(found)] == list(range(300))


def test_names_with_commas_quotes_and_newlines(tmp_path):
    hostile = ['a,b', '"', "two\nlines", "=1+1", "<script>", "é" * 10_000]  # fmt: skip
    write(tmp_path, [{hostile[0]: 1}], [dict.fromkeys(hostile, 2)])
    found = rows(tmp_path)
    assert [found[1][name] for name in hostile] == ["2"] * len(hostile)
    assert found[0]["a,b"] == "1"


def test_a_restarted_run_goes_on_and_the_later_rows_win(tmp_path):
    with History(tmp_path, sinks=["csv"], summary=False) as history:
        for step in range(10):
            history.record({"loss": step})
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("10,1732.5,1")  # torn
    with History(tmp_path, sinks=["csv"], summary=False) as history:
        for step in range(7, 12):
            history.record({"loss": -step, "more": 1}, step=step)
    found = rows(tmp_path)
    assert list(found[0]) == ["step", "time", "loss", "more"]
    assert [int(row["step"]) for row in found] == list(range(12))
    assert [int(row["loss"]) for row in found] == [*range(7), *range(-7, -12, -1)]


def test_another_table_is_left_alone_and_a_run_without_a_folder_is_told(tmp_path, warned):
    (tmp_path / "metrics.csv").write_text("name,value\na,1\n")
    with pytest.raises(SinkError, match=r"has the columns \['name', 'value'\]"):
        write(tmp_path, [{"a": 1}])
    assert (tmp_path / "metrics.csv").read_text() == "name,value\na,1\n"
    with History(sinks=["csv"]) as history:
        history.record({"loss": 1})
    assert "expected History(outdir=...)" in warned()[0]


def test_a_folder_that_is_removed_is_said(tmp_path, warned):
    with History(tmp_path / "run", sinks=["csv"], summary=False) as history:
        history.record({"loss": 1})
        until((tmp_path / "run" / "metrics.csv").exists)
        shutil.rmtree(tmp_path / "run")
        history.record({"loss": 2})
    said = "; ".join(warned())
    assert "metrics.csv was removed while it was written" in said
    assert "ezpz-obs replay" in said


def test_a_replay_makes_it_anew(tmp_path):
    with History(tmp_path, summary=False) as history:
        for step in range(2500):
            history.record({"loss": step})
    (tmp_path / "metrics.csv").write_text("step,time,loss\n0,1.0,-1\n9000,1.0,-1\n")
    assert replay(tmp_path, "csv") == 2500
    assert [int(row["loss"]) for row in rows(tmp_path)] == list(range(2500))


def test_a_full_disk(tmp_path, python):
    with History(tmp_path) as history:
        for step in range(1000):
            history.record({"loss": step})
    done = python(
        """
        import logging, resource; logging.basicConfig(format="%(message)s")
        from ezpz_obs import History
        from ezpz_obs._sinks import Feeder, make_sinks
        from pathlib import Path
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        feeder = Feeder(make_sinks(["csv"])[0], {}, Path())
        for record in History.read("."): feeder.put(record)
        feeder.close()
        """
    )
    first, last = done.stderr.splitlines()
    assert "sink csv failed to write: OSError: [Errno 27] File too large" in first
    assert "ezpz-obs replay" in last
    assert not list(tmp_path.glob("*.new"))
