"""Every rank its own share of the data: sampler and loader, resumable in mid-epoch."""

from __future__ import annotations

import hashlib
import heapq
import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed import ProcessGroup
from torch.utils.data import Dataset, IterableDataset, Sampler

from ezpz_topo import get_rank

from ._collectives import broadcast
from ._errors import DataError
from ._world import current_world, find_world, parallel_state

# Which part of the data is this rank's.

T = TypeVar("T")


def data_share() -> tuple[int, int]:
    """Return (which, of how many): this rank's part of the data, from 0, and how many there are.

    Tensor-, context- and pipeline-parallel ranks work on the same samples, so theirs is the
    same: the position in the data-parallel group of ``ezpz_tp``. Without its groups every
    rank has its own.

    Raises:
        NotSetUpError: There are several ranks and `setup_torch` was not called.
    """
    world = current_world("data_share()")
    if world is None or world.info.world_size == 1:
        return 0, 1
    state = parallel_state()
    if state is not None:
        return state.index("data"), state.size("data")
    return world.info.rank, world.info.world_size


def share_of(
    items: Sequence[T], *, sizes: Sequence[float] | None = None,
    share: tuple[int, int] | None = None,
) -> list[T]:  # fmt: skip
    """Return this rank's part of a list, for example of files; nothing is sent.

    Every item is in one part. Without sizes they are dealt out one by one; with sizes the
    largest go first, each to the part that has least (at most 4/3 of the best possible,
    Graham 1969).

    Args:
        items: The same on every rank, in the same order.
        sizes: One for each item, for example of bytes.
        share: (which, of how many); default: `data_share`.

    Raises:
        DataError: There are fewer items than parts, which would leave a rank without any.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        ValueError: There are not as many sizes as items, or ``share`` is none.
    """
    which, count = check_share(share)
    if len(items) < count:
        raise DataError(
            f"{len(items)} items for {count} data-parallel ranks; expected at least one each; "
            "split the items, or read them with fewer ranks"
        )
    if sizes is None:
        return list(items[which::count])
    if len(sizes) != len(items):
        raise ValueError(f"{len(sizes)} sizes; expected one for each of {len(items)} items")
    places = deal_by_size(sizes, count)[which]
    return [items[place] for place in sorted(places)]


def deal_by_size(sizes: Sequence[float], count: int) -> list[list[int]]:
    """Return the places of the items of each part: the largest first, each to the smallest part."""
    parts: list[list[int]] = [[] for _ in range(count)]
    # By size, then by number of items: those without a size are dealt out evenly, too.
    queue = [(0.0, 0, number) for number in range(count)]
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        load, length, number = queue[0]
        parts[number].append(place)
        heapq.heapreplace(queue, (load + sizes[place], length + 1, number))
    return parts


def check_share(share: tuple[int, int] | None) -> tuple[int, int]:
    """Return a valid share; None stands for `data_share`."""
    if share is None:
        return data_share()
    which, count = share
    if not 0 <= which < count:
        raise ValueError(f"share {share}; expected (which, of how many), from (0, 1)")
    return which, count


# The order of samples, one for all ranks, and where each of them is in it.

_CHUNK = 8192  # indices that become Python's ints at once
_MAX_EPOCHS = 1 << 20

Position = tuple[int, int]
"""An epoch, and how many samples of its order all ranks together have had."""


