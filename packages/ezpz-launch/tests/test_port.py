import socket

import pytest

from ezpz_launch import LaunchError
from ezpz_launch._planning import port as _port


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
