"""Whether all ranks ask for the same groups: ranks that differ would never meet."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroup, distributed_c10d

from ezpz_tp._errors import DegreeError, ParallelError

c10d: Any = distributed_c10d


def agree(arguments: str, number: int, world: ProcessGroup, timeout: timedelta | None) -> None:
    """Compare the arguments of all ranks, before any of them makes a group.

    Collective over the store: two writes and one wait for each rank. The last rank to come
    lets all go on; one that differs from the first to come tells all at once.

    Args:
        arguments: What this rank was asked for.
        number: How many times groups were asked for in this world.
        world: The group of all ranks.
        timeout: How long to wait for the others; None is the world's.

    Raises:
        DegreeError: Two ranks differ; says which, and both arguments. On every rank.
        ParallelError: Some ranks did not come in time.
    """
    store = c10d._get_default_store()  # noqa: SLF001 - there is no public way to it
    rank, size, key = world.rank(), world.size(), f"ezpz_tp.{number}"
    first = store.compare_set(key, "", f"{rank} {arguments}").decode()
    one, expected = first.split(" ", 1)
    if expected != arguments:
        store.compare_set(
            f"{key}.go",
            "",
            f"rank {rank} was asked for {arguments}, and rank {one} for {expected}; give every "
            "rank the same arguments",
        )
    if store.add(f"{key}.came", 1) == size:
        store.compare_set(f"{key}.go", "", _GO)
    try:
        if timeout is not None:  # else the store's own, with which it gets what is not there yet
            store.wait([f"{key}.go"], timeout)
        answer = store.get(f"{key}.go").decode()
    except RuntimeError as error:
        raise ParallelError(
            f"rank {rank} waited for all {size} ranks to make {arguments}; "
            f"{_came(store, key)} came: {error}. Every rank must initialize, and destroy, as "
            f"often as the others (this was the {number}. time in this world)"
        ) from error
    if answer != _GO:
        _let_all_read(store, key, size)
        raise DegreeError(answer)


def _came(store: Any, key: str) -> str:
    try:
        return f"{store.add(f'{key}.came', 0)}"
    except RuntimeError:  # the rank that keeps the store is gone
        return "an unknown number"


def _let_all_read(store: Any, key: str, size: int) -> None:
    """Wait a moment: a rank that ends now may take the store with it, and the answer."""
    with contextlib.suppress(RuntimeError):
        if store.add(f"{key}.read", 1) == size:
            store.set(f"{key}.all read", "")
        store.wait([f"{key}.all read"], _PATIENCE)


_GO = "go"
_PATIENCE = timedelta(seconds=2)
