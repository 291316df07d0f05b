"""torch's DataLoader over this rank's part of the data, which can go on in mid-epoch."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset, IterableDataset

from ezpz_dist._errors import DataError

from .sampler import DataParallelSampler

T_co = TypeVar("T_co", covariant=True)

_LINGER = 600
"""Seconds that a worker goes on after SIGTERM: its rank may have to end its step and save. One
that is stuck ends then, at the latest."""


class DataLoader(torch.utils.data.DataLoader[T_co]):
    """torch's DataLoader, with a `DataParallelSampler` and a position that can be saved.

    The position counts the batches that the training was given, not those that workers
    fetched ahead. Each complete pass ends its epoch; after `load_state_dict` the first pass
    has the rest of one.

    When all processes get SIGTERM or SIGUSR1, as before the end of a job, the workers go on
    until their rank ends: torch's own would die, and the training with them before it has
    saved. Random numbers drawn in workers, unlike the order, are not those of an
    uninterrupted run.

    >>> loader = DataLoader(range(10), batch_size=4, shuffle=True, seed=1)
    >>> for epoch in range(loader.epoch, 2):
    ...     for batch in loader:
    ...         state = loader.state_dict()     # into the check-point

    Args:
        dataset: With a length and indices.
        batch_size: Of each data-parallel rank; None: single samples.
        shuffle: See `DataParallelSampler`.
        seed: See `DataParallelSampler`.
        drop_last: Leave out what does not fill a batch on every rank.
        worker_init_fn: As torch's.
        more: As torch's, but ``sampler``, ``batch_sampler``.

    Raises:
        DataError: ``dataset`` has no indices, or see `DataParallelSampler`.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        TypeError: A sampler is given.
    """

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        **more: Any,
    ) -> None:
        if given := {"sampler", "batch_sampler"} & more.keys():
            raise TypeError(
                f"{', '.join(sorted(given))}= for ezpz_dist.DataLoader; it makes its own; give "
                "yours to torch.utils.data.DataLoader"
            )
        if isinstance(dataset, IterableDataset):
            raise DataError(
                f"{type(dataset).__name__} has no indices to deal out; expected a map-style data "
                "set; give share_of(files) to each rank's own IterableDataset"
            )
        sampler = DataParallelSampler(
            dataset,  # type: ignore[arg-type]  # it must have a length
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        self._order = sampler
        # Where the training is, and where the next pass begins.
        self._at = self._next = sampler.start
        # torch draws the workers' seed in each pass. From the default generator, a resumed run
        # would draw once more than the uninterrupted one, and have other random numbers.
        more.setdefault("generator", torch.Generator().manual_seed(seed))
        super().__init__(
            dataset,
            batch_size,
            sampler=sampler,
            drop_last=drop_last and batch_size is not None,
            worker_init_fn=partial(_begin_worker, worker_init_fn),
            **more,
        )

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._at[0]

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be of this epoch, from its beginning if it is another one."""
        self._order.begin_at(*self._next)
        self._order.set_epoch(epoch)
        self._at = self._next = self._order.start

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names a private class
        epoch, start = self._at = self._next
        # Not the sampler's own: workers may have come to its end before the training.
        self._order.begin_at(epoch, start)
        self._next = epoch, 0
        return self._count(super().__iter__(), epoch, start)

    def _count(self, batches: Iterator[Any], epoch: int, start: int) -> Iterator[Any]:
        size = self.batch_size or 1
        for number, batch in enumerate(batches, 1):
            self._at = self._order.after(epoch, start, number * size)
            if self.drop_last and self._order.after(*self._at, size - 1)[0] != epoch:
                self._at = epoch + 1, 0
            yield batch
        self._at = self._next = epoch + 1, 0

    def state_dict(self) -> dict[str, int | bool]:
        """Return the epoch and how much of it the training has had: the same on every rank."""
        return self._order.state_at(*self._at)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one was, also with another number of ranks.

        Raises:
            DataError: It is of another order: other samples, another seed.
        """
        self._order.load_state_dict(state)
        self._at = self._next = self._order.start


def _begin_worker(then: Callable[[int], None] | None, worker: int) -> None:
    """Let a worker outlive the signals that tell its rank to save."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # SIGALRM ends it, if nothing else has: torch, too, ends workers by SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: signal.setitimer(signal.ITIMER_REAL, _LINGER))
    if then is not None:
        then(worker)