class DataParallelSampler(Sampler[int]):
    """Deals the samples of each epoch out to the data-parallel ranks; knows where it is.

    In each epoch there is one order of all samples, the same on every rank. Round by round
    each data-parallel rank (`data_share`) takes the next of them, whatever the number of ranks.
    The position is counted in samples of that order. So a run resumes on another number of
    ranks where it stopped, and every sample still comes once an epoch.

    Each complete pass ends its epoch: the next has another order, without `set_epoch`. A pass
    that was broken off begins again.

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
        self, source: Sized | int, *, shuffle: bool = True, seed: int = 0,
        drop_last: bool = False, share: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        self._length = source if isinstance(source, int) else len(source)
        self._which, self._count = check_share(share)
        if not 0 <= seed < 1 << 43:
            raise ValueError(f"seed {seed}; expected 0 to 2**43 - 1")
        enough = self._count if drop_last else 1
        if self._length < enough:
            raise DataError(
                f"{self._length} samples for {self._count} data-parallel ranks with "
                f"{drop_last=}; expected at least {enough}"
            )
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._next: Position = (0, 0)  # where the next pass begins
        self._reached: Position = (0, 0)  # behind the last sample that was handed out

    @property
    def epoch(self) -> int:
        """The epoch of the next pass, or of the one under way."""
        return self._next[0]

    @property
    def count(self) -> int:
        """How many data-parallel ranks there are."""
        return self._count

    @property
    def start(self) -> Position:
        """Where the next pass begins: (epoch, position)."""
        return self._next

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be of this epoch, from its beginning if it is another one.

        After `load_state_dict` the epoch that it brought keeps its position.

        Raises:
            ValueError: It is negative, or above 2**20.
        """
        if not 0 <= epoch < _MAX_EPOCHS:
            raise ValueError(f"epoch {epoch}; expected 0 to {_MAX_EPOCHS - 1}")
        if epoch != self.epoch:
            self.set_position((epoch, 0))

    def set_position(self, start: Position) -> None:
        """Let the next pass begin there."""
        self._next = start
        self._reached = start

    def __len__(self) -> int:
        return self._rounds(0)

    def __iter__(self) -> Iterator[int]:
        start = self._next
        self._reached = start
        self._next = (self.epoch, 0)
        return self._indices(start)

    def _indices(self, start: Position) -> Iterator[int]:
        epoch, position = start
        order = self._order(epoch)
        stop = position + self._rounds(position) * self._count
        for begin in range(position, stop, _CHUNK * self._count):
            end = min(begin + _CHUNK * self._count, stop)
            # Beyond the end: the first ones again.
            indices = torch.arange(begin + self._which, end, self._count) % self._length
            if order is not None:
                indices = order[indices]
            for taken, index in enumerate(indices.tolist(), 1):
                self._reached = self.advance((epoch, begin), taken)
                yield index
        if self.epoch == epoch:
            self.set_position((epoch + 1, 0))

    def advance(self, start: Position, samples: int) -> Position:
        """Return the position once each rank has had ``samples`` more, from ``start`` on."""
        epoch = start[0]
        position = start[1] + samples * self._count
        if self._rounds(position) > 0:
            return epoch, position
        return epoch + 1, 0

    def state_dict(self) -> dict[str, int | bool]:
        """Return where this is in what order: the same on every rank."""
        return self.build_state(self._reached)

    def build_state(self, position: Position) -> dict[str, int | bool]:
        """Return the state at a position."""
        return {"epoch": position[0], "position": position[1], **self._settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass begin where another one was.

        Args:
            state: What `state_dict` returned, also with another number of ranks.

        Raises:
            DataError: It is of another order: other samples, another seed.
        """
        settings = self._settings()
        try:
            differ = {name: state[name] for name in settings if state[name] != settings[name]}
            epoch = int(state["epoch"])
            position = int(state["position"])
        except KeyError as error:
            raise DataError(
                f"a sampler's state without {error}; expected what state_dict() returned, "
                f"{sorted(self.state_dict())}; got {sorted(state)}"
            ) from error
        if differ or not 0 <= position <= self._length:
            raise DataError(
                f"a sampler's state of {differ or position}; expected {settings}: the order of the "
                "samples would be another, and some would come twice and others never"
            )
        if not 0 <= epoch < _MAX_EPOCHS:
            raise DataError(f"a sampler's epoch {epoch}; expected 0 to {_MAX_EPOCHS - 1}")
        self.set_position(self.advance((epoch, position), 0))

    def _settings(self) -> dict[str, int | bool]:
        return {"length": self._length, "shuffle": self._shuffle, "seed": self._seed}

    def _rounds(self, start: int) -> int:
        """Return how many samples each rank gets from a position to the epoch's end."""
        remaining = max(0, self._length - start)
        if self._drop_last:
            return remaining // self._count
        return math.ceil(remaining / self._count)

    def _order(self, epoch: int) -> torch.Tensor | None:
        if not self._shuffle:
            return None
        number = self._seed * _MAX_EPOCHS + epoch
        if number >= 1 << 32:
            number = derive_seed(self._seed, epoch)
        # Its own, so that no other random numbers change.
        generator = torch.Generator().manual_seed(number)
        dtype = torch.int32 if self._length < 1 << 31 else torch.int64
        return torch.randperm(self._length, generator=generator, dtype=dtype)


# torch's DataLoader over this rank's part of the data, which can go on in mid-epoch.

T_co = TypeVar("T_co", covariant=True)


class _Message(NamedTuple):
    """What the reader sends to those that work on the same samples."""

    state: dict[str, int | bool]  # behind the batch
    batches: list[Any]  # one; none at the end of a pass
    failure: str = ""


class DataLoader(torch.utils.data.DataLoader[T_co]):
    """torch's DataLoader, with a `DataParallelSampler` and a position that can be saved.

    The position counts the batches that the training was given, not those that workers
    fetched ahead. Each complete pass ends its epoch; after `load_state_dict` the first pass
    has the rest of one.

    When all processes get SIGTERM or SIGUSR1, as before the end of a job, the workers continue
    until their rank ends: torch's own would die, and the training before it has saved.

    Workers are seeded (Python's, NumPy's and torch's generators) by ``seed``, the data-parallel
    rank, and the epoch and position where they start. So augmentations differ there, and are the
    same on ranks that work on the same samples. With ``persistent_workers`` they start once. A
    resumed run goes on with other numbers than an uninterrupted one. Without workers the data set
    draws from this rank's own generators (`seed_everything`), which are the same on
    tensor-parallel ranks only.

    Tensor-, context- and pipeline-parallel ranks of one data-parallel rank need the same batch.
    With ``one_reader`` the first of them reads, and broadcasts along these axes. The others
    never touch the data set, but for its length: reads grow with the data-parallel degree only,
    and random numbers in a data set cannot differ within a model. Iterating is then a collective
    of these ranks. Where sequences are shared, each rank takes its part of the whole batch, by
    ``ezpz_tp.shard_sequence(tokens, 1)``. Without such ranks nothing is sent.

    >>> loader = DataLoader(range(10), batch_size=4, shuffle=True, seed=1)
    >>> for epoch in range(loader.epoch, 2):
    ...     for batch in loader:
    ...         state = loader.state_dict()     # into the checkpoint

    Args:
        dataset: With a length and indices; the same length on every rank.
        batch_size: Of each data-parallel rank; None: single samples.
        shuffle, seed: See `DataParallelSampler`.
        generator: Where torch draws the seed of the workers, in each pass, instead.
        drop_last: Leave out what does not fill a batch on every rank.
        one_reader: One rank reads for all that work on the same samples.
        device: Where tensors of a batch are wanted; as the data set makes them if None.
        worker_init_fn: As torch's.
        more: As torch's, but ``sampler``, ``batch_sampler``.

    Raises:
        DataError: ``dataset`` has no indices, or see `DataParallelSampler`; with ``one_reader``,
            while going through it, on ranks that do not read: the reader failed.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        TypeError: A sampler is given.
    """

    def __init__(
        self, dataset: Dataset[T_co], batch_size: int | None = 1,
        *, shuffle: bool = False, seed: int = 0, drop_last: bool = False, one_reader: bool = False,
        device: torch.device | str | None = None, generator: torch.Generator | None = None,
        worker_init_fn: Callable[[int], None] | None = None, **more: Any,
    ) -> None:  # fmt: skip
        for name in ("sampler", "batch_sampler"):
            if name in more:
                raise TypeError(
                    f"{name}= for ezpz_dist.DataLoader; it makes its own; give yours to "
                    "torch.utils.data.DataLoader"
                )
        if isinstance(dataset, IterableDataset):
            raise DataError(
                f"{type(dataset).__name__} has no indices to deal out; expected a map-style data "
                "set; give share_of(files) to each rank's own IterableDataset"
            )
        sized: Any = dataset  # it must have a length
        self._order = DataParallelSampler(sized, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self._reached = self._order.start  # behind the last batch that the training was given
        self._next = self._order.start  # where the next pass begins
        self._links: list[tuple[int, ProcessGroup]] = []
        if one_reader:
            self._links = _find_links(self._order.count)
        self._device = None if device is None else torch.device(device)
        self._seed = seed
        self._data_rank = data_share()[0]
        # torch draws the workers' seed in each pass. From the default generator, a resumed run
        # would draw once more than the uninterrupted one, and have other random numbers.
        self._seeds_workers = generator is None
        super().__init__(
            dataset,
            batch_size,
            sampler=self._order,
            drop_last=drop_last and batch_size is not None,
            generator=generator or torch.Generator(),
            worker_init_fn=partial(_begin_worker, worker_init_fn),
            **more,
        )

    @property
    def is_reader(self) -> bool:
        """Whether this rank reads, and does not receive."""
        return all(root == get_rank() for root, _ in self._links)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._reached[0]

    def _set_position(self, position: Position) -> None:
        self._reached = position
        self._next = position

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be of this epoch, from its beginning if it is another one."""
        self._order.set_position(self._next)
        self._order.set_epoch(epoch)
        self._set_position(self._order.start)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names a private class
        if not self._links:
            batches = self._read()
        elif self.is_reader:
            batches = self._read_for_all()
        else:
            batches = self._receive()
        if self._device is None:
            return batches
        return map(partial(_move, device=self._device), batches)

    def _read(self) -> Iterator[Any]:
        epoch, position = self._next
        # Not the sampler's own: workers may have come to its end before the training.
        self._order.set_position(self._next)
        self._reached = self._next
        self._next = (epoch, 0)
        if self._seeds_workers:
            seed = derive_seed(self._seed, self._data_rank, epoch, position)
            self.generator.manual_seed(seed)
        batches = super().__iter__()
        _let_workers_end(batches)
        return self._count(batches, (epoch, position))

    def _count(self, batches: Iterator[Any], start: Position) -> Iterator[Any]:
        """Pass batches on, keeping the position behind each."""
        next_epoch = (start[0] + 1, 0)
        size = self.batch_size or 1
        for number, batch in enumerate(batches, 1):
            self._reached = self._order.advance(start, number * size)
            if self.drop_last and self._order.advance(self._reached, size - 1) == next_epoch:
                self._reached = next_epoch  # what remains fills no batch
            yield batch
        self._set_position(next_epoch)

    def _read_for_all(self) -> Iterator[Any]:
        batches: Iterator[Any] | None = None
        while True:
            try:
                if batches is None:
                    batches = self._read()  # starts the workers
                batch = next(batches)
            except StopIteration:
                self._broadcast(_Message(self.state_dict(), []))
                return
            except Exception as error:  # whatever it is: the others must not wait for a batch
                failure = f"rank {get_rank()}: {type(error).__name__}: {error}"
                self._broadcast(_Message(self.state_dict(), [], failure))
                raise
            self._broadcast(_Message(self.state_dict(), [batch]))
            yield batch

    def _receive(self) -> Iterator[Any]:
        while True:
            message = self._broadcast(None)
            if message.failure:
                raise DataError(f"the reader of this rank's batches failed, {message.failure}")
            self.load_state_dict(message.state)
            if not message.batches:
                return
            yield message.batches[0]

    def _broadcast(self, message: _Message | None) -> _Message:
        for root, group in self._links:
            message = broadcast(message, root, group)
        assert message is not None  # the reader's
        return message

    def state_dict(self) -> dict[str, int | bool]:
        """Return the epoch and how much of it the training has had: the same on every rank."""
        return self._order.build_state(self._reached)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one was, also with another number of ranks of any kind.

        With another batch size, batches begin elsewhere, and still every sample comes once.

        Raises:
            DataError: It is of another order: other samples, another seed.
        """
        self._order.load_state_dict(state)
        self._set_position(self._order.start)


def derive_seed(*numbers: int) -> int:
    """Return a seed that depends on all of the numbers."""
    # Of 32 bits, because torch's generators of the CPU look at no others.
    text = " ".join(str(number) for number in numbers)
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:4], "little")


