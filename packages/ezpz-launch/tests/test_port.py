import socket

import pytest

from ezpz_launch import LaunchError, _port


@pytest.fixture(params=["kernel's table", "bind"])
def way(request, monkeypatch):
    if request.param == "bind":
        monkeypatch.setattr(_port, "_TABLES", ("/nonexistent",))


def test_it_can_be_bound_and_is_no_ephemeral_one(way):
    port = _port.free_port()
    assert 20000 <= port < 30000
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


def test_a_port_that_is_taken_is_passed_over(way, monkeypatch):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        monkeypatch.setattr(_port, "_FIRST", holder.getsockname()[1])
        monkeypatch.setattr(_port, "_COUNT", 1)
        with pytest.raises(LaunchError, match="is taken"):
            _port.free_port()
