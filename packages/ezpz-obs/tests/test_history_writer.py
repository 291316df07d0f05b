"""What cannot be written: training goes on, with one warning."""

import json
import os

import pytest

from ezpz_obs import History

LIMITED = """
import resource, signal, sys, ezpz_obs
# A file may grow to so many bytes: what a full disk does, also to the last line, in part.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit, least = int(sys.argv[1]), int(sys.argv[1]) > 1
if least: history = ezpz_obs.History("run")
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
if not least: history = ezpz_obs.History("run")
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
    for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines():
        json.loads(line)  # nothing stands behind a torn line


def test_a_closed_standard_error(tmp_path, python):
    code = "import os, ezpz_obs\nwith ezpz_obs.History('.') as h:\n"
    code += "    h.update({'x': 1.0})\n    os.system('echo native code >&2')"
    python(code, shell="2>&-")
    assert len(History.read(tmp_path)) == 1
    assert "native" not in (tmp_path / "metrics.jsonl").read_text()


def test_an_outdir_that_cannot_be_made_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        History(tmp_path / "file" / "run")
