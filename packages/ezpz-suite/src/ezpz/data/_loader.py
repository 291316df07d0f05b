"""One rank reads, and all that work on the same samples have them from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import ezpz_dist
import ezpz_tp
from ezpz_dist import DataError
from ezpz_topo import get_rank

T_co = TypeVar("T_co", covariant=True)

_AXES = ("pipeline", "context", "tensor")
"""Along which samples are the same, in the order in which a batch travels."""

_BATCH, _END, _FAILED = range(3)

_Message = tuple[int, dict[str, Any], Any]
"""What it is, the position behind it, and the batch or the reader's words."""


class DataLoader(Generic[T_co]):
    """`ezpz_dist.DataLoader`, with one reader for all ranks that work on the same samples.

    Tensor-, context- and pipeline-parallel ranks of one data-parallel rank need the same batch.
    The first of them reads it (with ``num_workers``, if there are any) and broadcasts it along
    the pipeline, the context and the tensor axis; the others never touch the data set, but for
    its length. So what is read grows with the data-parallel degree, and random numbers in a data
    set cannot differ within a model. Where sequences are shared, each rank takes its part of the
    whole batch: ``model.shard_sequence(tokens)``, or ``ezpz_tp.shard_sequence(tokens, 1)``.

    Shuffling, epochs, and the position that goes into a check-point are those of
    `ezpz_dist.DataLoader`. The position is counted in samples of an order that is the same for
    any number of ranks: a run that goes on with another data-parallel degree goes on behind the
    samples that were used, and has each of the others once. With another batch size on top,
    batches begin elsewhere, and still every sample comes once. Another seed, or a data set of
    another length, is refused.

    Without ``ezpz_tp``'s groups, or where they have data-parallel ranks only, nothing is sent.

    >>> loader = DataLoader(range(10), batch_size=4, shuffle=True, seed=1)
    >>> for batch in loader:
    ...     state = loader.state_dict()     # into the check-point
    >>> loader.epoch
    1

    Args:
        dataset: With a length and indices; the same length on every rank.
        batch_size: Of each data-parallel rank; None: single samples.
        shuffle: Another order in each epoch, from ``seed``.
        seed: The same on every rank.
        drop_last: Leave out what does not fill a batch on every rank.
        device: Where tensors of a batch are wanted; as the data set makes them if None.
        more: As torch's DataLoader: ``num_workers``, ``pin_memory``, ``collate_fn``, ...; see
            `loader_options`.

    Raises:
        DataError: ``dataset`` has no indices or too few samples.
        NotSetUpError: There are several ranks and `ezpz.setup_torch` was not called.
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
        device: torch.device | str | None = None,
        **more: Any,
    ) -> None:
        self._links = _links()
        self._device = None if device is None else torch.device(device)
        if not self.is_reader:
            # Their loader counts, and never reads.
            unused = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor",
                      "multiprocessing_context", "timeout", "worker_init_fn")  # fmt: skip
            more = {name: value for name, value in more.items() if name not in unused}
        self._own: ezpz_dist.DataLoader[T_co] = ezpz_dist.DataLoader(
            dataset, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last, **more
        )

    @property
    def is_reader(self) -> bool:
        """Whether this rank reads, and does not receive."""
        return all(root == get_rank() for root, _ in self._links)

    @property
    def dataset(self) -> Dataset[T_co]:
        """The data set that was given."""
        return self._own.dataset

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._own.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be of this epoch, from its beginning if it is another one."""
        self._own.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return len(self._own)

    def state_dict(self) -> dict[str, int | bool]:
        """Return the epoch and how much of it the training has had: the same on every rank."""
        return self._own.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one was, also with another number of ranks of any kind.

        Raises:
            DataError: It is of another order: other samples, another seed.
        """
        self._own.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch, or of what is left of one.

        Collective: the ranks of one data-parallel rank go through it together.

        Raises:
            DataError: On ranks that do not read: the reader failed.
        """
        batches = self._read() if self.is_reader else self._receive()
        for batch in batches:
            yield batch if self._device is None else _moved(batch, self._device)

    def _read(self) -> Iterator[Any]:
        own: Iterator[Any] | None = None
        while True:
            try:
                if own is None:
                    own = iter(self._own)  # which starts the workers
                batch = next(own)
            except StopIteration:
                self._send((_END, self.state_dict(), None))
                return
            except Exception as error:
                # Whatever it is: the others must not wait for it.
                words = f"rank {get_rank()}: {type(error).__name__}: {error}"
                self._send((_FAILED, {}, words))
                raise
            self._send((_BATCH, self.state_dict(), batch))
            yield batch

    def _receive(self) -> Iterator[Any]:
        while True:
            what, state, content = self._send(None)
            if what == _FAILED:
                raise DataError(f"the reader of this rank's batches failed, {content}")
            self._own.load_state_dict(state)
            if what == _END:
                return
            yield content

    def _send(self, message: _Message | None) -> _Message:
        for root, group in self._links:
            message = ezpz_dist.broadcast(message, root, group)
        assert message is not None  # the reader's
        return message


def _links() -> list[tuple[int, dist.ProcessGroup]]:
    """Return the broadcasts that a batch comes and goes by here: from whom, in which group."""
    if not ezpz_tp.tensor_parallel_is_initialized():
        return []
    state = ezpz_tp.get_state()
    links: list[tuple[int, dist.ProcessGroup]] = []
    for place, axis in enumerate(_AXES):
        # Along the pipeline it goes between ranks that are first along the other axes only.
        if state.size(axis) == 1 or any(state.index(later) for later in _AXES[place + 1 :]):
            continue
        group = state.group(axis)
        links.append((dist.get_process_group_ranks(group)[0], group))
    return links


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: _moved(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_moved(value, device) for value in batch)
    return batch
