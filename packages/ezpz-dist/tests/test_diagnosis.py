"""The roll call of more ranks than a test can start, and its requests to the store."""

import json
import socket
import threading
import time
import zlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError, HashStore

from ezpz_dist import _diagnosis, _watch
from ezpz_dist._addresses import pack
from ezpz_dist._diagnosis import (
    Location,
    Responder,
    RollCall,
    SideStore,
    Wakeup,
    arrived,
    call_roll,
    values,
)


@pytest.fixture
def side():
    """Make side stores; each rings at its own wakeup, as if rank 0 passed it on."""
    bells = []

    def make(rank, hosts, store, connect=None):
        ours, theirs = socket.socketpair()
        wakeup = Wakeup(ours, shared=False)
        wakeup.ring = lambda *_: theirs.send(b"!")
        bells.append((wakeup, theirs))
        return SideStore(rank, hosts, store, connect or (lambda seconds: store), wakeup)

    yield make
    for wakeup, theirs in bells:
        wakeup.close()
        theirs.close()


def test_a_node_that_is_gone_is_told_in_time(monkeypatch, side):
    # 0.05 s for each of its ranks, one after the other, took longer than there is.
    monkeypatch.setattr(_diagnosis, "_LONGEST", 30.0)  # 1.8 s are of an idle machine
    size = 2000
    store = dist.HashStore()
    store.set("processes", pack([(1000 + rank, 1) for rank in range(size)]))
    store.set("left/120", "cleanup() at train.py:9")
    hosts = [f"n{rank // 100}" for rank in range(size)]
    responder = Responder(side(0, hosts, store))
    began = time.monotonic()
    call = call_roll(responder)
    assert time.monotonic() - began < 60
    assert len(call.silent) == size - 1
    text, missing = _watch.describe_missing(call, 0)
    assert missing == list(range(1, size))
    assert "rank 1 on n0 does not answer" in text
    assert "1999 ranks in all do not answer: 1-1999" in text


def test_what_is_told_to_thousands_is_short():
    hosts = [f"nid{rank // 4:06d}" for rank in range(10_000)]
    locations = {
        rank: Location(rank, hosts[rank], "train.py:7 in step", doing="barrier()", stack=("a",) * 9)
        for rank in range(10_000)
        if rank != 77
    }
    call = RollCall(locations, {77: "has ended (pid 3)"}, {77: hosts[77]})
    said = json.dumps(call.as_json())
    assert len(said) < 200_000, "every rank reads it"
    assert len(zlib.compress(said.encode())) < 30_000
    assert RollCall.from_json(json.loads(said), hosts) == call


def test_another_threads_collective_is_not_the_main_threads():
    def save():
        with _watch.waiting("save", world):
            seen.extend(_diagnosis._waits)

    seen: list[str] = []
    world = SimpleNamespace(info=SimpleNamespace(world_size=2))
    with _watch.waiting("barrier()", world):
        thread = threading.Thread(target=save)
        thread.start()
        thread.join()
        assert seen == _diagnosis._waits == ["barrier()"]
    assert _diagnosis._waits == []


def test_a_responder_that_finds_no_store_at_first_tries_again(side):
    store, tries = dist.HashStore(), []

    class Busy(HashStore):
        def add(self, key: str, more: int) -> int:
            raise DistNetworkError("the main thread is in a long request")

    def connect(seconds):
        tries.append(seconds)
        if len(tries) == 1:
            raise DistNetworkError("the server stands still")
        return store

    responder = Responder(side(1, ["a", "b"], Busy(), connect))
    responder.start()
    SideStore(0, ["a", "b"], store, connect, responder.side.wakeup).post(store, "closed")
    responder.join(120)
    assert not responder.is_alive()
    assert (responder.lost, len(tries)) == (True, 2)


# Requests for the keys of many ranks.

MANY = [f"left/{rank}" for rank in range(10_080)]


class Counted(HashStore):
    """A store that notes how many keys each request names."""

    def __init__(self):
        super().__init__()
        self.asked: list[int] = []

    def check(self, keys: list[str]) -> bool:
        self.asked.append(len(keys))
        return bool(super().check(keys))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.asked.append(len(keys))
        return list(super().multi_get(keys))


def filled(keys):
    store = Counted()
    for key in keys:
        store.set(key, key)
    return store


def test_no_request_grows_with_the_number_of_ranks():
    # A server's time for a request grows with the square of its length.
    store = filled(MANY)
    assert arrived(store, MANY, 1.0) == MANY
    assert [value.decode() for value in values(store, MANY)] == MANY
    assert max(store.asked) <= 1024
    assert len(store.asked) < 3 * len(MANY) / 1000 + 2
    store = filled(MANY[1:])
    assert arrived(store, MANY, 0.0) == MANY[1:], "a look ends at the first part that misses one"
    assert max(store.asked) <= 1024
    store = filled([])
    assert arrived(store, [], 1.0) == values(store, []) == store.asked == []


def test_torch_is_not_the_users_wherever_it_is_installed(monkeypatch):
    monkeypatch.setattr("site.getsitepackages", list)
    _diagnosis._libraries.cache_clear()
    try:
        assert not _diagnosis.is_users(torch.distributed.__file__)
        assert _diagnosis.is_users(f"{torch.__path__[0]}_train.py"), "beside it"
    finally:
        _diagnosis._libraries.cache_clear()
