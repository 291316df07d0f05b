"""What `ezpz_spmd.check` costs: ``hatch run bench:tp-check [--rounds=9] [--json=FILE]``.

An MLP's forward pass in a fake world of two ranks, per operation. Medians over alternating rounds.
"""

import time

import fire
import torch
import torch.distributed as dist
from paired import Row, alone, interleaved
from table import finish
from torch.testing._internal.distributed.fake_pg import FakeStore

import ezpz_spmd
import ezpz_tp


def on(rounds: int) -> Row:
    """Return the row of an MLP's steps under `check`: what it adds to an operation."""
    up = ezpz_tp.ColumnParallelLinear(64, 256, gather_output=False, seed=1)
    down = ezpz_tp.RowParallelLinear(256, 64, input_is_parallel=True, seed=2)
    hidden = torch.ones(8, 64)
    operations = 0

    def steps() -> float:
        begun = time.thread_time()
        for _ in range(20):
            hidden_ = hidden
            for _ in range(4):
                hidden_ = hidden_ + down(torch.relu(up(hidden_)))
            hidden_.square().mean()
        return time.thread_time() - begun

    def checked() -> float:
        nonlocal operations
        with ezpz_spmd.check() as checker:
            taken = steps()
        operations = checker.operations
        return taken

    found = interleaved({"on": checked, "off": steps}, rounds)
    more = [
        (one - other) / operations * 1e6
        for one, other in zip(found["on"], found["off"], strict=True)
    ]
    return alone("tp_check/on", "check(), an operation more", "us", more)


def main(rounds: int = 9, json: str = "") -> None:
    """Print the figures, and write them to a file if one is named.

    Args:
        rounds: How often.
        json: A file to write the figures to.
    """
    # The time of one thread is taken: it is to do the work, and not to wait for others.
    torch.set_num_threads(1)
    # A world in which collectives do nothing: waiting for a rank costs more than either.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    ezpz_tp.initialize_tensor_parallel(2)
    finish([on(rounds)], json)


if __name__ == "__main__":
    fire.Fire(main)
