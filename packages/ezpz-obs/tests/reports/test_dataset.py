import numpy as np
import pytest

from ezpz_obs import History, dataset_of, read_run


def test_a_runs_records_come_back(tmp_path):
    with History(tmp_path / "run", config={"lr": 0.1}, name="mine") as history:
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
    assert found.attrs["run"] == "mine"
    assert '"lr"' in found.attrs["config"]
    assert (np.diff(found["time"].values) >= np.timedelta64(0)).all()
    assert abs(found["time"].values[0] - np.datetime64("now")) < np.timedelta64(1, "h")


def test_records_in_memory():
    found = dataset_of([{"step": 0, "time": 1.0, "a": 1.0}, {"step": 1, "time": 2.0, "b": 2.0}])
    np.testing.assert_array_equal(found["a"], [1.0, np.nan])
    np.testing.assert_array_equal(found["b"], [np.nan, 2.0])


def test_a_step_recorded_twice_loses_nothing():
    found = dataset_of([{"step": 3, "time": 1.0, "a": 1.0}, {"step": 3, "time": 2.0, "a": 2.0}])
    np.testing.assert_array_equal(found["a"], [1.0, 2.0])
    np.testing.assert_array_equal(found["step"], [3, 3])


def test_three_records_of_a_step():
    found = dataset_of([
        {"step": 3, "time": 1.0, "a": 1.0}, {"step": 3, "time": 2.0, "b": 2.0},
        {"step": 3, "time": 3.0, "a": 3.0}, {"step": 4, "time": 4.0, "a": 4.0},
    ])  # fmt: skip
    np.testing.assert_array_equal(found["a"], [1.0, 3.0, 4.0])
    np.testing.assert_array_equal(found["b"], [2.0, np.nan, np.nan])


def test_nothing_but_nan_and_nothing_at_all(write_run, records):
    found = dataset_of(read_run(write_run(*records(range(3), loss="NaN"))))
    assert found["loss"].attrs == {"count": 0, "not_finite": 3}
    assert dict(dataset_of(read_run(write_run())).sizes) == {"step": 0}


def test_a_history_without_a_folder(tmp_path):
    history = History()
    for step in range(5):
        history.update({"loss": step, "flag": True})
    found = history.finalize()
    np.testing.assert_array_equal(found["loss"], range(5))
    assert found["loss"].attrs["mean"] == 2.0


def test_finalize_writes_the_report(tmp_path):
    history = History(tmp_path / "run")
    for step in range(5):
        history.update({"loss": step})
    found = history.finalize()
    np.testing.assert_array_equal(found["loss"], range(5))
    assert (tmp_path / "run" / "report" / "index.html").is_file()


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
