"""Single sections: what fails is a line of the table, or fails the section; never a figure."""

import sys

import nodelists
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
