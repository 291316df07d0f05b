"""Run a function once per rank, on ranks of this machine that really communicate (gloo)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ezpz_tp._errors import DegreeError
from ezpz_tp._groups.ranks import RankLayout

from ._processes import run_in_processes
from ._threads import run_in_threads

Result = TypeVar("Result")


def run_ranks(
    function: Callable[..., Result],
    world_size: int,
    *args: Any,
    tensor: int | None = None,
    context: int = 1,
    data: int | None = None,
    pipeline: int = 1,
    also: Iterable[tuple[str, ...]] = (),
    in_processes: bool = False,
    initialize: bool = True,
    timeout: float = 60.0,
) -> list[Result]:
    """Call ``function(*args)`` on every one of ``world_size`` ranks and return the results by rank.

    By default the ranks are threads of this process, joined by real gloo groups that
    torch.distributed does not know (so nothing global is touched), and start in milliseconds.
    They share what a process shares: torch's random generators (draw from generators of your
    own), module globals, and the default process group, which there is none of.

    With ``in_processes`` they are processes that are kept for the next call, started from a
    server that has torch loaded. There torch.distributed is initialized with gloo and the default
    state by `initialize_tensor_parallel`; both are new for every call, torch's generator is seeded
    with 0 and `get_rng_tracker` has no streams. Such a function, its arguments and its result must
    be picklable, and a script that is run needs the usual ``if __name__ == "__main__":``.

    Args:
        function: What every rank runs. It finds its rank by `get_tensor_parallel_rank` and the
            like: a default state is active in it.
        world_size: Number of ranks.
        *args: Passed on, the same to every rank. Threads are given the very objects.
        tensor: Degree of tensor parallelism; all that the other degrees leave when None.
        context: Degree of context parallelism.
        data: Degree of data parallelism; what the other degrees leave when None.
        pipeline: Degree of pipeline parallelism.
        also: Groups that span several axes, for example ``[("tensor", "pipeline")]``.
        in_processes: Real processes rather than threads.
        initialize: Whether a default state is active; in processes, False also leaves the
            call to `initialize_tensor_parallel` to ``function``.
        timeout: Seconds for the whole call.

    Returns:
        What ``function`` returned, by rank.

    Raises:
        DegreeError: The degrees do not fit the world size.
        TypeError: ``in_processes`` and something that other processes cannot be given: it does not
            pickle, or is defined in ``python -c``, standard input or a notebook.
        TimeoutError: Some rank did not finish in time; says which, and where it stood.
        RankError: A process ended without a word, or what it raised cannot be pickled.
        Exception: What ``function`` raised on the rank that failed first, with its rank as a
            note. The other ranks are ended.
    """
    fixed = context * pipeline * (1 if data is None else data)
    if tensor is None:
        tensor = max(world_size // fixed, 1) if fixed > 0 else 1
    layout = RankLayout(world_size=world_size, tensor=tensor, context=context, pipeline=pipeline)
    if data is not None and layout.data != data:
        raise DegreeError(
            f"tensor {tensor} x context {context} x data {data} x pipeline {pipeline} = "
            f"{fixed * tensor} ranks, but world_size={world_size}; leave one of tensor and data "
            "out to have it worked out"
        )
    run = run_in_processes if in_processes else run_in_threads
    groups = tuple(tuple(axes) for axes in also) if initialize else None
    return run(function, layout, args, groups, timeout)
