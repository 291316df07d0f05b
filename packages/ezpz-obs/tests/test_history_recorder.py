"""What is refused because it would be lost, or taken for something else."""

import os
import signal
import sys
from pickle import UnpicklingError

import pytest

import ezpz_obs
from ezpz_obs import History, HistoryError, SinkError, _file


@pytest.mark.parametrize("name", ["crc", "event", "time", "ezpz_obs"])
def test_an_event_has_no_fields_of_the_files_own(tmp_path, name):
    with History(tmp_path) as history:
        with pytest.raises(ValueError, match=f"a field {name!r}.*another name"):
            history.event("checkpoint", "saved", **{name: "deadbeef"})
        history.event("checkpoint", "saved", step=7)
    assert [one["step"] for one in ezpz_obs.read_run(tmp_path).events] == [7, None]


def test_an_event_after_the_end_is_an_error(tmp_path):
    with History(tmp_path) as history:
        history.update({"loss": 1.0})
    with pytest.raises(HistoryError, match=r"event 'checkpoint' after close\(\)"):
        history.event("checkpoint", "saved")


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


@pytest.mark.parametrize("per_rank", [False, True])
def test_git_is_asked_by_rank_0_alone(tmp_path, monkeypatch, per_rank):
    """It looks at every file of the script's folder, which thousands of ranks share."""
    asked = []
    monkeypatch.setattr(_file, "_git", lambda *words: asked.append(words))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with History(tmp_path, per_rank=per_rank) as history:
        history.update({"loss": 1.0})
    assert (list(tmp_path.iterdir()) != []) == per_rank
    assert asked == []
    monkeypatch.setenv("RANK", "0")
    History(tmp_path).close()
    assert asked != []


def test_sinks_are_a_list(tmp_path):
    with pytest.raises(SinkError, match=r"expected a list: sinks=\['csv'\]"):
        History(tmp_path, sinks="csv")
    assert not list(tmp_path.iterdir())


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


@pytest.mark.parametrize(
    ("status", "said"),
    [(0, "exit"), (None, "exit"), (3, "SystemExit: 3"), ("no", "SystemExit: no")],
)
def test_a_script_may_end_by_sys_exit(tmp_path, status, said):
    with pytest.raises(SystemExit), History(tmp_path):
        sys.exit(status)
    assert ezpz_obs.read_run(tmp_path).events[-1]["message"] == said
