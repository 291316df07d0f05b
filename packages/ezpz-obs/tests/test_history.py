import json
import math
import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pickle import UnpicklingError

import numpy as np
import pytest

import ezpz_obs
from ezpz_obs import History, HistoryError, _header
from ezpz_obs._context import NOW

from .test_logs import Config, OddError, Rude

HEADER = {"ezpz_obs", "attempt", "run", "world_size", "machine", "git", "versions", "config"}


def kinds(path):
    return [next(iter(json.loads(line))) for line in path.read_text().splitlines()]


def test_update_records_writes_and_says(tmp_path):
    config = {"lr": 0.1, "dtype": np.float32, "at": tmp_path}
    with History(tmp_path / "run", config=config) as history:
        assert history.update({"loss": 0.5, "n": 3}) == "step=0 loss=0.5 n=3"
        assert history.record({"loss": 0.25}, step=10) is None
        assert history.update({"loss": 0.125}) == "step=11 loss=0.125"
        assert NOW.step == 11, "log lines show it"
    assert kinds(history.path) == ["ezpz_obs", "step", "step", "step", "event"]
    records = History.read(tmp_path / "run")
    assert [(one["step"], one["loss"]) for one in records] == [(0, 0.5), (10, 0.25), (11, 0.125)]
    assert all(abs(one["time"] - time.time()) < 60 for one in records)
    run = ezpz_obs.read_run(tmp_path / "run")
    (header,) = run.headers
    assert header.keys() >= HEADER
    said = {"lr": 0.1, "dtype": str(np.float32), "at": str(tmp_path)}
    assert (run.name, header["config"]) == ("run", said)
    assert [event["message"] for event in run.events] == ["closed"]


def test_no_credential_reaches_the_file_or_the_report(tmp_path, python):
    words = ["--wandb-key", "hunter2", "--hf-token=hunter2", "https://me:hunter2@host", "--lr=1"]
    done = python(
        """
        import argparse, ezpz_obs; from ezpz_obs import get_logger
        config = {'api_key': 'hunter2', 'hub': {'url': 'https://me:hunter2@host/x'},
                  'args': argparse.Namespace(hf_token='hunter2', lr=0.5)}
        try:
            with ezpz_obs.History('run', config=config) as history:
                history.update({'x': 1})
                history.event('saved', 'to https://me:hunter2@host', api_key='hunter2',
                              given={'args': argparse.Namespace(hf_token='hunter2')})
                raise ValueError('https://me:hunter2@host refused HF_TOKEN=hunter2')
        except ValueError: pass
        get_logger().warning('at https://me:hunter2@host/x', wandb_key='hunter2', n=3)
        get_logger().warning('failed', exc_info=ValueError('HF_TOKEN=hunter2'))
        """,
        *words,
    )
    (header,) = ezpz_obs.read_run(tmp_path / "run").headers
    assert header["argv"][1:] == [
        "--wandb-key", "***", "--hf-token=***", "https://me:***@host", "--lr=1",
    ]  # fmt: skip
    assert header["config"] == {
        "api_key": "***", "hub": {"url": "https://me:***@host/x"},
        "args": "Namespace(hf_token='***', lr=0.5)",
    }  # fmt: skip
    written = [file.read_text() for file in (tmp_path / "run").iterdir()]
    assert "hunter2" not in "".join([*written, done.stderr])
    assert "wandb_key=*** n=3" in done.stderr


RUDE_STR = "<Rude: __str__ raised RuntimeError: no>"


def test_a_value_that_cannot_be_shown_ends_no_training(tmp_path):
    config = {"a": Rude(), "b": [Rude()], "c": Config(x=1)}

    def train():
        with History(tmp_path, config=config) as history:
            history.event("saved", of=Rude())
            history.event("saved", of={"a": Config(x=1)})
            history.update({"loss": 1.0})
            raise OddError

    with pytest.raises(OddError):
        train()
    run = ezpz_obs.read_run(tmp_path)
    broken = "<Config: items raised KeyError: 'lr'>"
    assert run.headers[0]["config"] == {"a": RUDE_STR, "b": [RUDE_STR], "c": broken}
    first, second, end = run.events
    assert (first["of"], second["of"]) == (RUDE_STR, {"a": broken})
    assert end["message"] == "OddError: <OddError: __str__ raised ValueError: >"


