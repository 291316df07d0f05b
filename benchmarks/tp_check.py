"""What `ezpz_tp.check` costs, on and off: ``hatch run bench:tp-check [--rounds=9]``.

Off: what a region function pays to ask whether anybody checks, as the difference between two
functions that are alike but for it. On: an MLP's forward pass in a fake world of two ranks, per
operation. Medians over alternating rounds.
"""

import statistics
import time
import timeit
from collections.abc import Callable

import fire
import torch
import torch.distributed as dist
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


def main(rounds: int = 9) -> None:
    """Measure both.

    Args:
        rounds: How often.
    """
    pairs = [(nanoseconds(asks), nanoseconds(plain)) for _ in range(rounds)]
    off = statistics.median(one - other for one, other in pairs)
    print(f"off: {off:.0f} ns a region call (wanted: 50)")
    # A world in which collectives do nothing: waiting for a rank costs more than either.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    ezpz_tp.initialize_tensor_parallel(2)
    found = step_times(rounds)
    on = statistics.median((with_ - without) / count for without, with_, count in found)
    print(f"on:  {on * 1e6:.1f} us an operation more, of {found[0][2]} operations")


if __name__ == "__main__":
    fire.Fire(main)
