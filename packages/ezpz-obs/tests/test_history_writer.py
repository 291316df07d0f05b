"""What cannot be written: training goes on, with one warning."""

import os
import shutil

import pytest

import ezpz_obs
from ezpz_obs import History, _file

LIMITED = """
import resource, signal, sys, ezpz_obs
# A file may grow to so many bytes: what a full disk does, also to the last line, in part.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit, least = int(sys.argv[1]), int(sys.argv[1]) > 1
if least: history = ezpz_obs.History("run", summary=False)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
if not least: history = ezpz_obs.History("run", summary=False)
for step in range(1000):
    history.update({"loss": 1.0})
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
history.update({"loss": 2.0})  # there is room again
history.close()
"""


@pytest.mark.parametrize("limit", [4000, 1], ids=["full", "full from the start"])
def test_a_full_disk(tmp_path, python, limit):
    first, last = python(LIMITED, limit).stderr.splitlines()
    assert first.startswith("metrics cannot be written to")
    assert "training goes on" in first
    records = History.read(tmp_path / "run")
    assert records[-1] == {**records[-1], "step": 1000, "loss": 2.0}, "it goes on when it can"
    lost = 1001 - len(records) + (limit == 1)  # the header, too
    assert last == f"{lost} lines are missing in {tmp_path / 'run' / 'metrics.jsonl'}"
    steps = [record["step"] for record in records]
    assert limit == 1 or steps[:50] == list(range(50))
    # A line of a shorter time may find room where others did not.
    assert steps == sorted(set(steps))
    assert len(steps) < 100


def test_a_part_of_a_line_that_cannot_be_cut_off_at_once(tmp_path, monkeypatch):
    """A disk in trouble: nothing is written behind a torn line, which no reader could read."""
    history = History(tmp_path)
    write, refused = os.write, [OSError(5, "Input/output error")] * 2
    monkeypatch.setattr(os, "write", lambda fd, line: write(fd, line[: len(line) // 2]))
    truncate = os.ftruncate

    def cut(fd, size):
        if refused:
            raise refused.pop()
        truncate(fd, size)

    monkeypatch.setattr(os, "ftruncate", cut)
    history.update({"loss": 0.0})
    monkeypatch.setattr(os, "write", write)
    for loss in (1.0, 2.0, 3.0):
        history.update({"loss": loss})
    history.close()
    assert [record["loss"] for record in History.read(tmp_path)] == [2.0, 3.0]


@pytest.fixture
def looks(monkeypatch):
    """Look at each record whether the file is still there."""
    monkeypatch.setattr(_file, "_LOOK", 0.0)


@pytest.mark.usefixtures("looks")
def test_a_folder_that_is_removed_comes_back_with_all_records(tmp_path, caplog):
    folder = tmp_path / "run"
    with History(folder) as history:
        history.update({"loss": 1.0})
        shutil.rmtree(folder)
        history.update({"loss": 2.0})
        history.update({"loss": 3.0})
    assert [record["loss"] for record in History.read(folder)] == [1.0, 2.0, 3.0]
    (said,) = caplog.messages
    assert said.endswith(
        "was removed while it was being written; it is there again, with all records"
    )
    caplog.clear()
    with History(folder) as history:
        shutil.rmtree(folder)
    assert not folder.exists(), "when all is over it stays away"
    assert not caplog.records


@pytest.mark.usefixtures("looks")
def test_what_is_there_instead_is_not_touched(tmp_path, caplog):
    with History(tmp_path / "a") as history:
        history.path.unlink()
        history.path.write_text("somebody else's")
        history.update({"loss": 2.0})
    assert history.path.read_text() == "somebody else's"
    with History(tmp_path / "b") as history:
        shutil.rmtree(tmp_path / "b")
        (tmp_path / "b").write_text("a file where the folder was")
        for _ in range(5):
            history.update({"loss": 2.0})
    assert ["cannot be written" in one for one in caplog.messages] == [True, True]


def test_a_closed_standard_error(tmp_path, python):
    code = "import os, ezpz_obs\nwith ezpz_obs.History('.') as h:\n"
    code += "    h.update({'x': 1.0})\n    os.system('echo native code >&2')"
    python(code, shell="2>&-")
    assert len(History.read(tmp_path)) == 1
    assert "native" not in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize("sync", [True, 0.0, 60.0])
def test_the_disk_confirms(tmp_path, sync, monkeypatch):
    calls = []
    monkeypatch.setattr(os, "fdatasync", calls.append, raising=False)
    with History(tmp_path, sync=sync) as history:
        for _ in range(3):
            history.update({"x": 1.0})
    # Header, three records and the end; or none of them within a minute.
    assert len(calls) == (0 if sync == 60.0 else 5)


def test_an_outdir_that_cannot_be_made_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        History(tmp_path / "file" / "run")


def test_checksums_are_verified(tmp_path):
    with History(tmp_path, checksum=True) as history:
        for step in range(3):
            history.update({"loss": float(step)})
    text = history.path.read_bytes()
    assert text.count(b'"crc":"') == text.count(b"\n") == 5
    assert len(History.read(tmp_path)) == 3
    history.path.write_bytes(text.replace(b'"loss":1.0', b'"loss":7.0'))
    run = ezpz_obs.read_run(tmp_path)
    assert [record["loss"] for record in run.records()] == [0.0, 2.0]
    assert "the checksum is another" in run.damaged[3]
