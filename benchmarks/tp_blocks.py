"""One rank of the worlds in which ``hatch run bench:tp`` times its blocks.

A process has one world, so each kind of world and each degree has processes of its own:
``tp_blocks.py '{"world": "fake", "degree": 2, ...}'`` prints JSON for its parent.
"""

import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from tp_variants import BLOCKS, VARIANTS, build

Times = tuple[float, float]


@contextlib.contextmanager
def world(job: dict[str, Any]) -> Iterator[None]:
    """Join a world: fake ranks that are not there, or real ones over gloo or NCCL."""
    rank, size = job["rank"], job["degree"]
    if job["world"].startswith("fake"):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    else:
        if job["world"] == "nccl":
            torch.cuda.set_device(rank)
        store = dist.TCPStore("127.0.0.1", job["port"])
        dist.init_process_group(job["world"], store=store, rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Subject:
    """A variant of a block with its input, ready to be timed."""

    def __init__(self, variant: str, block: str, hidden: int, job: dict[str, Any]) -> None:
        self.device = "cuda" if job["world"] in {"fake cuda", "nccl"} else "cpu"
        self.real = not job["world"].startswith("fake")
        # Ranks that are not there keep nobody waiting, so that what others do on this machine
        # need not count.
        self.clock = time.process_time if job["world"] == "fake" else time.perf_counter
        self.module: nn.Module = build(variant, block, hidden, self.device, job["bias"])
        shape = (*BLOCKS[block][1], hidden)
        self.input = torch.full(shape, 0.5, device=self.device, requires_grad=True)
        self.grad = torch.full(shape, 0.5, device=self.device)

    def sync(self) -> None:
        """Wait until a device has done what it was given."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def once(self) -> Times:
        """Run forward and backward, as in the middle of a model; return the seconds of each."""
        for tensor in (self.input, *self.module.parameters()):
            tensor.grad = None
        self.sync()
        began = self.clock()
        output = self.module(self.input)
        if isinstance(output, AsyncCollectiveTensor):
            output.wait()  # DTensor leaves that to whoever reads the output
        self.sync()
        middle = self.clock()
        output.backward(self.grad)
        self.sync()
        return middle - began, self.clock() - middle

    def several(self, times: int) -> Times:
        """The mean of so many runs after one to warm up; real ranks start together."""
        if self.real:
            dist.barrier()
        if times > 1:
            self.once()
        runs = [self.once() for _ in range(times)]
        forward, backward = (sum(column) / times for column in zip(*runs, strict=True))
        return forward, backward

    def alone(self) -> float:
        """About how long one run takes, once warm."""
        first = self.agreed(sum(self.several(1)))
        return first if first > 0.2 else min(sum(self.several(2)) for _ in range(2))

    def agreed(self, value: float) -> float:
        """Rank 0's value, on every real rank: all must run equally often."""
        if not self.real:
            return value
        box = torch.tensor([value], device=self.device, dtype=torch.float64)
        dist.broadcast(box, 0)
        return box.item()

    def saved_bytes(self) -> int:
        """What forward keeps for backward, besides parameters and input."""
        known = {_memory(tensor) for tensor in (self.input, *self.module.parameters())}
        saved: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            local = getattr(tensor, "_local_tensor", tensor)
            if _memory(local) not in known:
                saved[_memory(local)] = local.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = self.module(self.input)
        del output
        return sum(saved.values())


def _memory(tensor: Tensor) -> int:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr()


def blocks(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Time every variant in turn (A B C C B A ...) for each block and hidden size."""
    rows = []
    for hidden in job["hidden"]:
        for block in job["blocks"]:
            # Where products take all the time, what is left to see is not worth minutes.
            if hidden >= 4096 and job["degree"] > 2:
                continue
            names = [name for name in VARIANTS if hidden < 4096 or name != "functional"]
            subjects = {name: Subject(name, block, hidden, job) for name in names}
            agreed = subjects["ezpz"].agreed
            alone = {name: subject.alone() for name, subject in subjects.items()}
            runs = {
                name: int(agreed(max(1, min(20, 0.002 // seconds))))
                for name, seconds in alone.items()
            }
            seconds = sum(runs[name] * seconds for name, seconds in alone.items())
            # Short waits for each other scatter most, and cost least to repeat.
            budget = job["seconds"] * (3 if subjects["ezpz"].real and hidden < 1024 else 1)
            # A ratio of three rounds says nothing; of the largest each takes seconds.
            least = 3 if hidden >= 4096 else 11
            rounds = int(agreed(max(least, min(300, budget // seconds))))
            taken: dict[str, list[Times]] = {name: [] for name in names}
            gc.collect()
            gc.disable()
            for turn in range(rounds):
                for name in names[:: -1 if turn % 2 else 1]:
                    taken[name].append(subjects[name].several(runs[name]))
            gc.enable()
            rows.append(
                {
                    "world": job["world"],
                    "block": block,
                    "hidden": hidden,
                    "degree": job["degree"],
                    "bias": job["bias"],
                    "rounds": rounds,
                    "variants": {
                        name: figures(taken[name]) | {"saved_bytes": subjects[name].saved_bytes()}
                        for name in names
                    },
                    "totals": {name: [sum(pair) for pair in taken[name]] for name in names},
                }
            )
            del subjects
            gc.collect()
    return rows


def figures(taken: list[Times]) -> dict[str, float]:
    """Medians in microseconds."""
    forward, backward = zip(*taken, strict=True)
    medians = {
        "forward_us": statistics.median(forward),
        "backward_us": statistics.median(backward),
        "total_us": statistics.median(map(sum, taken)),
    }
    return {name: round(seconds * 1e6, 1) for name, seconds in medians.items()}


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    with world(task):
        answer = blocks(task)
    if task["rank"] == 0:
        print(json.dumps(answer))
