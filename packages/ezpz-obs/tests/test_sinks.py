"""Sinks by name, and what becomes of one that fails or blocks."""

import sys
import threading
import time
from importlib.metadata import EntryPoint

import pytest

import ezpz_obs._sinks as module
from ezpz_obs import History, SinkError, read_run, replay
from ezpz_obs._sinks.common import LIBRARIES


class Recorder:
    """Keeps what it gets; does what it is told where it is told."""

    name = "recorder"

    def __init__(self, **actions):
        self.actions, self.calls, self.steps, self.metrics = actions, [], [], []

    def _call(self, name):
        self.calls.append(name)
        self.actions.get(name, lambda: None)()

    def open(self, header, folder):
        self._call("open")
        self.header = header

    def write(self, step, metrics):
        self._call("write")
        self.steps.append(step)
        self.metrics.append(metrics)

    def close(self):
        self._call("close")


def fail():
    raise OSError(28, "No space left on device")


@pytest.fixture
def hang():
    """A call that hangs until the test is over."""
    over = threading.Event()
    yield lambda: over.wait(60)
    over.set()


def test_all_records_arrive_in_order(tmp_path, warned):
    sink = Recorder()
    with History(tmp_path, sinks=["jsonl", sink], config={"lr": 0.1}) as history:
        for step in range(100):
            history.record({"loss": step / 2, "train": {"n": step}})
    assert sink.calls == ["open", *["write"] * 100, "close"]
    assert sink.header["config"] == {"lr": 0.1}
    assert sink.steps == list(range(100))
    assert sink.metrics[3].keys() == {"time", "loss", "train/n"}
    assert sink.metrics[3]["loss"] == 1.5
    assert not warned()


@pytest.mark.parametrize("where", ["open", "write", "close"])
def test_one_that_fails_is_switched_off_with_one_line_and_replayed_later(where, warned, tmp_path):
    bad, good = Recorder(**{where: fail}), Recorder()
    with History(tmp_path, sinks=[bad, good]) as history:
        for step in range(100):
            history.record({"loss": step})
    assert good.steps == list(range(100))
    assert len(History.read(tmp_path)) == 100
    (said,) = warned()
    assert said == (
        f"sink recorder failed to {where}: OSError: [Errno 28] No space left on device; training "
        "goes on without it, all records are sent later by: "
        f"ezpz_obs.replay({str(tmp_path)!r}, sink)"
    )
    assert len(bad.calls) == {"open": 1, "write": 2, "close": 102}[where]
    later = Recorder()
    assert replay(tmp_path, later) == 100
    assert later.steps == good.steps
    assert later.header["replayed"]


def test_all_lines_of_an_error_are_in_the_one_line(warned):
    def refuse():
        raise ValueError(
            "1 validation error for Run\n  project\n    too long [value='xx']" + "y" * 999
        )

    with History(sinks=[Recorder(open=refuse)]):
        pass
    (said,) = warned()
    assert "open: ValueError: 1 validation error for Run project too long [value='xx']yy" in said
    assert said.count("\n") == 0
    assert len(said) < 700


def test_what_a_library_ends_with_ends_no_training(warned):
    with History(sinks=[Recorder(write=lambda: sys.exit(3))]) as history:
        history.record({"loss": 1.0})
    (said,) = warned()
    assert "failed to write: SystemExit: 3" in said
    assert said.endswith("and the run has no file to replay")


def test_one_that_blocks_a_step_for_long(warned, monkeypatch):
    monkeypatch.setattr(module, "WRITE_SECONDS", 0.05)
    slow = Recorder(write=lambda: time.sleep(0.1))
    with History(sinks=[slow]) as history:
        for _ in range(5):
            history.record({"loss": 1.0})
    assert slow.steps == [0]
    assert "sink recorder blocked training for 0 s; training goes on" in warned()[0]


def test_several_that_hang_are_waited_for_together(warned, hang, monkeypatch):
    monkeypatch.setattr(module, "OPEN_SECONDS", 0.1)
    monkeypatch.setattr(module, "CLOSE_SECONDS", 1.0)
    good = Recorder()
    began = time.monotonic()
    with History(sinks=[Recorder(open=hang), *[Recorder(close=hang) for _ in range(8)], good]):
        pass
    assert time.monotonic() - began < 5, "one after the other they take 8 s"
    assert good.calls == ["open", "close"]
    said = warned()
    assert "did not open in time" in said[0]
    assert ["did not close in time" in one for one in said[1:]] == [True] * 8


class Found(EntryPoint):
    def load(self):
        return Recorder


def test_a_package_offers_a_sink_by_an_entry_point(tmp_path, monkeypatch, warned):
    known = {"recorder": Found("recorder", "x:Y", module.ENTRY_POINTS)}
    monkeypatch.setattr(module, "find_sinks", lambda: known)
    monkeypatch.setattr(Recorder, "write", lambda *_: fail())
    with History(tmp_path, sinks=["recorder"]) as history:
        history.record({"loss": 1.0})
    assert warned()[0].endswith(f"ezpz-obs replay {tmp_path} --to=recorder")


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (["tensorbord"], "'tensorbord'; expected one of csv, mlflow, tensorboard"),
        ([print], "an object with name, open, write and close"),
    ],
)
def test_what_is_no_sink(sinks, message, tmp_path):
    with pytest.raises(SinkError, match=message):
        History(tmp_path, sinks=sinks)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("variable", "value", "given"),
    [
        ("EZPZ_SINKS", "csv", {}), ("EZPZ_TRACKER_BACKENDS", "jsonl, csv", {}),
        ("EZPZ_SINKS", "none", {"backends": "csv"}), ("EZPZ_SINKS", "", {"sinks": ["csv"]}),
    ],
)  # fmt: skip
def test_sinks_are_named_by_the_environment_where_no_argument_does(
    tmp_path, monkeypatch, variable, value, given
):
    monkeypatch.setenv(variable, value)
    with History(tmp_path, project_name="mine", **given) as history:
        history.record({"loss": 0.5})
    assert (tmp_path / "metrics.csv").read_text().splitlines()[1].endswith("0.5")
    assert history.history["loss"] == [0.5]
    assert read_run(tmp_path).headers[0]["project"] == "mine"


@pytest.mark.parametrize("name", LIBRARIES)
def test_what_is_not_installed_is_named_with_the_command(name, tmp_path, python):
    (tmp_path / name).mkdir()  # W&B's own ./wandb is no package
    done = python(
        f"""
        import sys, importlib.machinery as m
        class Hide(m.PathFinder):
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                path = ['.'] if name == {name!r} else path
                return m.PathFinder.find_spec(name, path, target)
        sys.meta_path = [f for f in sys.meta_path if f is not m.PathFinder] + [Hide]
        from ezpz_obs import History
        History(sinks=[{name!r}])
        """,
        status=1,
    )
    assert f'pip install "ezpz-obs[{name}]"' in done.stderr
    assert "SinkError" in done.stderr