def test_threads_do_not_share_a_step(tmp_path):
    def update(number):
        return [history.update({"x": number}) for _ in range(500)]

    with History(tmp_path) as history, ThreadPoolExecutor(8) as pool:
        said = [text for texts in pool.map(update, range(8)) for text in texts]
    records = History.read(tmp_path)
    assert [one["step"] for one in records] == list(range(4000))
    assert sorted(said) == sorted(f"step={one['step']} x={one['x']}" for one in records)


def test_numpy_torch_and_nested(tmp_path):
    torch = pytest.importorskip("torch")
    with History(tmp_path) as history:
        history.update(
            {
                "a": np.float32(0.5), "b": np.array(3), "c": True, "d": np.float64(0.25),
                "train": {"loss": torch.tensor(2.5, requires_grad=True), "x": {"y": 1}},
                "e/f": torch.tensor(3, dtype=torch.int16), "g": torch.tensor(0.5).bfloat16(),
            }
        )  # fmt: skip
    (record,) = History.read(tmp_path)
    del record["step"], record["time"]
    assert record == {
        "a": 0.5, "b": 3, "c": True, "d": 0.25, "train/loss": 2.5, "train/x/y": 1, "e/f": 3,
        "g": 0.5,
    }  # fmt: skip
    assert [type(record[name]) for name in "abc"] == [float, int, bool]


def test_what_json_has_no_numbers_for_comes_back_as_it_was(tmp_path):
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 10**4000 - 1, "e": -(2**63),
              "f": 2**64 - 1, "g": 2**64, "null": 1.0, "h": 5e-324, "i": -0.0}  # fmt: skip
    with History(tmp_path) as history:
        history.update(values)
        history.update({"a": 1.0})
    for line in history.path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # valid JSON: no bare NaN
    first, second = History.read(tmp_path)
    assert math.isnan(first.pop("a"))
    assert {name: first[name] for name in values if name != "a"} == {
        name: value for name, value in values.items() if name != "a"
    }
    assert [type(first[name]) for name in "deg"] == [int] * 3
    assert math.copysign(1, first["i"]) == -1
    assert second["a"] == 1.0


@pytest.mark.parametrize("bad", ["0.5", None, [1.0], np.zeros(2), 1j, b"1", object()])
def test_a_metric_that_is_no_number(bad, tmp_path):
    with History(tmp_path) as history:
        with pytest.raises(TypeError, match="metric 'a/loss'"):
            history.update({"a": {"loss": bad}})
        with pytest.raises(TypeError, match="metric 'loss'"):
            history.update({"loss": bad})
        assert history.update({"loss": 1.0}) == "step=0 loss=1", "nothing of it was recorded"


def test_a_masked_number_and_a_step_that_are_none():
    masked = {"a": np.ma.masked, "b": np.ma.array(1.0, mask=True), "c": np.ma.array(1.0)}
    assert History().update(masked) == "step=0 a=nan b=nan c=1"
    for bad in ("x", 1.5):
        with pytest.raises(TypeError):
            History().update({"loss": 1.0}, step=bad)
    assert History().update({"loss": 1.0}, step=np.int64(3)) == "step=3 loss=1"
    with pytest.raises(ValueError, match="expected an integer of 64 bits"):
        History().update({"loss": 1.0}, step=1 << 63)


def test_names_that_cannot_be():
    for name in ("step", "time", "replay", "event", "ezpz_obs"):  # History's own
        with pytest.raises(ValueError, match=name):
            History().update({name: 1})
    with pytest.raises(TypeError, match="name to be a string"):
        History().update({3: 1.0})
    with pytest.raises(ValueError, match="two metrics called 'a/b'"):
        History().update({"a": {"b": 1}, "a/b": 2})
    with pytest.raises(ValueError, match="has no name"):
        History().update({"a": {"": 1}})
    for value in (1.0, np.zeros(())):
        with pytest.raises(ValueError, match="has no name"):
            History().update({"": value})
    with pytest.raises(ValueError, match="cross_rank=-1"):
        History(cross_rank=-1)