def _find_links(count: int) -> list[tuple[int, ProcessGroup]]:
    """Return the broadcasts that bring a batch here and pass it on: root and group of each."""
    world = find_world()
    state = parallel_state()
    if world is None or world.info.world_size == count or state is None:
        return []  # every rank has other samples
    links: list[tuple[int, ProcessGroup]] = []
    # Backwards as a batch travels: along the pipeline it goes between ranks that are first along
    # the other axes only.
    for axis in ("tensor", "context", "pipeline"):
        if state.size(axis) > 1:
            links.insert(0, (state.ranks(axis)[0], state.group(axis)))
        if state.index(axis) > 0:
            break
    return links


def _move(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: _move(value, device) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        values = [_move(value, device) for value in batch]
        if hasattr(batch, "_fields"):
            return type(batch)(*values)
        return type(batch)(values)
    return batch


def _let_workers_end(batches: Any) -> None:
    """Let Python and torch end workers, which outlive SIGTERM, by SIGKILL."""
    # At its end a process terminates its children and waits for them.
    for worker in getattr(batches, "_workers", ()):  # none where the process reads itself
        popen = worker._popen  # noqa: SLF001  # what both call, and no other process's
        popen.terminate = popen.kill


def _begin_worker(then: Callable[[int], None] | None, worker: int) -> None:
    """Let a worker outlive the signals that tell its rank to save."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # Its rank may have to end its step and save. SIGALRM ends it after ten minutes, if nothing else
    # has: torch, too, ends workers by SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: signal.setitimer(signal.ITIMER_REAL, 600))
    if then is not None:
        then(worker)
