"""What `ezpz_tp.check` costs, on and off: ``hatch run bench:tp-check [--rounds=9] [--json=FILE]``.

Off: what a region function pays to ask whether anybody checks, as the difference between two
functions that are alike but for it. On: an MLP's forward pass in a fake world of two ranks, per
operation. Medians over alternating rounds.
"""

import time
import timeit
from collections.abc import Callable

import fire
import torch
import torch.distributed as dist
from paired import alone
from table import finish
from torch.overrides import has_torch_function_unary
from torch.testing._internal.distributed.fake_pg import FakeStore

import ezpz_tp

CALLS = 200_000


def asks(tensor: torch.Tensor) -> torch.Tensor:
    """What each region function begins with."""
    if has_torch_function_unary(tensor):
        raise RuntimeError("nobody checks")
    return tensor


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same without the question."""
    return tensor


def nanoseconds(function: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Return what a call takes."""
    tensor = torch.ones(4)
    return timeit.timeit(lambda: function(tensor), number=CALLS) / CALLS * 1e9


def step_times(rounds: int) -> list[tuple[float, float, int]]:
    """Return seconds of a step without and with `check`, and its operations, for each round."""
    up = ezpz_tp.ColumnParallelLinear(64, 256, gather_output=False, seed=1)
    down = ezpz_tp.RowParallelLinear(256, 64, input_is_parallel=True, seed=2)
    hidden = torch.ones(8, 64)

    def step() -> float:
        begun = time.thread_time()
        for _ in range(20):
            hidden_ = hidden
            for _ in range(4):
                hidden_ = hidden_ + down(torch.relu(up(hidden_)))
            hidden_.square().mean()
        return time.thread_time() - begun

    found = []
    for _ in range(rounds):
        off = step()
        with ezpz_tp.check() as checker:
            on = step()
        found.append((off, on, checker.operations))
    return found


def main(rounds: int = 9, json: str = "") -> None:
    """Print the figures, and write them to a file if one is named.

    Args:
        rounds: How often.
        json: A file to write the figures to.
    """
    pairs = [(nanoseconds(asks), nanoseconds(plain)) for _ in range(rounds)]
    off = [max(0.0, one - other) for one, other in pairs]
    # A world in which collectives do nothing: waiting for a rank costs more than either.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    ezpz_tp.initialize_tensor_parallel(2)
    on = [(with_ - without) / count * 1e6 for without, with_, count in step_times(rounds)]
    rows = [
        alone("tp_check/off", "check() off, a region call", "ns", off),
        alone("tp_check/on", "check() on, an operation more", "us", on),
    ]
    finish(rows, json)


if __name__ == "__main__":
    fire.Fire(main)
