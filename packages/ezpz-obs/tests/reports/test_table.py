"""A run's records as a table: files for other programs, arrays for notebooks."""

import csv
import math

import numpy as np
import pyarrow.parquet as pq
import pytest

from ezpz_obs import History, ReportError, dataset_of, export, read_run

BIG = 1 << 80


@pytest.fixture
def run(tmp_path):
    with History(tmp_path / "run") as history:
        history.record({"loss": 0.1 + 0.2, "n": 1 << 60, "ok": True, 'a,"b"\n': 1.5, "big": BIG})
        history.record({"loss": math.nan, "n": 2, "ok": False})
        history.record({"loss": 7.0, "once": 1})
    with History(tmp_path / "run") as history:  # a later attempt, which wins
        history.record({"loss": -math.inf, "late": 3, "big": 7}, step=2)
    return tmp_path / "run"


def test_csv(run, tmp_path):
    assert export(run, csv=tmp_path / "run.csv") == 3
    with open(tmp_path / "run.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["step", "time", "loss", "n", "ok", 'a,"b"\n', "big", "late"]
    assert rows[1][2:] == [repr(0.1 + 0.2), str(1 << 60), "True", "1.5", str(BIG), ""]
    assert rows[2][2:] == ["nan", "2", "False", "", "", ""]
    assert rows[3][2:] == ["-inf", "", "", "", "7", "3"]
    assert float(rows[1][1]) == next(iter(read_run(run).records()))["time"]


def test_parquet(run, tmp_path):
    assert export(read_run(run), parquet=tmp_path / "run.parquet") == 3
    table = pq.read_table(tmp_path / "run.parquet")
    found = table.to_pydict()
    assert found["step"] == [0, 1, 2]
    assert found["n"] == [float(1 << 60), 2.0, None]
    assert found["ok"] == [1.0, 0.0, None]
    assert found["late"] == [None, None, 3.0]
    assert found["big"] == [float(BIG), None, 7.0]
    assert math.isnan(found["loss"][1])
    assert found["loss"][2] == -math.inf


def test_a_run_longer_than_a_batch(write_run, records, tmp_path):
    folder = write_run(*records(range(40_000), loss=lambda step: step / 7))
    assert export(folder, parquet=tmp_path / "x.parquet") == 40_000
    found = pq.read_table(tmp_path / "x.parquet").to_pydict()
    assert found["loss"] == [step / 7 for step in range(40_000)]


def test_no_records_and_numbers_of_any_size(write_run, tmp_path):
    out = {"csv": tmp_path / "x.csv", "parquet": tmp_path / "x.parquet"}
    assert export(write_run(), **out) == 0
    assert out["csv"].read_text().strip() == "step,time"
    assert pq.read_table(out["parquet"]).num_rows == 0
    with History(tmp_path / "big") as history:
        history.record({"huge": 10**400, "mixed": 1}, step=1 << 62)
        history.record({"huge": 0.5, "mixed": 0.5})
    export(tmp_path / "big", **out)
    found = pq.read_table(out["parquet"]).to_pydict()
    assert found["step"] == [1 << 62, (1 << 62) + 1]
    assert found["huge"] == [math.inf, 0.5]
    assert found["mixed"] == [1.0, 0.5]


def test_what_fails_leaves_the_old_file(run, tmp_path):
    for where, kind, message in (
        ({}, ReportError, "expected csv=FILE"), ({"csv": tmp_path}, ReportError, "is a folder"),
        ({"csv": run / "metrics.jsonl"}, ReportError, "the run itself"),
        ({"csv": tmp_path / "none" / "x.csv"}, FileNotFoundError, str(tmp_path / "none" / "x.csv")),
    ):  # fmt: skip
        with pytest.raises(kind, match=message):
            export(run, **where)
    target = tmp_path / "x.csv"
    target.write_text("old")
    (run / "metrics.jsonl").write_text("broken\n")
    with pytest.raises(Exception, match="line"):
        export(run, csv=target)
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir() if "new" in path.name] == []


def test_a_runs_records_come_back(tmp_path):
    with History(tmp_path / "run", config={"lr": 0.1}) as history:
        for step in range(100):
            history.record({"loss": 1 / (step + 1), "n": step})
            if step % 10 == 0:
                history.record({"eval/acc": step / 100}, step=step)
    found = dataset_of(read_run(tmp_path / "run"))
    assert dict(found.sizes) == {"step": 100}
    np.testing.assert_array_equal(found["step"], range(100))
    np.testing.assert_allclose(found["loss"], 1 / np.arange(1, 101))
    assert found["eval/acc"].sel(step=50) == 0.5
    assert np.isnan(found["eval/acc"].sel(step=51))
    assert found["eval/acc"].attrs["count"] == 10
    losses = 1 / np.arange(1, 101)
    assert found["loss"].attrs["mean"] == pytest.approx(losses.mean())
    assert found["loss"].attrs["std"] == pytest.approx(losses.std())
    assert (found["loss"].attrs["min"], found["loss"].attrs["max"]) == (0.01, 1.0)
    assert found.attrs["run"] == "run"
    assert '"lr"' in found.attrs["config"]
    assert (np.diff(found["time"].values) >= np.timedelta64(0)).all()
    assert abs(found["time"].values[0] - np.datetime64("now")) < np.timedelta64(1, "h")


@pytest.mark.parametrize(
    ("records", "steps", "a", "b"),
    [([(0, "a"), (1, "b")], [0, 1], [0, np.nan], [np.nan, 1]),
     ([(3, "a"), (3, "b"), (3, "a"), (4, "a")], [3, 3, 4], [0, 2, 3], [1, np.nan, np.nan])],
)  # fmt: skip
def test_records_of_one_step_are_a_row_and_nothing_is_lost(records, steps, a, b):
    found = dataset_of(
        {"step": step, "time": float(place), name: float(place)}
        for place, (step, name) in enumerate(records)
    )
    np.testing.assert_array_equal(found["step"], steps)
    np.testing.assert_array_equal(found["a"], a)
    np.testing.assert_array_equal(found["b"], b)


def test_nothing_but_nan_and_nothing_at_all(write_run, records):
    found = dataset_of(read_run(write_run(*records(range(3), loss="NaN"))))
    assert found["loss"].attrs == {"count": 0, "not_finite": 3}
    assert dict(dataset_of(read_run(write_run())).sizes) == {"step": 0}


@pytest.mark.parametrize("folder", [None, "run"])
def test_what_finalize_returns_and_writes(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    history = History(folder)
    for step in range(5):
        history.update({"loss": step, "flag": True, **({"n": 2} if step == 1 else {})})
    found = history.finalize()
    np.testing.assert_array_equal(found["step"], range(5))
    np.testing.assert_array_equal(found["loss"], range(5))
    np.testing.assert_array_equal(found["n"], [np.nan, 2, np.nan, np.nan, np.nan])
    assert found["loss"].attrs["mean"] == 2.0
    assert (tmp_path / "run" / "report" / "report.html").is_file() == bool(folder)
    assert folder or list(tmp_path.iterdir()) == []


def test_arrays_without_xarray(write_run, records, python):
    done = python(
        """
        import sys; sys.modules['xarray'] = None
        from ezpz_obs import dataset_of, read_run
        found = dataset_of(read_run(sys.argv[1]))
        print(type(found).__name__, sorted(found))
        print(found['loss'].tolist(), found['step'].tolist())
        """,
        write_run(*records(range(4), loss=0.5)),
    )
    assert done.stdout == "dict ['loss', 'step', 'time']\n[0.5, 0.5, 0.5, 0.5] [0, 1, 2, 3]\n"