def test_a_restarted_run_goes_on_and_marks_what_it_replays(tmp_path, monkeypatch):
    with History(tmp_path) as history:
        for step in range(5):
            history.update({"loss": float(step)})
    monkeypatch.setenv("EZPZ_LAST_FAULT", "the fault of n1: gone")
    with History(tmp_path) as history:  # from its checkpoint of step 3
        for step in range(3, 7):
            history.update({"loss": step + 0.5}, step=step)
        assert history.update({"loss": 7.0}) == "step=7 loss=7"
    run = ezpz_obs.read_run(tmp_path)
    assert [(one["attempt"], one["continues"]) for one in run.headers] == [(0, None), (1, 4)]
    assert [one["last_fault"] for one in run.headers] == [None, "the fault of n1: gone"]
    assert [(one["step"], one["loss"], one.get("replay")) for one in run.records()] == [
        (0, 0.0, None), (1, 1.0, None), (2, 2.0, None), (3, 3.5, True), (4, 4.5, True),
        (5, 5.5, None), (6, 6.5, None), (7, 7.0, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("end", "status", "cause", "second"),
    [
        ("", 0, "exit", "run-2"), ("h.close()", 0, "closed", "run-2"),
        ("sys.exit()", 0, "exit", "run-2"), ("raise KeyError('boo')", 1, "KeyError: 'boo'", "run"),
        ("os.kill(os.getpid(), 9)", -9, None, "run"),
        ("try: sys.exit(75)\nfinally: h.close()", 75, "SystemExit: 75", "run"),
    ],
)  # fmt: skip
def test_a_second_run_is_not_the_continuation_of_one_that_has_finished(
    *, tmp_path, python, end, status, cause, second
):
    program = "import os, sys, ezpz_obs; h = ezpz_obs.History('run'); h.record({'x': 1})\n"
    python(program + end, status=status)
    ends = [event["message"] for event in ezpz_obs.read_run(tmp_path / "run").events]
    assert ends == [cause] * (cause is not None)
    done = python(program + "h.close(); ezpz_obs.History('run').record({'x': 1})")
    said = [f"{tmp_path}/run has a finished run; this one is in {second}"] * (second != "run")
    assert [line.partition(" (")[0] for line in done.stderr.splitlines()] == said * 2
    assert sorted(os.listdir(tmp_path)) == sorted({"run", second})
    steps = [0, 1] if second != "run" else [0, 1, 2]
    assert [one["step"] for one in History.read(tmp_path / second)] == steps
    with History(tmp_path / "run", resume=True) as history:
        history.record({"x": 1})
    assert len(History.read(tmp_path / "run")) == (2 if second != "run" else 4)


def test_attempts_of_a_launch_find_one_folder(tmp_path, python):
    program = "import ezpz_obs; ezpz_obs.History('run').record({'x': 1})"
    for launch in ("one.0", "one.1", "two.0", "two.1"):
        python(program, env={"EZPZ_LAUNCH_ID": launch})
    lines = {path.parent.name: len(kinds(path)) for path in tmp_path.glob("*/*")}
    assert lines == {"run": 6, "run-2": 6}


def test_one_writer_and_nothing_after_its_end(tmp_path):
    first = History(tmp_path)
    with pytest.raises(HistoryError, match="is being written by another History"):
        History(tmp_path)
    first.update({"loss": 1.0})
    first.close()
    with pytest.raises(HistoryError, match=r"a record of step 1 after close\(\)"):
        first.update({"loss": 1.0})
    with pytest.raises(HistoryError, match=r"event 'checkpoint' after close\(\)"):
        first.event("checkpoint", "saved")
    first.close()
    with History(tmp_path) as history:
        assert history.update({"loss": 1.0}) == "step=1 loss=1"


def test_events_and_a_warning_of_what_is_not_finite(tmp_path, caplog):
    with History(tmp_path) as history:
        history.update({"loss": 1.0})
        history.update({"loss": math.nan, "n": 10**400})
        history.update({"loss": math.inf})
        history.event("checkpoint", "saved", path=tmp_path / "x", value=math.nan)
    assert [record.message for record in caplog.records] == ["loss is nan at step 1"]
    warning, checkpoint, end = ezpz_obs.read_run(tmp_path).events
    assert warning | {"time": 0} == {
        "event": "warning", "time": 0, "step": 1, "message": "loss is nan at step 1",
    }  # fmt: skip
    assert (checkpoint["path"], checkpoint["value"]) == (str(tmp_path / "x"), "NaN")
    assert end["message"] == "closed"


def test_a_deferred_record_comes_with_the_next(tmp_path):
    history = History(tmp_path, deferred=True)
    assert history.update({"loss": 1.0}) == ""
    assert History.read(tmp_path) == []
    assert history.update({"loss": 2.0}) == "step=0 loss=1"
    assert len(History.read(tmp_path)) == 1
    history.flush()
    assert len(History.read(tmp_path)) == 2
    history.update({"loss": 3.0})
    history.close()
    assert [one["loss"] for one in History.read(tmp_path)] == [1.0, 2.0, 3.0]


def test_progress_is_told_to_the_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv("EZPZ_PROGRESS_FILE", str(tmp_path / "progress"))
    with History() as history:
        history.update({"loss": 1.0}, step=7)
        assert (tmp_path / "progress").read_text() == "7\n"
        history.update({"loss": 1.0}, step=9)
        history.update({"loss": 1.0}, step=8)
    assert (tmp_path / "progress").read_text() == "9\n"
    assert os.listdir(tmp_path) == ["progress"]


def test_the_launcher_is_told_where_the_file_is(tmp_path, monkeypatch):
    monkeypatch.setenv("EZPZ_RUN_FILE", str(tmp_path / "said"))
    History().close()  # it has no file
    assert os.listdir(tmp_path) == []
    monkeypatch.chdir(tmp_path)
    History("run").close()
    assert (tmp_path / "said").read_text() == f"{tmp_path}/run/metrics.jsonl\n"
    assert sorted(os.listdir(tmp_path)) == ["run", "said"]
    monkeypatch.setenv("EZPZ_RUN_FILE", str(tmp_path / "none" / "said"))
    History("run").close()  # where that cannot be written, all goes on


def train(folder, error):
    History(folder).record({"loss": 1.0})
    if error is not None:
        raise error


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
@pytest.mark.parametrize(
    ("error", "cause"), [(None, "exit"), (ValueError("no such file"), "ValueError: no such file")]
)
def test_a_function_of_multiprocessing_ends_as_a_script_does(tmp_path, method, error, cause):
    process = multiprocessing.get_context(method).Process(target=train, args=(tmp_path, error))
    process.start()
    process.join(60)
    assert process.exitcode == (0 if error is None else 1)
    assert History.read(tmp_path)[0]["loss"] == 1.0
    (end,) = ezpz_obs.read_run(tmp_path).events
    assert (end["event"], end["message"]) == ("end", cause)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_memory_does_not_grow_with_the_run(python):
    done = python(
        """
        import ezpz_obs
        def peak():
            return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
        names = [f"metric{i}" for i in range(10)]
        history = ezpz_obs.History("run")
        for steps in (1000, 100_000):
            for step in range(steps):
                history.record({name: step * 0.1 for name in names})
            print(peak())
        """
    )
    before, after = map(int, done.stdout.split())
    assert after - before < 2048, "kB; 100,000 records are 25 MB on disk"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"deferred": True}])
