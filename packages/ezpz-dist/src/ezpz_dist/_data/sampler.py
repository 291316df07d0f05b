"""The order of samples, one for all ranks, and where each of them is in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from ezpz_dist._errors import DataError

from .share import checked

_CHUNK = 8192
"""Indices that become Python's ints at once."""

_MAX_EPOCHS = 1 << 20


class DataParallelSampler(Sampler[int]):
    """Deals the samples of each epoch out to the data-parallel ranks; knows where it is.

    In each epoch there is one order of all samples, the same on every rank. Round by round
    each data-parallel rank takes the next of them, so that steps of all ranks together go
    through it in order, whatever the number of ranks. The position is counted in samples of
    that order: a run that goes on with another number of ranks goes on where the other
    stopped, and every sample still comes once an epoch.

    Tensor-, context- and pipeline-parallel ranks of one data-parallel rank get the same.

    Each complete pass ends its epoch: the next has another order, without `set_epoch`. A pass
    that was broken off begins anew.

    `state_dict` tells what was handed out. Workers of torch's own DataLoader fetch ahead of
    the training: there use `ezpz_dist.DataLoader`, or torchdata's ``StatefulDataLoader``,
    whose states tell what the training has had.

    Args:
        source: The data set, or the number of its samples.
        shuffle: Another order in each epoch, from ``seed``; costs 4 bytes a sample (8 from
            2**31 samples on).
        seed: The same on every rank, 0 <= seed < 2**43.
        drop_last: All ranks get equally many samples. True: the last, fewer than there are
            ranks, are left out. False: the first of the order come once more.
        share: (which, of how many); default: `ezpz_dist.data_share`.

    Raises:
        DataError: There are no samples, or with ``drop_last`` fewer than ranks.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        ValueError: ``seed`` or ``share`` is out of range.
    """

    def __init__(
        self,
        source: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        share: tuple[int, int] | None = None,
    ) -> None:
        self._length = source if isinstance(source, int) else len(source)
        self._which, self._count = checked(share)
        if not 0 <= seed < 1 << 43:
            raise ValueError(f"seed {seed}; expected 0 to 2**43 - 1")
        if self._length < (self._count if drop_last else 1):
            raise DataError(
                f"{self._length} samples for {self._count} data-parallel ranks with "
                f"{drop_last=}; expected at least one{' each' if drop_last else ''}"
            )
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self._epoch, self._start = 0, 0
        self._handed = 0, 0

    @property
    def epoch(self) -> int:
        """The epoch of the next pass, or of the one under way."""
        return self._epoch

    @property
    def count(self) -> int:
        """How many data-parallel ranks there are."""
        return self._count

    @property
    def start(self) -> tuple[int, int]:
        """Where the next pass begins: (epoch, position)."""
        return self._epoch, self._start

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be of this epoch, from its beginning if it is another one.

        After `load_state_dict` the epoch that it brought keeps its position.

        Raises:
            ValueError: It is negative, or above 2**20.
        """
        if not 0 <= epoch < _MAX_EPOCHS:
            raise ValueError(f"epoch {epoch}; expected 0 to {_MAX_EPOCHS - 1}")
        if epoch != self._epoch:
            self.begin_at(epoch, 0)

    def begin_at(self, epoch: int, position: int) -> None:
        """Let the next pass begin there."""
        self._epoch, self._start = self._handed = epoch, position

    def __len__(self) -> int:
        """Return how many samples of a whole epoch are this rank's."""
        return self._rounds(0)

    def __iter__(self) -> Iterator[int]:
        epoch, start = self._handed = self.start
        self._start = 0
        return self._indices(epoch, start)

    def _indices(self, epoch: int, start: int) -> Iterator[int]:
        order = self._order(epoch)
        stop = start + self._rounds(start) * self._count
        for first in range(start, stop, _CHUNK * self._count):
            last = min(first + _CHUNK * self._count, stop)
            # Beyond the end: the first ones again.
            places = torch.arange(first + self._which, last, self._count) % self._length
            for taken, index in enumerate((places if order is None else order[places]).tolist(), 1):
                self._handed = self.after(epoch, first, taken)
                yield index
        if self._epoch == epoch:
            self.begin_at(epoch + 1, 0)

    def after(self, epoch: int, start: int, samples: int) -> tuple[int, int]:
        """Return (epoch, position) when each rank has had so many samples from ``start`` on."""
        position = start + samples * self._count
        return (epoch, position) if self._rounds(position) > 0 else (epoch + 1, 0)

    def state_dict(self) -> dict[str, int | bool]:
        """Return where this is in what order: the same on every rank."""
        return self.state_at(*self._handed)

    def state_at(self, epoch: int, position: int) -> dict[str, int | bool]:
        """Return the state of being there."""
        return {"epoch": epoch, "position": position, **self._fixed()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass begin where another one was.

        Args:
            state: What `state_dict` returned, also with another number of ranks.

        Raises:
            DataError: It is of another order: other samples, another seed.
        """
        fixed = self._fixed()
        try:
            differ = {name: state[name] for name in fixed if state[name] != fixed[name]}
            epoch, position = int(state["epoch"]), int(state["position"])
        except KeyError as error:
            raise DataError(
                f"a sampler's state without {error}; expected what state_dict() returned, "
                f"{sorted(self.state_dict())}; got {sorted(state)}"
            ) from error
        if differ or not 0 <= position <= self._length:
            raise DataError(
                f"a sampler's state of {differ or position}; expected {fixed}: the order of the "
                "samples would be another, and some would come twice and others never"
            )
        if not 0 <= epoch < _MAX_EPOCHS:
            raise DataError(f"a sampler's epoch {epoch}; expected 0 to {_MAX_EPOCHS - 1}")
        self.begin_at(*self.after(epoch, position, 0))

    def _fixed(self) -> dict[str, int | bool]:
        return {"length": self._length, "shuffle": self._shuffle, "seed": self._seed}

    def _rounds(self, start: int) -> int:
        """Return how many samples each rank gets from a position to the epoch's end."""
        left = max(0, self._length - start)
        return left // self._count if self._drop_last else -(-left // self._count)

    def _order(self, epoch: int) -> torch.Tensor | None:
        if not self._shuffle:
            return None
        # Of its own, so that nobody's random numbers change: distinct for each (seed, epoch).
        generator = torch.Generator().manual_seed(self._seed * _MAX_EPOCHS + epoch)
        dtype = torch.int32 if self._length < 1 << 31 else torch.int64
        return torch.randperm(self._length, generator=generator, dtype=dtype)
