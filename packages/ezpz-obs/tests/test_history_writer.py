"""What cannot be written: training goes on, with one warning."""

import os
import shutil

import pytest

import ezpz_obs
from ezpz_obs import History, _file

LIMITED = """
import resource, signal, sys, ezpz_obs
# A file may grow to 4,000 bytes: what a full disk does, also to the last line, in part.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
history = ezpz_obs.History(sys.argv[1], summary=False)
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
for step in range(1000):
    history.update({"loss": 1.0})
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
history.update({"loss": 2.0})  # there is room again
history.close()
"""
FULL = """
import resource, signal, sys, ezpz_obs
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
history = ezpz_obs.History(sys.argv[1])
for step in range(10):
    history.update({"loss": 1.0})
history.close()
"""


def test_a_full_disk(tmp_path, python):
    done = python(LIMITED, tmp_path)
    first, last = done.stderr.splitlines()
    assert first.startswith("metrics cannot be written to")
    assert "training goes on" in first
    records = History.read(tmp_path)
    assert records[-1] == {**records[-1], "step": 1000, "loss": 2.0}, "it goes on when it can"
    assert last == f"{1001 - len(records)} lines are missing in {tmp_path / 'metrics.jsonl'}"
    steps = [record["step"] for record in records]
    assert steps[:50] == list(range(50))
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


def test_a_disk_that_is_full_from_the_start(python):
    done = python(FULL, "run")
    first, last = done.stderr.splitlines()
    assert "cannot be written" in first
    assert last.startswith("12 lines are missing"), "header, ten records, the end"


def test_a_folder_that_is_removed_comes_back_with_all_records(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(_file, "_LOOK", 0.0)
    folder = tmp_path / "run"
    with History(folder) as history:
        history.update({"loss": 1.0})
        shutil.rmtree(folder)
        history.update({"loss": 2.0})
        history.update({"loss": 3.0})
    assert [record["loss"] for record in History.read(folder)] == [1.0, 2.0, 3.0]
    assert [record.message.partition(" ")[2] for record in caplog.records] == [
        "was removed while it was being written; it is there again, with all records"
    ]


def test_a_folder_that_is_removed_when_all_is_over_stays_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(_file, "_LOOK", 0.0)
    with History(tmp_path / "run") as history:
        history.update({"loss": 1.0})
        shutil.rmtree(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not caplog.records


def test_a_folder_that_is_removed_for_good(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(_file, "_LOOK", 0.0)
    folder = tmp_path / "run"
    with History(folder) as history:
        shutil.rmtree(folder)
        folder.write_text("a file where the folder was")
        for _ in range(5):
            history.update({"loss": 2.0})
    assert len([one for one in caplog.records if "cannot be written" in one.message]) == 1


def test_a_file_replaced_by_another_is_not_touched(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(_file, "_LOOK", 0.0)
    with History(tmp_path) as history:
        history.path.unlink()
        history.path.write_text("somebody else's")
        history.update({"loss": 2.0})
    assert (tmp_path / "metrics.jsonl").read_text() == "somebody else's"
    assert len(caplog.records) == 1


def test_a_closed_standard_error(tmp_path, python):
    code = "import os, ezpz_obs\nwith ezpz_obs.History('.') as h:\n"
    code += "    h.update({'x': 1.0})\n    os.system('echo native code >&2')"
    python(code, shell="2>&-")
    assert len(History.read(tmp_path)) == 1
    assert "native" not in (tmp_path / "metrics.jsonl").read_text()


def test_a_home_that_cannot_be_written(python):
    code = "import ezpz_obs\nwith ezpz_obs.History('.') as h: h.update({'x': 1.0})"
    env = {"HOME": "/proc/nowhere", "XDG_CACHE_HOME": "/proc/nowhere"}
    assert python(code, env=env).stderr == ""


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
    with pytest.raises(ezpz_obs.HistoryError, match=r"line 3 of .* the checksum is another"):
        History.read(tmp_path)
