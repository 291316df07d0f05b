"""Keys and values that go round a ring of ranks, while each of them is computed with."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import AllToAllOptions

_OVERLAPPED = AllToAllOptions()
if hasattr(_OVERLAPPED, "asyncOp"):  # unknown before torch 2.8, which overlaps anyway
    _OVERLAPPED.asyncOp = True


class Pair:
    """Keys and values, or their gradients, in one stretch of memory."""

    def __init__(self, memory: Tensor, k_shape: torch.Size, v_shape: torch.Size) -> None:
        k, v = memory.split([k_shape.numel(), v_shape.numel()])
        self.memory, self.k, self.v = memory, k.view(k_shape), v.view(v_shape)

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> Pair:
        """Copy keys and values."""
        return cls(torch.cat([k.flatten(), v.flatten()]), k.shape, v.shape)

    @classmethod
    def zeros(cls, k: Tensor, v: Tensor, dtype: torch.dtype) -> Pair:
        """Make a pair of the same shapes, filled with zeros."""
        return cls(k.new_zeros(k.numel() + v.numel(), dtype=dtype), k.shape, v.shape)

    def tokens(self, span: slice) -> tuple[Tensor, Tensor]:
        """Return views of some tokens' keys and values."""
        return self.k[:, :, span], self.v[:, :, span]


class Moving:
    """A pair that has set out for the next rank, while another comes from the one before.

    It is an all-to-all in which the others get nothing: every backend has that, and so have ranks
    that are threads. Collective.
    """

    def __init__(self, sent: Pair, group: ProcessGroup) -> None:
        self._sent = sent  # its memory stays until it has left
        self._received = torch.empty_like(sent.memory)
        size, rank, count = group.size(), group.rank(), sent.memory.numel()
        to, from_ = [0] * size, [0] * size
        to[(rank + 1) % size] = from_[(rank - 1) % size] = count
        self._work: Work | None = None
        if torch.compiler.is_compiling():
            dist.all_to_all_single(self._received, sent.memory, from_, to, group)
        else:
            self._work = group.alltoall_base(self._received, sent.memory, from_, to, _OVERLAPPED)

    def arrived(self) -> Pair:
        """Wait for the other one."""
        if self._work is not None:
            self._work.wait()
        return Pair(self._received, self._sent.k.shape, self._sent.v.shape)


class Round:
    """One trip of every rank's keys and values to every rank, the next always on its way.

    Iterate over it: each step gives the rank that `pair` comes from, this rank first. Hold no view
    of a pair beyond its step, and there are never more than two of them.
    """

    def __init__(self, k: Tensor, v: Tensor, group: ProcessGroup) -> None:
        self.pair = Pair.of(k, v)
        self._group = group

    def __iter__(self) -> Iterator[int]:
        rank, size = self._group.rank(), self._group.size()
        for step in range(size - 1):
            moving = Moving(self.pair, self._group)
            yield (rank - step) % size
            self.pair = moving.arrived()
            del moving  # and with it what was sent
        yield (rank + 1) % size
