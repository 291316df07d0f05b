import socket
import subprocess
import sys

import pytest

from ezpz_launch import LaunchError
from ezpz_launch import _environment as _port


def test_it_can_be_bound_and_is_no_ephemeral_one():
    port = _port.free_port()
    assert 20000 <= port < 30000
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("family", "address"),
    [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, ""), (socket.AF_INET6, "")],
)
def test_a_port_that_is_taken_is_passed_over(monkeypatch, family, address):
    with socket.socket(family) as holder:
        holder.bind((address, 0))
        holder.listen()
        monkeypatch.setattr(_port, "_FIRST", holder.getsockname()[1])
        monkeypatch.setattr(_port, "_COUNT", 1)
        with pytest.raises(LaunchError, match="is taken"):
            _port.free_port()


CHOOSE = """
import os
from ezpz_launch._environment import free_port
os.urandom = bytes
print(free_port(), flush=True)
input()
"""


def test_launches_at_once_have_a_port_each_and_the_next_one_what_they_leave(process):
    def choose():
        pipe = subprocess.PIPE
        child = process(sys.executable, "-c", CHOOSE, stdin=pipe, stdout=pipe, text=True)
        return child, child.stdout.readline()

    # Each would choose the same, and none of their ranks listens yet.
    (first, one), (_, two), (_, three) = choose(), choose(), choose()
    assert len({one, two, three}) == 3
    first.communicate("\n", timeout=60)
    assert choose()[1] == one
