"""What is behind a port: rank 0's store, another's, or no store at all."""

import socket
import time
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from ezpz_dist._address import Job
from ezpz_dist._rendezvous import JOB_KEY, NobodyError, StrangerError, knock, visit

JOB = Job({"user": "1", "port": "2"}, "h", 3)
SECOND = timedelta(seconds=1)


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)


# Both of torch's servers: they answer by their own code.
@pytest.mark.parametrize("use_libuv", [True, False])
def test_a_store_of_torch_answers(use_libuv):
    store = TCPStore(
        "127.0.0.1", 0, None, is_master=True, wait_for_workers=False, use_libuv=use_libuv
    )
    knock("127.0.0.1", store.port, 5.0)


def test_this_jobs_store(store):
    store.set(JOB_KEY, JOB.written().decode())
    client, found = visit("127.0.0.1", store.port, 5.0, SECOND, JOB)
    assert found == JOB
    assert client.timeout == SECOND
    client.set("k", "v")
    assert store.get("k") == b"v"


def test_any_store(store):
    client, found = visit("127.0.0.1", store.port, 5.0, SECOND, None)
    assert found is None
    client.set("k", "v")


def test_a_store_without_a_job(store):
    with pytest.raises(StrangerError, match="a store of torch that no ezpz_dist opened"):
        visit("127.0.0.1", store.port, 5.0, SECOND, JOB)
    with pytest.raises(StrangerError, match="a store of torch that no ezpz_dist opened"):
        visit("127.0.0.1", store.port, 5.0, SECOND, JOB, patience=0.1)


def test_another_jobs_store(store):
    store.set(JOB_KEY, Job({"user": "5", "port": "2"}, "there", 77).written().decode())
    what = r"the store of another job, by process 77 on there \(user 5, not 1\)"
    with pytest.raises(StrangerError, match=what):
        visit("127.0.0.1", store.port, 5.0, SECOND, JOB)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("closes", "a listener that closes the connection|a listener that breaks off"),
        ("resets", "a listener that breaks off|a listener that closes the connection"),
        ("http", r"a listener that is no store of torch \(it answers b'HTTP'\)"),
        ("silent", r"a listener that says nothing for 0.2 s"),
    ],
)
def test_a_listener_that_is_no_store(listener, kind, what):
    start = time.monotonic()
    with pytest.raises(StrangerError, match=what):
        visit("127.0.0.1", listener(kind), 0.2, SECOND, JOB)
    assert time.monotonic() - start < 60  # torch's own client: for ever


def test_nobody():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(NobodyError, match="connection refused"):
            knock("127.0.0.1", bound.getsockname()[1], 1.0)
