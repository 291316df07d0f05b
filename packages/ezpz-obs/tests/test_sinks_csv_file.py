import math

import pytest

from ezpz_obs import History


def test_pandas_reads_a_run_that_went_on_whose_later_rows_win(tmp_path):
    pandas = pytest.importorskip("pandas")
    with History(tmp_path, sinks=["csv"]) as history:
        for step in range(1000):
            history.record({"loss": 1 / (step + 1), "flag": step % 2 == 0})
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("1000,1732.5,1")  # torn
    with History(tmp_path, sinks=["csv"], resume=True) as history:
        for step in range(990, 1010):
            history.record({"loss": -step / 7, "flag": True, "more": math.nan}, step=step)
    table = pandas.read_csv(tmp_path / "metrics.csv")
    assert list(table.columns) == ["step", "time", "loss", "flag", "more"]
    assert table["step"].tolist() == list(range(1010))
    assert table["loss"][:990].tolist() == [1 / (step + 1) for step in range(990)]
    assert table["loss"][990:].tolist() == [-step / 7 for step in range(990, 1010)]
    assert table["flag"].dtype == bool
    assert table["more"].isna().all()


def test_another_table_is_left_alone_and_a_run_without_a_folder_is_told(tmp_path, warned):
    (tmp_path / "metrics.csv").write_text("name,value\na,1\n")
    for folder in (tmp_path, None):
        with History(folder, sinks=["csv"]) as history:
            history.record({"loss": 1})
    assert (tmp_path / "metrics.csv").read_text() == "name,value\na,1\n"
    first, second = warned()
    assert "has the columns ['name', 'value']" in first
    assert "expected History(outdir=...)" in second


def test_a_full_disk(tmp_path, python):
    done = python(
        """
        import resource; from ezpz_obs import History, replay
        with History(".") as history:
            for step in range(1000): history.record({"loss": step})
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        replay(".", "csv")
        """,
        status=1,
    )
    assert "OSError: [Errno 27] File too large: 'metrics.csv'" in done.stderr
    assert not list(tmp_path.glob("*.new"))
