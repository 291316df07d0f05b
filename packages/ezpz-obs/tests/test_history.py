import json
import math
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from ezpz_obs import History


def test_update_records_writes_and_says(tmp_path):
    with History(tmp_path / "run") as history:
        assert history.update({"loss": 0.5, "n": 3}) == "step=0 loss=0.5 n=3"
        assert history.update({"loss": 0.25}, step=10) == "step=10 loss=0.25"
        assert history.update({"loss": 0.125}) == "step=11 loss=0.125"
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [0.5, 0.25, 0.125]
    assert [record["step"] for record in History.read(history.path)] == [0, 10, 11]


def test_numpy_and_other_scalars(tmp_path):
    record = History(tmp_path).record(
        {
            "a": np.float32(0.5),
            "b": np.array(3),
            "c": True,
            "d": np.float64(0.25),
            "e": np.mean([2.0]),
        }
    )
    assert (record["d"], record["e"]) == (0.25, 2.0)
    assert (record["a"], record["b"], record["c"]) == (0.5, 3, True)
    assert type(record["a"]) is float


def test_what_is_not_finite_comes_back_distinct(tmp_path):
    with History(tmp_path) as history:
        history.update({"a": math.nan, "b": math.inf, "c": -math.inf})
    text = history.path.read_text()
    json.loads(text, parse_constant=pytest.fail)  # valid JSON: no bare NaN
    (record,) = History.read(history.path)
    assert math.isnan(record["a"])
    assert (record["b"], record["c"]) == (math.inf, -math.inf)


def test_no_folder_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    History().update({"loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    history = History(tmp_path / "run")
    assert history.update({"loss": 1.0}) == "step=0 loss=1"
    assert history.path is None
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("bad", ["0.5", None, [1.0], np.zeros(2), 1 << 70, 1j])
def test_a_metric_that_is_no_number(bad):
    with pytest.raises(TypeError, match="metric 'loss'"):
        History().update({"loss": bad})


@pytest.mark.parametrize("bad", ["x", 1.5, None])
def test_steps_and_names_that_are_none(bad):
    history = History()
    if bad is not None:
        with pytest.raises(TypeError):
            history.update({"loss": 1.0}, step=bad)
    with pytest.raises(TypeError, match="name to be a string"):
        history.update({3: 1.0})
    assert history.update({"loss": 1.0}, step=np.int64(3)) == "step=3 loss=1"


@pytest.mark.parametrize("name", ["step", "time"])
def test_names_that_history_uses_itself(name):
    with pytest.raises(ValueError, match=name):
        History().update({name: 1})


def test_a_second_history_goes_on_in_the_same_file(tmp_path):
    for loss in (1.0, 2.0):
        with History(tmp_path) as history:
            history.update({"loss": loss})
    assert [(r["step"], r["loss"]) for r in History.read(history.path)] == [(0, 1.0), (1, 2.0)]


@pytest.mark.parametrize("torn", [b"{", b'{"step":7,"lo', b'{"step":7,"' + b"x" * 200_000])
@pytest.mark.parametrize("before", [0, 1, 5000])
def test_a_run_goes_on_after_a_crash(tmp_path, before, torn):
    with History(tmp_path) as history:
        for step in range(before):
            history.update({"loss": 0.5}, step=step)
    with history.path.open("ab") as file:
        file.write(torn)
    with History(tmp_path) as history:
        history.update({"loss": 0.25})
    assert [record["step"] for record in History.read(history.path)] == list(range(before + 1))


def test_a_file_that_is_none_of_ours_is_not_continued(tmp_path):
    for text, said in (("hello\n", "is no JSON"), ("hello", "expected records of a History")):
        (tmp_path / "metrics.jsonl").write_text(text)
        with pytest.raises(ValueError, match=said):
            History(tmp_path)
        assert (tmp_path / "metrics.jsonl").read_text() == text


def test_a_torn_last_line_is_left_out_and_a_torn_middle_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":0}\n{"step":1,"lo')
    assert History.read(path) == [{"step": 0}]
    path.write_bytes(b'{"step":0}\n{"ste\n{"step":2}\n')
    with pytest.raises(ValueError, match=r"line 2 of .* is no JSON"):
        History.read(path)


def test_kill_9_loses_nothing_that_was_said(tmp_path):
    code = (
        "import sys, ezpz_obs\n"
        "h = ezpz_obs.History(sys.argv[1])\n"
        "while True: print(h.update({'x': 1.0}), flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    for _ in range(500):
        process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    steps = [record["step"] for record in History.read(tmp_path / "metrics.jsonl")]
    assert steps == list(range(len(steps)))
    assert steps[-1] >= 499


def test_a_full_disk_is_an_error_not_silence():
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full on this system")
    history = History()
    history._fd = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError, match="No space left"):
        history.update({"loss": 1.0})
    history.close()
