"""Sinks by name, and what feeds one: a queue that never blocks, a thread, and one that watches."""

import sys
import threading
import time

import pytest

from ezpz_obs import History, SinkError, read_run
from ezpz_obs._sinks import _IDLE, Feeder, close_all
from ezpz_obs._sinks.libraries import LIBRARY_SINKS

HEADER = {"ezpz_obs": 1, "attempt": 0, "run": "r", "time": 1.0}


class Keeping:
    """Keeps what it gets; does what it is told where it is told."""

    name = "keeping"

    def __init__(self, **does):
        self.does, self.said, self.records = does, [], []

    def _now(self, where):
        self.said.append(where)
        self.does.get(where, lambda: None)()

    def open(self, header, folder):
        self._now("open")

    def write(self, records):
        self._now("write")
        self.records += records

    def close(self):
        self._now("close")


def fail():
    raise OSError(28, "No space left on device")


def records(count):
    return [{"step": step, "time": float(step), "loss": 1.0} for step in range(count)]


@pytest.fixture
def hang():
    """A call that hangs until the test is over."""
    over = threading.Event()
    yield lambda: over.wait(60)
    over.set()


def test_all_records_arrive_in_order(warned):
    opened = threading.Event()
    sink = Keeping(open=lambda: opened.wait(60))
    feeder = Feeder(sink, HEADER, None)
    for record in records(5000):
        feeder.put(record)  # while it opens, too
    opened.set()
    feeder.close()
    feeder.close()
    assert [record["step"] for record in sink.records] == list(range(5000))
    assert sink.said[0] == "open"
    assert sink.said[-1] == "close"
    assert not warned()


@pytest.mark.parametrize("where", ["open", "write", "close"])
def test_one_that_fails_is_said_once_and_the_others_go_on(where, warned, tmp_path):
    bad, good = Keeping(**{where: fail}), Keeping()
    with History(tmp_path, sinks=["jsonl", bad, good], summary=False) as history:
        for step in range(100):
            history.record({"loss": step})
            if step % 50 == 0:
                time.sleep(2 * _IDLE)
    assert len(good.records) == 100
    assert len(History.read(tmp_path)) == 100
    first, last = warned()
    assert f"sink keeping failed to {where}: OSError" in first
    assert f"ezpz_obs.replay({str(tmp_path)!r}, sink)" in last
    if where != "close":
        assert "100 records were not sent" in last


def test_one_that_fails_and_cannot_say_how(warned, tmp_path):
    class OddError(Exception):
        def __str__(self):
            raise RuntimeError("no")

    def fail_oddly():
        raise OddError

    with History(tmp_path, sinks=[Keeping(write=fail_oddly)]) as history:
        history.record({"loss": 1.0})
    assert "OddError: <OddError: __str__ raised RuntimeError: no>" in warned()[0]


def test_a_slow_one_loses_the_oldest_and_says_how_many(warned, tmp_path):
    inside, go_on = threading.Event(), threading.Event()

    def wait():
        inside.set()
        go_on.wait(300)

    sink = Keeping(write=wait)
    feeder = Feeder(sink, HEADER, tmp_path, capacity=100)
    first, *rest = records(1001)
    feeder.put(first)
    assert inside.wait(120)
    for record in rest:
        feeder.put(record)
    go_on.set()
    feeder.close()
    assert [record["step"] for record in sink.records] == [0, *range(901, 1001)]
    (said,) = warned()
    assert "900 records were not sent" in said


def test_one_that_hangs_is_left_behind(warned, hang):
    abandoned = threading.Event()
    sink = Keeping(open=hang)
    sink.open_seconds = 0.3
    sink.abandon = abandoned.set
    feeder = Feeder(sink, HEADER, None)
    assert abandoned.wait(120)
    for record in records(1000):
        feeder.put(record)
    feeder.close(0.0)
    first, last = warned()
    assert "hangs: open takes more than 0.3 s" in first
    assert "1,000 records were not sent" in last


def test_several_that_hang_are_waited_for_together(warned, hang):
    feeders = [Feeder(Keeping(close=hang), HEADER, None) for _ in range(4)]
    good = Keeping()
    feeders.append(Feeder(good, HEADER, None))
    for record in records(10):
        for feeder in feeders:
            feeder.put(record)
    began = time.monotonic()
    close_all(feeders, 9.0)
    assert time.monotonic() - began < 18, "together: one after the other they take 36 s"
    assert good.said[-1] == "close"
    assert len(warned()) == 2 * 4


def test_what_can_be_replayed_and_how(warned, tmp_path):
    """The command knows no object of a user's, and without a folder there is no file."""
    for folder in (tmp_path, None):
        feeder = Feeder(Keeping(open=lambda: sys.exit(3)), HEADER, folder)
        feeder.put({"step": 0, "time": 0.0})
        feeder.close()
    left, first, _, last = warned()
    assert "failed to open: SystemExit: 3" in left, "which does not end the interpreter"
    assert first.endswith(f"all are in the run's file: ezpz_obs.replay({str(tmp_path)!r}, sink)")
    assert last.endswith("1 records were not sent; the run has no file to replay")


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
    assert "metrics.jsonl" in history._repr_html_()


@pytest.mark.parametrize("name", LIBRARY_SINKS)
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
