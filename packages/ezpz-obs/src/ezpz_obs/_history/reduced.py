"""Statistics by two all-reduces, whose size does not grow with the number of ranks.

Gathered, each rank is sent what every other one has: 31 MB of ten metrics on 120,960 ranks. Here,
where the backend reduces by a tree (NCCL, XCCL, MPI; gloo does not, and gathers),
one all-reduce (MAX, of integers) finds the ends and whose they are, and whether the ranks agree;
another (SUM) mean and spread. Both are on their way at once. Where the ranks differ, or a number
is not finite, every rank learns of it by the same integers, and all gather.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ezpz_obs._records.numbers import as_float

HEAD = 7
"""Integers before the metrics': digest of the names, step and centres, each with its complement
(the greatest of both is one number only where all are equal), and whether something is odd."""

_FAR = 8
"""Of the distance between the ends: a centre further away costs the spread its digits."""

_KEPT = 1000  # names that change at each step would be kept for ever

_POSITIVE = np.int64(0x7FFF_FFFF_FFFF_FFFF)


class Sent(NamedTuple):
    """What is on its way.

    Attributes:
        digest: Of the names.
        values: This rank's.
        centre: What the sums are taken about.
        works: Of both collectives.
        tensors: Where their results will be.
    """

    digest: int
    values: NDArray[np.float64]
    centre: NDArray[np.float64]
    works: tuple[Any, Any]
    tensors: tuple[Any, Any]


class Reduction:
    """The buffers of one exchange, and its arithmetic. Collective: every rank makes one.

    Args:
        dist: torch.distributed.
        group: Of all ranks.
        device: Where its tensors must lie; None for the CPU.
    """

    def __init__(self, torch: Any, dist: Any, group: Any, device: Any) -> None:
        self._torch, self._dist, self._group, self._device = torch, dist, group, device
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        # The lowest bits of an end make room for its rank: 17 of 52 for 120,960 ranks.
        self._mask = np.int64((1 << (self._ranks - 1).bit_length()) - 1)
        self._centres: dict[int, NDArray[np.float64]] = {}
        self.make_room(0)

    def make_room(self, values: int) -> None:
        """Make the buffers for so many metrics."""
        torch = self._torch
        self._fits = values
        self._ends = torch.zeros(HEAD + 4 * values, dtype=torch.int64)
        self._sums = torch.zeros(2 * values, dtype=torch.float64)
        whole: NDArray[np.int64] = self._ends.numpy()
        self._head, self._by_end = whole[:HEAD], whole[HEAD:].reshape(4, values)
        self._by_sum: NDArray[np.float64] = self._sums.numpy().reshape(2, values)

    def begin(self, digest: int, step: int, metrics: Sequence[Any]) -> Sent:
        """Send this rank's metrics, sorted by name. Collective.

        Raises:
            RuntimeError: torch's, where a connection is closed.
        """
        try:
            values = np.array(metrics, dtype=np.float64)
        except OverflowError:  # an integer beyond 1.8e308
            values = np.array([as_float(each) for each in metrics])
        centre = self._centres.get(digest)
        if centre is None:
            centre = np.zeros(len(values))
        is_odd = len(values) > self._fits or not np.isfinite(values).all()
        about = zlib.crc32(centre.tobytes())
        self._head[:] = digest, ~digest, step, ~step, about, ~about, is_odd
        if not is_odd:
            count, mine = len(values), self._mask - self._rank
            top = _in_order(values)
            for row, end in zip(self._by_end[:, :count], (top, ~top) * 2, strict=True):
                row[:] = end
            ranked = self._by_end[2:, :count]
            ranked &= ~self._mask
            ranked |= mine
            self._fill_sums(values, centre)
        ends, greatest = self._reduce(self._ends, self._dist.ReduceOp.MAX)
        sums, added = self._reduce(self._sums, self._dist.ReduceOp.SUM)
        return Sent(digest, values, centre, (greatest, added), (ends, sums))

    def end(self, sent: Sent, wait: Callable[[Any], None]) -> list[float] | None:
        """Return the statistics, metric by metric, in the order of `statistic_names`. Collective.

        None on every rank where the ranks differ, a number is not finite, or one rank has more
        metrics than there is room for.

        Args:
            sent: What `begin` returned.
            wait: Waits for a collective; what it raises is raised.
        """
        for work in sent.works:
            wait(work)
        ends, sums = (tensor.cpu().numpy() for tensor in sent.tensors)
        digest, not_digest, step, not_step, about, not_about, is_odd = ends[:HEAD].tolist()
        if is_odd or digest != ~not_digest or step != ~not_step:
            return None
        count = len(sent.values)
        top, bottom, of_top, of_bottom = ends[HEAD:].reshape(4, -1)[:, :count]
        greatest, least = _as_doubles(top), _as_doubles(~bottom)
        with np.errstate(over="ignore", invalid="ignore"):
            spread, middle = greatest - least, least / 2 + greatest / 2
            away = np.maximum(np.abs(least - sent.centre), np.abs(greatest - sent.centre))
            centre = sent.centre
            if about != ~not_about or ((spread > 0) & (away > _FAR * spread)).any():
                # Known by integers, and so on all ranks alike: once more, about what is known now.
                centre = middle
                self._fill_sums(sent.values, centre)
                tensor, work = self._reduce(self._sums, self._dist.ReduceOp.SUM)
                wait(work)
                sums = tensor.cpu().numpy()
            if len(self._centres) >= _KEPT:
                self._centres.clear()
            self._centres[sent.digest] = middle
            first, second = sums.reshape(2, -1)[:, :count] / self._ranks
            mean = np.where(spread > 0, np.clip(centre + first, least, greatest), least)
            square = np.maximum(second - first * first, 0.0)
            std = np.where(spread > 0, np.sqrt(square), 0.0)
        owners = (self._mask - (row & self._mask) for row in (of_bottom, of_top))
        rows = (row.tolist() for row in (mean, std, least, greatest, *owners))
        return [number for metric in zip(*rows, strict=True) for number in metric]

    def _fill_sums(self, values: NDArray[np.float64], centre: NDArray[np.float64]) -> None:
        with np.errstate(over="ignore"):
            off = values - centre
            self._by_sum[:, : len(values)] = off, off * off

    def _reduce(self, tensor: Any, op: Any) -> tuple[Any, Any]:
        there = tensor if self._device is None else tensor.to(self._device)
        # The group's own method, as in `across`.
        return there, self._group.allreduce([there], op)


def _in_order(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return integers that are ordered as these doubles are; 0.0 and -0.0 give the same."""
    bits: NDArray[np.int64] = (values + 0.0).view(np.int64)
    return bits ^ ((bits >> 63) & _POSITIVE)


def _as_doubles(ordered: NDArray[np.int64]) -> NDArray[np.float64]:
    bits = ordered ^ ((ordered >> 63) & _POSITIVE)
    return bits.view(np.float64)