def test_kill_9_loses_nothing_that_was_said(tmp_path, options):
    """At random moments, each run going on with the file of the one before."""
    moments = np.random.default_rng(7).integers(1, 400, 50)  # 100 with the other options
    last = -1
    for moment in moments:
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            history = History(tmp_path, **options)
            while True:
                os.write(writing, f"{history.update({'x': 1.0, 'y': 0.125})}\n".encode())
        os.close(writing)
        with os.fdopen(reading) as pipe:
            said = [pipe.readline() for _ in range(moment)]
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        steps = [record["step"] for record in History.read(tmp_path)]
        assert steps == list(range(len(steps)))
        assert steps[-1:] >= [last], "nothing is lost of the run before"
        heard = [int(line.split()[0].removeprefix("step=")) for line in said if line.strip()]
        assert not heard or steps[-1] >= heard[-1]
        last = steps[-1] if steps else last
    assert len(ezpz_obs.read_run(tmp_path).headers) == len(moments)


def test_an_event_has_no_fields_of_the_files_own(tmp_path):
    with History(tmp_path) as history:
        for name in ("event", "time", "ezpz_obs"):
            with pytest.raises(ValueError, match=f"a field {name!r}.*another name"):
                history.event("checkpoint", "saved", **{name: "deadbeef"})
        history.event("checkpoint", "saved", step=7)
    assert [one["step"] for one in ezpz_obs.read_run(tmp_path).events] == [7, None]


