"""The check ``all-reduce`` of ``ezpz doctor``: two real ranks, and what can go wrong with them."""

import multiprocessing
import os
import re
import signal
import time

import pytest
import torch

from ezpz_dist import _checks
from ezpz_topo import get_rank_info


@pytest.fixture(autouse=True)
def nothing_is_left():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    assert multiprocessing.active_children() == []


def test_two_ranks_add_in_two_ways_and_both_are_told(monkeypatch):
    # In a rank of another launch that has computed: a copy of it has none of OpenMP's threads.
    torch.set_num_threads(2)
    torch.ones(1 << 20).sum()
    outer = {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "x", "EZPZ_RANK": "3", "EZPZ_WORLD_SIZE": "4", "PMI_RANK": "3",
        "PMI_SIZE": "4", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "9", "TORCH_BACKEND": "gloo",
    }  # fmt: skip
    for name, value in outer.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(_checks, "_ways", lambda asked: [("cpu", "gloo"), ("cpu", "gloo")])
    result = _checks.check(100)
    assert result.status == "ok"
    assert result.message.startswith("two ranks add 4 MiB by gloo (")
    assert result.message.count("gloo (") == 2
    assert result.details["bytes"] == 4 << 20
    assert result.details["gloo"]["milliseconds"] > 0


def test_the_environment_of_a_rank_is_of_that_world_alone():
    env = {"PMI_RANK": "3", "PMI_SIZE": "4", "SLURM_PROCID": "1", "SLURM_JOB_ID": "7", "A": "b"}
    _checks.become(1, 4321, env)
    info = get_rank_info(env)
    assert (info.rank, info.world_size, info.local_rank) == (1, 2, 1)
    assert (env["MASTER_PORT"], env["SLURM_JOB_ID"], env["A"]) == ("4321", "7", "b")
    assert "PMI_RANK" not in env


def test_an_interface_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "hsn7")
    result = _checks.check(100)
    assert result.status == "error"
    assert result.message.startswith("rank ")
    assert " of 2 by gloo: " in result.message
    assert "hsn7" in result.message
    assert "see the check network" in result.remedy


def test_too_little_time_is_an_error():
    result = _checks.check(0.001)
    assert result.status == "error"
    assert re.match("rank [01] of 2 (did not end in time|by gloo)", result.message)


@pytest.mark.parametrize(
    ("how", "seconds", "said"),
    [
        (signal.SIGKILL, 100, "rank 1 of 2 by .*: its process ended"),
        (signal.SIGSTOP, 8, "rank 0 of 2 by gloo: SetupError: .*rank 1"),
    ],
)
def test_a_rank_that_dies_or_stops_is_an_error(how, seconds, said, monkeypatch):
    kind = multiprocessing.get_context("fork").Process
    real, started = kind.start, []

    def start(process):
        real(process)
        started.append(process)
        if len(started) == 2:
            os.kill(process.pid, how)

    monkeypatch.setattr(kind, "start", start)
    result = _checks.check(seconds)
    assert result.status == "error"
    assert re.match(said, result.message)


@pytest.mark.slow
def test_devices_that_take_long_are_a_warning(monkeypatch):
    """Two ways on the CPU stand for the CPU's and the devices'; the second takes for ever."""
    real, calls = _checks._add, []

    def add(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            time.sleep(1000)
        return real(*arguments)

    monkeypatch.setattr(_checks, "_ways", lambda asked: [("cpu", "gloo"), ("cpu", "gloo")])
    monkeypatch.setattr(_checks, "_add", add)
    result = _checks.check(8)
    assert result.status == "warning"
    assert "two ranks add by gloo; by their devices' backend rank 0 did not in 8.0 s" in (
        result.message
    )
    assert "--timeout=60" in result.remedy
