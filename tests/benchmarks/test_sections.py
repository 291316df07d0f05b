"""Single sections: what fails is a line of the table, or fails the section; never a figure."""

import sys

import launch
import nodelists
import obs
import pytest
import startup
from callee import CalleeError
from peers import Peer

HERE = {"x": Peer("x 1.0", sys.executable)}


def test_a_command_that_breaks_is_not_a_quick_one():
    assert startup.seconds_of(["sh", "-c", "exit 1"], {0, 1}) > 0
    with pytest.raises(CalleeError, match="ended with 1"):
        startup.seconds_of(["sh", "-c", "exit 1"], {0})
    trace = "echo 'Traceback (most recent call last)' >&2; echo 'OSError: it broke' >&2; exit 1"
    with pytest.raises(CalleeError, match="ended with 1"):
        startup.seconds_of(["sh", "-c", trace], {0, 1})


def test_a_peer_that_says_something_else_is_not_compared(monkeypatch):
    wrong = "def expand(nodelist): return ['n1']\ndef fold(hosts): return 'n1'\n"
    monkeypatch.setattr(nodelists, "PEERS", {"x": wrong})
    monkeypatch.setattr(nodelists, "present", lambda _: (dict(HERE), {}))
    rows = nodelists.ten_thousand(1)
    assert len(rows) == 5
    assert all("AssertionError" in row.missing for row in rows), rows


def test_fewer_steps_are_not_a_million(tmp_path):
    rows = {row.key: row for row in obs.million(100, str(tmp_path))}
    assert rows["obs/some-report"].what == "100 steps: report"
    assert rows["obs/some-report"].ours is not None
    assert rows["obs/million-report"].missing == "only 100 were run"
    assert len(rows) == 8


def test_a_slurm_that_is_not_there_is_a_missing_peer(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1)
    rows = launch.under_slurm(1)
    assert [row.key for row in rows] == [
        f"launch/{figure}/srun" for figure in ("first-line", "ready", "true")
    ]
    assert all("not root" in row.missing or "not installed" in row.missing for row in rows)
