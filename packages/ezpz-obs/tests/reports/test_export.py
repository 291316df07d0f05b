import csv
import math

import pyarrow.parquet as pq
import pytest

from ezpz_obs import History, ReportError, export, read_run

BIG = 1 << 80


@pytest.fixture
def run(tmp_path):
    with History(tmp_path / "run") as history:
        history.record({"loss": 0.1 + 0.2, "n": 1 << 60, "ok": True, 'a,"b"\n': 1.5, "big": BIG})
        history.record({"loss": math.nan, "n": 2, "ok": False})
        history.record({"loss": -math.inf, "late": 3, "big": 7})
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
    assert found["n"] == [1 << 60, 2, None]
    assert found["ok"] == [True, False, None]
    assert found["late"] == [None, None, 3]
    assert found["big"] == [str(BIG), None, "7"]
    assert math.isnan(found["loss"][1])
    assert found["loss"][2] == -math.inf


def test_later_attempts_win(write_run, records, header, tmp_path):
    again = [{**line, "replay": True} for line in records(range(2, 4), loss=2.0)]
    folder = write_run(
        header(), *records(range(4), loss=1.0), header(attempt=1, continues=3), *again
    )
    export(folder, csv=tmp_path / "x.csv")
    with open(tmp_path / "x.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["loss"]) for row in rows] == [
        ("0", "1.0"), ("1", "1.0"), ("2", "2.0"), ("3", "2.0"),
    ]  # fmt: skip
    assert "replay" not in rows[0]


def test_a_run_longer_than_a_batch(write_run, records, tmp_path):
    folder = write_run(*records(range(40_000), loss=lambda step: step / 7))
    assert export(folder, parquet=tmp_path / "x.parquet") == 40_000
    found = pq.read_table(tmp_path / "x.parquet").to_pydict()
    assert found["loss"] == [step / 7 for step in range(40_000)]


def test_no_records(write_run, tmp_path):
    assert export(write_run(), csv=tmp_path / "x.csv", parquet=tmp_path / "x.parquet") == 0
    assert (tmp_path / "x.csv").read_text().strip() == "step,time"
    assert pq.read_table(tmp_path / "x.parquet").num_rows == 0


def test_numbers_of_any_size(tmp_path):
    with History(tmp_path / "run") as history:
        history.record({"huge": 10**400}, step=1 << 62)
        history.record({"huge": 0.5})
    export(tmp_path / "run", csv=tmp_path / "x.csv", parquet=tmp_path / "x.parquet")
    found = pq.read_table(tmp_path / "x.parquet").to_pydict()
    assert found["step"] == [1 << 62, (1 << 62) + 1]
    assert found["huge"] == [str(10**400), "0.5"]


def test_refused(run, tmp_path):
    with pytest.raises(ReportError, match="expected csv=FILE"):
        export(run)
    with pytest.raises(ReportError, match="the run itself"):
        export(run, csv=run / "metrics.jsonl")
    with pytest.raises(ReportError, match="is a folder"):
        export(run, csv=tmp_path)
    with pytest.raises(FileNotFoundError) as error:
        export(run, csv=tmp_path / "none" / "x.csv")
    assert error.value.filename == str(tmp_path / "none" / "x.csv")


def test_what_fails_leaves_the_old_file(run, tmp_path):
    target = tmp_path / "x.csv"
    target.write_text("old")
    with open(run / "metrics.jsonl", "a") as file:
        file.write("broken\n")
    with pytest.raises(Exception, match="line"):
        export(run, csv=target)
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir() if "new" in path.name] == []