def test_a_metric_that_is_called_like_a_statistic_of_another(tmp_path):
    metrics = {"loss": 1.0, "loss/mean": 7.0}
    with History(tmp_path / "run", cross_rank=True) as history:
        with pytest.raises(ValueError, match="'loss/mean' beside 'loss'; expected another name"):
            history.update(metrics)
        assert history.update({"loss/mean": 7.0}) == "step=0 loss/mean=7", "alone it is a metric"
    with History(tmp_path / "plain") as history:
        history.update(metrics)  # without statistics there is nothing to confuse
    (record,) = History.read(tmp_path / "plain")
    assert record["loss/mean"] == 7.0


@pytest.mark.usefixtures("rank_1")
def test_other_ranks_write_nothing_and_ask_no_git(tmp_path, monkeypatch):
    """It looks at every file of the script's folder, which thousands of ranks share."""
    calls = []
    monkeypatch.setattr(_header, "_run_git", lambda *words: calls.append(words))
    history = History(tmp_path / "run")
    assert history.update({"loss": 1.0}) == "step=0 loss=1"
    assert history.finalize() is None
    assert not list(tmp_path.iterdir())
    assert calls == []
    monkeypatch.setenv("RANK", "0")
    History(tmp_path).close()
    assert calls != []


def test_text_that_is_no_unicode(tmp_path):
    """As of file names in another encoding, which errors and arguments quote."""
    odd = os.fsdecode(b"data-\xff")
    history = History(tmp_path, config={odd: odd})
    history.update({odd: 1.0})
    with pytest.raises(UnpicklingError), history:
        raise UnpicklingError(odd)
    run = ezpz_obs.read_run(tmp_path)
    assert run.headers[0]["config"] == {"data-\\udcff": "data-\\udcff"}
    assert [one["data-\\udcff"] for one in run.records()] == [1.0]
    assert run.events[-1]["message"] == "UnpicklingError: data-\\udcff"


def test_a_child_leaves_the_file_to_its_parent(tmp_path):
    """A worker that outlives a killed training does not keep the next attempt out."""
    reading, writing = os.pipe()
    if (parent := os.fork()) == 0:
        history = History(tmp_path)
        history.update({"loss": 1.0})
        if (worker := os.fork()) == 0:
            try:
                said = history.update({"loss": 2.0})
            except HistoryError as error:
                said = str(error)
            history.close()
            os.write(writing, f"{os.getpid()} {said}\n".encode())
            signal.pause()
        os.waitpid(worker, 0)
    with os.fdopen(reading) as pipe:
        worker, _, said = pipe.readline().partition(" ")
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        try:
            with History(tmp_path) as history:
                assert history.update({"loss": 3.0}) == "step=1 loss=3"
        finally:
            os.kill(int(worker), signal.SIGKILL)
            os.close(writing)
    assert said.startswith("a record of step 1 in a process forked from its own; expected none")
    assert [record["loss"] for record in History.read(tmp_path)] == [1.0, 3.0]
    assert kinds(tmp_path / "metrics.jsonl") == ["ezpz_obs", "step"] * 2 + ["event"]
