"""Which port rank 0 takes, and what it says of who is in the way."""

import errno
import logging
import os
import socket
from datetime import timedelta

import pytest

from ezpz_dist import SetupError
from ezpz_dist._address import Job, Place
from ezpz_dist._rendezvous import PORTS, candidates, open_store, warn_of_a_foreign_address
from ezpz_topo import RankInfo, get_hostname

INFO = RankInfo(0, 2, 0, 2, 0, "torchrun")
TWO_NODES = RankInfo(0, 2, 0, 1, 0, "torchrun")
JOB = Job({"user": "1", "port": "2"}, "h", 3)
SECOND = timedelta(seconds=1)


def place(*ports, addresses=("127.0.0.1",), job=JOB):
    return Place("there", addresses, ports, job, "a test")


@pytest.mark.parametrize("port", [1, 29500, 65535])
def test_candidates_are_the_same_everywhere(port):
    first, *others = candidates(port)
    assert first == port
    assert candidates(port) == (first, *others)
    assert len({first, *others}) == 8
    assert all(each in PORTS for each in others)
    assert candidates(port + 1)[1:] != tuple(others)


@pytest.mark.parametrize("info", [INFO, TWO_NODES])
@pytest.mark.parametrize("kind", ["silent", "http", "resets"])
def test_a_taken_port_is_passed_over(listener, caplog, kind, info):
    port = listener(kind)
    with caplog.at_level(logging.WARNING):
        store, address, found = open_store(place(port, 0), info, SECOND)
    assert address == "127.0.0.1"
    assert found == store.port != port
    (record,) = caplog.records
    said = (
        f"rank 0 listens on port {found}, for there:{port} (a test) is taken ({port}: held by a l"
    )
    assert record.getMessage().startswith(said)


def test_a_port_that_is_bound_and_not_listened_at_is_passed_over(caplog):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        open_store(place(bound.getsockname()[1], 0), INFO, SECOND)
    assert "held by a process that does not listen" in caplog.text


def test_another_jobs_store_is_passed_over(caplog):
    other = Job({"user": "1", "port": "2", "PBS job": "8"}, "h", 77)
    first, _, port = open_store(place(0, job=other), INFO, SECOND)
    mine = Job({"user": "1", "port": "2", "PBS job": "7"}, "h", 78)
    second, _, found = open_store(place(port, 0, job=mine), INFO, SECOND)
    assert found != port
    said = f"{port}: held by the store of another job, by process 77 on h (PBS job 8, not 7)"
    assert said in caplog.text
    del first, second


def test_a_second_rank_0_is_an_error_that_names_the_first():
    first, _, port = open_store(place(0), INFO, SECOND)
    with pytest.raises(SetupError) as caught:
        open_store(place(port, 0), INFO, SECOND)
    said = str(caught.value)
    assert said.startswith(f"rank 0 of 2 is there twice: process 3 on h holds port {port}, and")
    assert f"process {os.getpid()} on {get_hostname()}; expected one" in said
    del first


def test_no_port_is_left(listener):
    ports = listener("http"), listener("http")
    with pytest.raises(SetupError) as caught:
        open_store(place(*ports), INFO, SECOND)
    said = str(caught.value)
    assert said.startswith(
        f"rank 0 of 2 on {get_hostname()} finds no free port for there:{ports[0]}"
    )
    assert all(f"{port}: held by a listener that is no store" in said for port in ports)
    assert "export another MASTER_PORT on every rank" in said


def test_a_port_that_cannot_be_had_for_another_reason(monkeypatch):
    def no(address, port):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("ezpz_dist._rendezvous._listen", no)
    with pytest.raises(
        SetupError, match="cannot listen on port 5 \\(a test\\): Too many open files"
    ):
        open_store(place(5), INFO, SECOND)


def test_on_one_node_nobody_outside_reaches_the_store():
    store, _, port = open_store(place(0), INFO, SECOND)
    # What is bound to every address is in the way of every other.
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.2", port))
    del store
    store, _, port = open_store(place(0), TWO_NODES, SECOND)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.2", port))
    del store


def test_rank_0_on_another_host_than_it_is_looked_for(caplog):
    warn_of_a_foreign_address(place(1, addresses=("127.0.0.1", "192.0.2.1")))
    assert not caplog.records
    warn_of_a_foreign_address(place(1, addresses=("192.0.2.1",)))
    said = (
        f"rank 0 is on {get_hostname()}, and the other ranks look for it at there:1 (a test), whi"
    )
    assert said in caplog.text


def test_rank_0_may_hold_connections_of_all_ranks(ranks):
    ranks(
        1,
        """
        import resource
        from ezpz_dist._rendezvous import _make_room
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
        _make_room(10)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 600
        _make_room(200)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1112
        """,
    )
    _, _, errors = ranks(
        1,
        """
        import resource
        from ezpz_dist._rendezvous import _make_room
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, 700))
        _make_room(1000)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 700
        """,
        check=False,
    )[0]
    assert "rank 0 may open 700 files, and holds up to three connections" in errors
