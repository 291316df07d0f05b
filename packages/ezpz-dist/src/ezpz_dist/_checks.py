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
from ezpz_topo import FAMILIES, CheckResult

from ._collectives import all_reduce
from ._setup import cleanup, setup_torch

_RANKS = 2
_END = "end"
_OF_IT = 0.7
"""Of the time that there is: a rank then says itself whom it waits for."""

_ELEMENTS = 1 << 20
"""4 MiB of fp32: more than goes in one message."""

_OF_THE_STAMP = ("EZPZ_LAUNCHER", "EZPZ_LOCAL_DEVICE", "EZPZ_CONTROL", "MASTER_ADDR", "MASTER_PORT")


class Said(NamedTuple):
    """What a rank says: the backend, milliseconds of one all-reduce, and what was wrong."""

    backend: str
    milliseconds: float
    wrong: str


class _Rank(NamedTuple):
    process: BaseProcess
    pipe: Connection


def check(seconds: float) -> CheckResult:
    """Start two ranks on this host, and add a tensor of each, by every backend that they have."""
    said = _of_ranks(0.85 * seconds)
    facts: dict[str, object] = {}
    for rank, words in enumerate(said):
        for each in words:
            if each.wrong:
                return _failed(f"rank {rank} of {_RANKS} by {each.backend}: {each.wrong}")
    for rank, words in enumerate(said):
        if not words:
            return _failed(f"rank {rank} of {_RANKS} did not end in time: silent since its start")
        if words[-1].backend != _END:
            # The first use of a device can take longer than this.
            return CheckResult.warning(
                f"two ranks add by {words[-1].backend}; by their devices' backend rank {rank} did "
                f"not in {seconds:.1f} s",
                "give it more time: ezpz doctor --timeout=60 --only=all-reduce",
            )
    for each in said[0][:-1]:
        facts[each.backend] = {"milliseconds": round(each.milliseconds, 2)}
    shown = " and ".join(f"{each.backend} ({each.milliseconds:.1f} ms)" for each in said[0][:-1])
    return CheckResult.ok(
        f"two ranks add {4 * _ELEMENTS >> 20} MiB by {shown}", bytes=4 * _ELEMENTS, **facts
    )


def _failed(message: str) -> CheckResult:
    return CheckResult.error(
        message,
        "see the check network; then run it by hand, with more words: TORCH_CPP_LOG_LEVEL=INFO "
        "NCCL_DEBUG=INFO ezpz-launch -n 2 python -c 'import ezpz; ezpz.setup_torch()'",
    )


def _of_ranks(seconds: float) -> list[list[Said]]:
    """Run both ranks for at most so long and return what each said; none is left afterwards."""
    until = time.monotonic() + seconds
    # A copy of this process has torch already, whose import takes a second; and no device is in
    # use here yet. macOS forbids what torch does to a copy.
    linux = os.uname().sysname == "Linux"
    get = multiprocessing.get_context
    context = get("fork") if linux else get("spawn")
    port = _free_port()
    ranks: list[_Rank] = []
    try:
        for rank in range(_RANKS):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=run_rank, args=(rank, port, _OF_IT * seconds, theirs))
            with warnings.catch_warnings():
                # Python 3.12 and newer: torch has threads, none of which holds a lock by now.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            ranks.append(_Rank(process, ours))
        return _listen(ranks, until)
    finally:
        for each in ranks:
            each.process.kill()
            each.process.join()
            each.pipe.close()


def _listen(ranks: list[_Rank], until: float) -> list[list[Said]]:
    said: list[list[Said]] = [[] for _ in ranks]
    talking = {each.pipe: words for each, words in zip(ranks, said, strict=True)}
    while talking:
        heard = wait(list(talking), max(0.0, until - time.monotonic()))
        if not heard:
            return said
        for pipe in heard:
            assert isinstance(pipe, Connection)
            words = talking[pipe]
            try:
                words.append(pipe.recv())
            except EOFError:
                del talking[pipe]
                if not words or words[-1].backend != _END:
                    words.append(Said("gloo or its device's backend", 0.0, "its process ended"))
            if words[-1].wrong:
                return said  # the other one waits for it
    return said


def run_rank(rank: int, port: int, seconds: float, pipe: Connection) -> None:
    """Be one of the ranks, say how each backend did, and at the end that it is."""
    asked = dict(os.environ)
    become(rank, port, os.environ)
    # A copy of a process that has computed has none of OpenMP's threads, and would wait for them.
    torch.set_num_threads(1)
    # What it prints is said in other words, or of no interest to who asked for a table.
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stderr(nowhere):
        for device, backend in _ways(asked):
            os.environ["TORCH_DEVICE"] = device
            os.environ.pop("TORCH_BACKEND", None)
            try:
                said = Said(backend, _add(rank, device, backend, seconds), "")
            except Exception as error:  # noqa: BLE001  # whatever it is, it is what was wrong
                first = str(error).partition("\n")[0][:300]
                said = Said(backend, 0.0, f"{type(error).__name__}: {first}")
            pipe.send(said)
            if said.wrong:
                return
        pipe.send(Said(_END, 0.0, ""))


def _ways(asked: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (device type, backend) of each way to talk: gloo, and that of two devices."""
    ways = [("cpu", "gloo")]
    device_type = get_torch_device_type(asked)
    if device_type in ("cuda", "xpu") and getattr(torch, device_type).device_count() >= _RANKS:
        ways.append((device_type, get_torch_backend(asked)))
    return ways


def _add(rank: int, device: str, backend: str, seconds: float) -> float:
    """Set up, add, and return the milliseconds of an all-reduce after the first."""
    setup_torch(backend=backend, timeout=seconds)
    try:
        where = "cpu" if device == "cpu" else f"{device}:{rank}"
        for _ in range(2):
            tensor = torch.full((_ELEMENTS,), float(rank + 1), device=where)
            begun = time.perf_counter()
            total = all_reduce(tensor)
            low, high = float(total.min()), float(total.max())
            took = 1e3 * (time.perf_counter() - begun)
            if (low, high) != (3.0, 3.0):
                raise ArithmeticError(f"1 + 2 is {low:g} to {high:g}; expected 3")
    finally:
        cleanup()
    return took


def become(rank: int, port: int, env: MutableMapping[str, str]) -> None:
    """Make this environment that of a rank of a world of two, and of no other."""
    for family in FAMILIES:
        for names in (
            family.rank, family.world_size, family.local_rank, family.local_world_size,
            family.node_rank, family.num_nodes, family.proof,
        ):  # fmt: skip
            for name in names:
                env.pop(name, None)
    for name in _OF_THE_STAMP:
        env.pop(name, None)
    world = {"RANK": rank, "WORLD_SIZE": _RANKS, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": _RANKS}
    env.update({name: str(value) for name, value in world.items()})
    env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")


def _free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])
