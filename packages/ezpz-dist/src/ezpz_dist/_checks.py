"""What `ezpz doctor` checks: two ranks that meet and reduce."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import time
import warnings
from collections.abc import Mapping, MutableMapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import torch

from ezpz_device import get_torch_backend, get_torch_device_type
from ezpz_topo import CheckResult

from ._collectives import all_reduce
from ._info import launch_variables
from ._setup import cleanup, setup_torch
from ._timers import Timer

_RANKS = 2
_DONE = "done"
_ELEMENTS = 1 << 20  # 4 MiB of fp32: more than goes in one message


class Outcome(NamedTuple):  # of a backend on a rank; at the end, that the rank has done them all
    backend: str
    milliseconds: float  # of one all-reduce
    error: str


def check(seconds: float) -> CheckResult:
    outcomes = _run_ranks(0.85 * seconds)
    for rank, own in enumerate(outcomes):
        for each in own:
            if each.error:
                return _failed(f"rank {rank} of {_RANKS} by {each.backend}: {each.error}")
    for rank, own in enumerate(outcomes):
        if not own:
            return _failed(f"rank {rank} of {_RANKS} did not end in time: silent since its start")
        if own[-1].backend != _DONE:
            # The first use of a device can take longer than this.
            return CheckResult.warning(
                f"two ranks add by {own[-1].backend}; by their devices' backend rank {rank} did "
                f"not in {seconds:.1f} s",
                "give it more time: ezpz doctor --timeout=60 --only=all-reduce",
            )
    done, size = outcomes[0][:-1], 4 * _ELEMENTS
    shown = " and ".join(f"{each.backend} ({each.milliseconds:.1f} ms)" for each in done)
    facts = {each.backend: {"milliseconds": round(each.milliseconds, 2)} for each in done}
    return CheckResult.ok(f"two ranks add {size >> 20} MiB by {shown}", bytes=size, **facts)


def _failed(message: str) -> CheckResult:
    return CheckResult.error(
        message,
        "see the check network; then run it by hand, with more words: TORCH_CPP_LOG_LEVEL=INFO "
        "NCCL_DEBUG=INFO ezpz-launch -n 2 python -c 'import ezpz; ezpz.setup_torch()'",
    )


def _run_ranks(seconds: float) -> list[list[Outcome]]:
    """Run both ranks for at most so long and return what each sent; none is left afterwards."""
    until = time.monotonic() + seconds
    # A copy of this process has torch already, whose import takes a second; and no device is in
    # use here yet. macOS forbids what torch does to a copy.
    get = multiprocessing.get_context
    context = get("fork") if os.uname().sysname == "Linux" else get("spawn")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    outcomes: dict[Connection, list[Outcome]] = {}
    with contextlib.ExitStack() as ends:
        for rank in range(_RANKS):
            ours, theirs = context.Pipe(duplex=False)
            outcomes[ends.enter_context(ours)] = []
            # With less time than there is: a rank then says itself whom it waits for.
            words = (rank, port, 0.7 * seconds, theirs)
            process: BaseProcess = context.Process(target=run_rank, args=words)
            with warnings.catch_warnings():
                # Python 3.12 and newer: torch has threads, none of which holds a lock by now.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            ends.callback(process.join)
            ends.callback(process.kill)
        _receive(outcomes, until)
    return list(outcomes.values())


def _receive(outcomes: dict[Connection, list[Outcome]], until: float) -> None:
    left = list(outcomes)
    while left and (ready := wait(left, max(0.0, until - time.monotonic()))):
        for pipe in ready:
            assert isinstance(pipe, Connection)
            own = outcomes[pipe]
            try:
                own.append(pipe.recv())
            except EOFError:
                left.remove(pipe)
                if not own or own[-1].backend != _DONE:
                    own.append(Outcome("gloo or its device's backend", 0.0, "its process ended"))
            if own[-1].error:
                return  # the other one waits for it


def run_rank(rank: int, port: int, seconds: float, pipe: Connection) -> None:
    """Be one of the ranks, say how each backend did, and at the end that it is."""
    before = dict(os.environ)
    become(rank, port, os.environ)
    # A copy of a process that has computed has none of OpenMP's threads, and would wait for them.
    torch.set_num_threads(1)
    # What it prints is said in the outcome, or of no interest beside a table.
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stderr(nowhere):
        for device, backend in _ways(before):
            os.environ["TORCH_DEVICE"] = device
            os.environ.pop("TORCH_BACKEND", None)
            try:
                outcome = Outcome(backend, _add(rank, device, backend, seconds), "")
            except Exception as error:  # noqa: BLE001  # whatever it is, it is what was wrong
                first = str(error).partition("\n")[0][:300]
                outcome = Outcome(backend, 0.0, f"{type(error).__name__}: {first}")
            pipe.send(outcome)
            if outcome.error:
                return
        pipe.send(Outcome(_DONE, 0.0, ""))


def _ways(env: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (device type, backend) of each way to talk: gloo, and that of two devices."""
    ways = [("cpu", "gloo")]
    device_type = get_torch_device_type(env)
    if device_type in ("cuda", "xpu") and getattr(torch, device_type).device_count() >= _RANKS:
        ways.append((device_type, get_torch_backend(env)))
    return ways


def _add(rank: int, device: str, backend: str, seconds: float) -> float:
    """Set up, add, and return the milliseconds of an all-reduce after the first."""
    setup_torch(backend=backend, timeout=seconds)
    try:
        where = "cpu" if device == "cpu" else f"{device}:{rank}"
        timer = Timer()
        for _ in range(2):
            tensor = torch.full((_ELEMENTS,), float(rank + 1), device=where)
            with timer:
                total = all_reduce(tensor)
            low, high = float(total.min()), float(total.max())
            if (low, high) != (3.0, 3.0):
                raise ArithmeticError(f"1 + 2 is {low:g} to {high:g}; expected 3")
    finally:
        cleanup()
    return 1e3 * timer.timing.last


def become(rank: int, port: int, env: MutableMapping[str, str]) -> None:
    """Make this environment that of a rank of a world of two, and of no other."""
    for name in {*launch_variables(), "EZPZ_LAUNCHER", "EZPZ_LOCAL_DEVICE", "EZPZ_CONTROL"}:
        env.pop(name, None)
    world = {"RANK": rank, "WORLD_SIZE": _RANKS, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": _RANKS}
    env.update({name: str(value) for name, value in world.items()})
    env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
