"""A roll call of more ranks than a test can start: what it costs, and what it tells others."""

import json
import threading
import time
import zlib

import torch.distributed as dist
from torch.distributed import DistNetworkError

from ezpz_dist import _diagnosis, _watch
from ezpz_dist._diagnosis import Board, RollCall, Standing, Watcher, call_roll


def test_a_node_that_is_gone_is_told_in_time():
    # 0.05 s for each of its ranks, one after the other, took longer than there is.
    size = 2000
    store = dist.HashStore()
    for rank in range(size):
        store.set(f"facts/{rank}", json.dumps([f"n{rank // 100}", 1000 + rank, 1, {}]))
    store.set("left/120", "cleanup() at train.py:9")
    hosts = [f"n{rank // 100}" for rank in range(size)]
    watcher = Watcher(Board(0, hosts, store, lambda seconds: store))
    began = time.monotonic()
    call = call_roll(watcher)
    assert time.monotonic() - began < 60
    assert len(call.silent) == size - 1
    text, missing = _watch.tell_missing(call, 0)
    assert missing == list(range(1, size))
    assert "rank 1 on n0 does not answer" in text
    assert "1999 ranks in all do not answer: 1-1999" in text


def test_what_is_told_to_thousands_is_short():
    hosts = [f"nid{rank // 4:06d}" for rank in range(10_000)]
    standings = {
        rank: Standing(rank, hosts[rank], "train.py:7 in step", doing="barrier()", stack=("a",) * 9)
        for rank in range(10_000)
        if rank != 77
    }
    call = RollCall(standings, {77: "has ended (pid 3)"}, {77: hosts[77]})
    said = json.dumps(call.as_json())
    assert len(zlib.compress(said.encode())) < 30_000
    assert RollCall.from_json(json.loads(said), hosts) == call


def test_another_threads_collective_is_not_the_main_threads():
    def save():
        _diagnosis.enter("save")
        seen.append(_diagnosis.current())
        _diagnosis.leave()

    seen: list[str] = []
    _diagnosis.enter("barrier()")
    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    assert seen == [_diagnosis.current()] == ["barrier()"]
    _diagnosis.leave()
    assert _diagnosis.current() == ""


def test_a_watcher_that_finds_no_store_at_first_tries_again():
    store, tries = dist.HashStore(), []

    def connect(seconds):
        tries.append(seconds)
        if len(tries) == 1:
            raise DistNetworkError("the server stands still")
        return store

    watcher = Watcher(Board(0, ["a", "b"], store, connect))
    watcher.start()
    watcher.board.post(store, "closed", [0])
    watcher.join(120)
    assert not watcher.is_alive()
    assert (watcher.lost, len(tries)) == (True, 2)
