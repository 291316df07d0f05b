"""What all ranks say of a metric: mean, spread, and who is at the ends."""

from __future__ import annotations

import itertools
import json
import math
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._context import Place
from ._errors import HistoryError
from ._file import as_float, statistic_names

# torch.distributed as `History` finds it: set up by somebody else, on whatever device.


def find_distributed(place: Place) -> Any:
    """Return the module torch.distributed."""
    torch = sys.modules.get("torch")
    dist = None if torch is None else torch.distributed
    if dist is None or not dist.is_available() or not dist.is_initialized():
        raise HistoryError(
            f"cross_rank=True on rank {place.rank} of {place.world_size}, and torch.distributed "
            "is not set up; expected ezpz_dist.setup_torch() (or init_process_group) before "
            "History(cross_rank=True)"
        )
    return dist


def is_ring(dist: Any, group: Any, device: Any) -> bool:
    """Return whether the group's all-reduce goes around all ranks, however little it adds."""
    # gloo's does, twice, with a message of its own to each neighbour at each step: on 8 ranks it
    # sends more for two of 1 kB than a gather of 256 bytes a rank (torch 2.13).
    return device is None and "cpu:gloo" in dist.get_backend_config(group).split(",")


def device_of(torch: Any, dist: Any, group: Any) -> Any:
    """Return where tensors of this group must lie, None for the CPU."""
    # "cpu:gloo,cuda:nccl": the CPU where it may be, which spares the device's queue.
    kinds = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    if "cpu" in kinds:
        return None
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


# Which ranks are missing, asked of the others through torch's store after a failure.

_SECONDS = 2.0
"""For the others to fail too, and say so."""

_HEARD = 1.0
"""For the others to read what one of them has found."""

_EACH = 64
"""Up to so many ranks each asks for itself. Of more, the first to come asks for all: one server
answers them, and thousands would ask it for thousands of keys."""

_AT_ONCE = 1024
"""Keys in one request: a server's time for one grows with the square (torch 2.13)."""

_SHOWN = 8


def call_roll(dist: Any, name: str, rank: int, ranks: int) -> tuple[list[int], int] | str:
    """Say in the store that this rank is here, and return the ranks that do not."""
    found: list[tuple[list[int], int]] = []

    def ask() -> None:
        # The store of the rendezvous; the function is private and old, and the only way to it.
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())  # noqa: SLF001
        store.set(str(rank), "here")
        if ranks <= _EACH:
            found.append(look(store))
            return
        if int(store.compare_set("asks", "", str(rank))) == rank:
            store.set("missing", json.dumps(look(store)))
        store.wait(["missing"], timedelta(seconds=_SECONDS + _HEARD))
        shown, count = json.loads(store.get("missing"))
        found.append((shown, count))
        heard = store.add("heard", 1)
        until = time.monotonic() + _HEARD
        # Rank 0 may hold the store, and may be about to end.
        while rank == 0 and heard < ranks - count and time.monotonic() < until:
            time.sleep(0.02)
            heard = store.add("heard", 0)

    def look(store: Any) -> tuple[list[int], int]:
        until = time.monotonic() + _SECONDS
        missing: Sequence[int] = [other for other in range(ranks) if other != rank]
        while missing and time.monotonic() < until:
            missing = _missing(store, missing)
            time.sleep(0.05 if missing else 0)
        return list(missing[:_SHOWN]), len(missing)

    def ask_quietly() -> None:
        try:
            ask()
        except RuntimeError:
            return  # the store is gone with the rank that held it: that is the answer

    # A request to a server that was stopped has no time-out of torch's: so in a thread.
    thread = threading.Thread(target=ask_quietly, name="ezpz_obs roll call", daemon=True)
    thread.start()
    thread.join(2 * _SECONDS)
    if not found:
        return "torch's store does not answer, so the rank that holds it (rank 0) may be gone"
    return found[0]


def _missing(store: Any, ranks: Sequence[int]) -> list[int]:
    """Return those of the ranks that are not there: few among many, so by halving."""
    if len(ranks) <= _AT_ONCE:
        if store.check([str(rank) for rank in ranks]):
            return []
        if len(ranks) == 1:
            return [ranks[0]]
    half = len(ranks) // 2
    return [*_missing(store, ranks[:half]), *_missing(store, ranks[half:])]


# Mean, spread and extreme ranks of metrics, and what differs between ranks, in words.

FEW = 16
"""Ranks up to which Python is quicker than numpy: of 2 ranks and 10 metrics, 20 µs against 60."""


def statistics(values: NDArray[np.float64], keys: Sequence[str]) -> dict[str, Any]:
    """Return mean, std (of the population), least, greatest and whose, of (ranks, metrics)."""
    if len(values) <= FEW:
        found = statistics_of_few(values.tolist(), keys)
        if found is not None:
            return found
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinities are allowed
        mean = values.mean(0)
        # Of the deviations from the mean, not of sums of squares: 1e5 ± 20 stays exact.
        std = np.sqrt(np.square(values - mean).mean(0))
    rows = (mean, std, values.min(0), values.max(0), values.argmin(0), values.argmax(0))
    by_metric = zip(*(row.tolist() for row in rows), strict=True)
    return dict(zip(keys, itertools.chain.from_iterable(by_metric), strict=True))


def statistics_of_few(
    rows: Sequence[Sequence[float]], keys: Sequence[str]
) -> dict[str, Any] | None:
    """Return what `statistics` does, or None where a number is not finite."""
    ranks = len(rows)
    numbers: list[float] = []
    for column in zip(*rows, strict=True):
        mean = sum(column) / ranks
        spread = sum([(value - mean) * (value - mean) for value in column])
        if not spread < math.inf:  # NaN is not either
            return None
        least, greatest = min(column), max(column)
        numbers += (
            mean, math.sqrt(spread / ranks), least, greatest,
            column.index(least), column.index(greatest),
        )  # fmt: skip
    return dict(zip(keys, numbers, strict=True))


def by_metric(table: NDArray[np.float64], names: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    """Return the statistics where ranks sent different metrics: each over those that have it."""
    # table: (ranks, values), each rank's in the order of its sorted names.
    places = [{name: place for place, name in enumerate(of)} for of in names]
    found: dict[str, Any] = {}
    for name in sorted({name for of in names for name in of}):
        ranks = [rank for rank, of in enumerate(places) if name in of]
        column = np.array([[table[rank, places[rank][name]]] for rank in ranks])
        of_metric = statistics(column, statistic_names([name]))
        for end in ("min_rank", "max_rank"):
            of_metric[f"{name}/{end}"] = ranks[of_metric[f"{name}/{end}"]]
        found |= of_metric
    return found


def other_names(names: Sequence[tuple[str, ...]], hosts: Sequence[str]) -> str:
    everywhere = set(names[0]).intersection(*names[1:])
    different = []
    for name in sorted({name for of in names for name in of} - everywhere):
        having = [rank for rank, of in enumerate(names) if name in of]
        lacking = [rank for rank, of in enumerate(names) if name not in of]
        few, verb = (having, "only") if len(having) <= len(lacking) else (lacking, "not")
        different.append(f"{name!r} {verb} on {_ranks(few, hosts)}")
    shown = ", ".join(different[:5]) + (f" and {len(different) - 5} more" if different[5:] else "")
    return (
        f"metrics differ between ranks: {shown}; expected the same names on every rank: the "
        "statistics of each are of the ranks that have it"
    )


def other_steps(steps: Sequence[int], hosts: Sequence[str]) -> str:
    usual = max(set(steps), key=steps.count)
    others = [rank for rank, step in enumerate(steps) if step != usual]
    at = ", ".join(f"{_ranks([rank], hosts)} at step {steps[rank]}" for rank in others[:5])
    return (
        f"ranks record different steps: {at}, the others at step {usual}; expected one step on "
        "every rank: such records have no statistics"
    )


def _ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    shown = ", ".join(f"rank {rank} ({hosts[rank]})" for rank in ranks[:3])
    return shown + (f" and {len(ranks) - 3} more" if len(ranks) > 3 else "")


# Statistics by two all-reduces, whose size does not grow with the number of ranks.
#
# Gathered, each rank is sent what every other one has: 31 MB of ten metrics on 120,960 ranks. Here,
# where the backend reduces by a tree (NCCL, XCCL, MPI; gloo does not, and gathers),
# one all-reduce (MAX, of integers) finds the ends and whose they are, and whether the ranks agree;
# another (SUM) mean and spread. Both are on their way at once. Where the ranks differ, or a number
# is not finite, every rank learns of it by the same integers, and all gather.

ENDS_HEAD = 7
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
    """The buffers of one exchange, and its arithmetic. Collective: every rank makes one."""

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
        self._ends = torch.zeros(ENDS_HEAD + 4 * values, dtype=torch.int64)
        self._sums = torch.zeros(2 * values, dtype=torch.float64)
        whole: NDArray[np.int64] = self._ends.numpy()
        self._head, self._by_end = whole[:ENDS_HEAD], whole[ENDS_HEAD:].reshape(4, values)
        self._by_sum: NDArray[np.float64] = self._sums.numpy().reshape(2, values)

    def begin(self, digest: int, step: int, metrics: Sequence[Any]) -> Sent:
        """Send this rank's metrics, sorted by name. Collective."""
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
        digest, not_digest, step, not_step, about, not_about, is_odd = ends[:ENDS_HEAD].tolist()
        if is_odd or digest != ~not_digest or step != ~not_step:
            return None
        count = len(sent.values)
        top, bottom, of_top, of_bottom = ends[ENDS_HEAD:].reshape(4, -1)[:, :count]
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


# One update of `History` on its way between the ranks: gathered, or reduced.

HEAD = 4
"""What each rank sends before its values: digest of their names, how many, step, bytes of names."""


class Answer(NamedTuple):
    """What came of one exchange."""

    values: dict[str, Any]
    """``{"loss/mean": .., "loss/std": .., ...}``; empty where the ranks were at different steps."""
    warning: str | None
    """What differs between ranks, in words; said once for each difference."""


class Plan(NamedTuple):
    """What does not change while the same names are recorded in the same order."""

    names: tuple[str, ...]
    order: list[str]
    head: tuple[float, int]
    text: bytes
    keys: list[str]


class Exchange:
    """One update on its way to the others."""

    def __init__(self, across: Across, plan: Plan, mine: list[Any], step: int, work: Any) -> None:
        self._across, self._plan, self._mine = across, plan, mine
        self._step, self._work = step, work

    def end(self, seconds: float | None = None) -> Answer:
        """Wait for the other ranks. Collective.

        Args:
            seconds: At most so long.

        Raises:
            HistoryError: A rank did not come; it is named, with its host and last step.
        """
        across, plan, step = self._across, self._plan, self._step
        table = across.receive(self._work, step, seconds)
        found = self._alike(table)
        if found is not None:
            return Answer(found, None)
        most = int(table[:, 1].max())
        if most > across.fits:
            # All ranks see that, make room, and send once more.
            across.make_room(max(most, 2 * across.fits))
            return across.begin(step, dict(zip(plan.order, self._mine, strict=True))).end(seconds)
        steps = table[:, 2].astype(np.int64).tolist()
        across.last_steps = steps
        names = across.names_of(table, plan)
        if len(set(steps)) > 1:
            new = across.is_new(tuple(other - steps[0] for other in steps))
            return Answer({}, other_steps(steps, across.hosts) if new else None)
        new = across.is_new(tuple(table[:, 0].tolist()))
        values = by_metric(table[:, HEAD:], names)
        return Answer(values, other_names(names, across.hosts) if new else None)

    def _alike(self, table: NDArray[np.float64]) -> dict[str, Any] | None:
        """Return the statistics where all ranks sent the same metrics of the same step."""
        across, plan = self._across, self._plan
        count = len(plan.order)
        if count > across.fits:  # nobody has sent so many
            return None
        if across.ranks <= FEW:
            rows = table[:, : HEAD + count].tolist()
            head = rows[0][:3]
            alike = all(row[:3] == head for row in rows)
        else:
            alike = bool((table[:, :3] == table[0, :3]).all())
        if not alike:
            return None
        across.last_steps = [self._step] * across.ranks
        found = None
        if across.ranks <= FEW:
            found = statistics_of_few([row[HEAD:] for row in rows], plan.keys)
        return found or statistics(table[:, HEAD : HEAD + count], plan.keys)


class Reduced:
    """One update on its way, by all-reduces."""

    def __init__(self, across: Across, plan: Plan, mine: list[Any], step: int, sent: Sent) -> None:
        self._across, self._plan, self._mine = across, plan, mine
        self._step, self._sent = step, sent

    def end(self, seconds: float | None = None) -> Answer:
        """Do what `Exchange.end` does."""
        across, plan, step = self._across, self._plan, self._step
        assert across.reduction is not None
        until = time.monotonic() + (seconds or 0.0)

        def left() -> float | None:
            return None if seconds is None else max(until - time.monotonic(), 0.001)

        found = across.reduction.end(self._sent, lambda work: across.wait(work, step, left()))
        if found is None:
            # Every rank finds that, and all gather: who differs is named, and whose number is NaN.
            return across.gather(plan, self._mine, step).end(left())
        across.last_steps = [step] * across.ranks
        return Answer(dict(zip(plan.keys, found, strict=True)), None)


# What all ranks say of a metric: mean, spread, and who is at the ends.

_WARNINGS = 20  # of one kind; names that change at every step need no more
ROOM = 28  # values at first: with the head 256 bytes, which take no longer than eight
_GROUP_OF_ITS_OWN = 1024
"""Up to so many ranks a group is made for metrics alone, so that a rank that forgets to call
`update` cannot have its neighbours' metrics taken for another collective. Each rank connects to
all others in it."""
GATHERED = 1024
"""Up to so many ranks, and over gloo, one all-gather brings each what all have; beyond, statistics
are made by all-reduces, and gathered only where ranks differ or a number is not finite."""

_made = itertools.count()


class Across:
    """The exchange of one `History`. Collective: every rank makes one."""

    def __init__(self, place: Place, first_step: int, timeout: float | None) -> None:
        dist = find_distributed(place)
        self._timeout = None if timeout is None else timedelta(seconds=timeout)
        self._torch = sys.modules["torch"]
        self._dist = dist
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._name = f"ezpz_obs/history/{next(_made)}"
        self.last_steps: list[int | None] = [None] * self.ranks
        self.hosts = ["?"] * self.ranks
        own = self.ranks <= _GROUP_OF_ITS_OWN
        with self._everybody(None):
            self._group = dist.new_group(timeout=self._timeout) if own else dist.group.WORLD
        self._device = device_of(self._torch, dist, self._group)
        self._plans: dict[tuple[str, ...], Plan] = {}
        self._named: dict[float, tuple[str, ...]] = {}
        self._said: set[tuple[float, ...]] = set()
        self.reduction: Reduction | None = None
        if self.ranks > GATHERED and not is_ring(dist, self._group, self._device):
            self.reduction = Reduction(self._torch, dist, self._group, self._device)
        self.make_room(ROOM)
        with self._everybody(None):
            said = [text.decode() for text in self._texts(f"{first_step} {place.host}".encode())]
        self.hosts = [text.partition(" ")[2] for text in said]
        self.first_step = max(int(text.partition(" ")[0]) for text in said)

    def begin(self, step: int, metrics: Mapping[str, Any]) -> Exchange | Reduced:
        """Send this rank's numbers; the others' are waited for by `Exchange.end`."""
        names = tuple(metrics)
        plan = self._plans.get(names) or self._plan(names)
        mine = [metrics[name] for name in plan.order]
        if self.reduction is None:
            return self.gather(plan, mine, step)
        try:
            sent = self.reduction.begin(int(plan.head[0]), step, mine)
        except RuntimeError as error:  # torch's for connections that are closed already
            raise self._absent(step, error) from None
        return Reduced(self, plan, mine, step, sent)

    # What follows is for Exchange and Reduced.

    def gather(self, plan: Plan, mine: list[Any], step: int) -> Exchange:
        """Send this rank's numbers to every rank."""
        if not self._slots:
            self._make_slots()
        head = (*plan.head, step, len(plan.text))
        if len(mine) > self.fits:
            self._mine[:HEAD] = head
        else:
            try:
                self._mine[: HEAD + len(mine)] = (*head, *mine)
            except OverflowError:  # an integer beyond 1.8e308
                self._mine[: HEAD + len(mine)] = (*head, *map(as_float, mine))
        inward = self._inward if self._device is None else self._inward.to(self._device)
        try:
            # The group's own method: what torch.distributed.all_gather logs of each call takes
            # 50 µs.
            return Exchange(self, plan, mine, step, self._group.allgather([self._slots], [inward]))
        except RuntimeError as error:
            raise self._absent(step, error) from None

    def receive(self, work: Any, step: int, seconds: float | None) -> NDArray[np.float64]:
        """Wait for what was gathered, and return it: a row a rank."""
        self.wait(work, step, seconds)
        if self._device is None:
            return self._all
        received: NDArray[np.float64] = self._outward.cpu().numpy().reshape(self._all.shape)
        return received

    def wait(self, work: Any, step: int, seconds: float | None) -> None:
        """Wait for a collective; the rank that does not come is named."""
        limit = self._timeout if seconds is None else timedelta(seconds=seconds)
        until = time.monotonic() + (seconds or 0.0)
        try:
            if limit is not None and self._device is None:
                work.wait(limit)
            else:  # of a device's work the wait is its queue's, without a limit
                while seconds is not None and not work.is_completed():
                    if time.monotonic() > until:
                        raise RuntimeError(f"no answer within {seconds:.3g} s")
                    time.sleep(0.01)
                work.wait()
        except RuntimeError as error:  # torch's for time-outs, closed connections and aborts
            raise self._absent(step, error) from None

    @contextmanager
    def _everybody(self, step: int | None) -> Iterator[None]:
        """Name who is missing where a collective fails."""
        try:
            yield
        except RuntimeError as error:  # torch's for time-outs, closed connections and aborts
            raise self._absent(step, error) from None

    def _absent(self, step: int | None, error: Exception) -> HistoryError:
        missing = call_roll(self._dist, f"{self._name}/{step}", self.rank, self.ranks)
        if isinstance(missing, str):
            who = missing
        else:
            shown, count = missing
            who = "; ".join(
                f"rank {rank} on {self.hosts[rank]} recorded "
                + ("nothing" if last is None else f"step {last} last")
                for rank, last in ((rank, self.last_steps[rank]) for rank in shown)
            ) + (f"; and {count - len(shown)} more" if count > len(shown) else "")
        at = "begins" if step is None else f"at step {step}"
        return HistoryError(
            f"History {at}: {who or 'all ranks came, and the exchange failed'}; expected every "
            f"rank to call update() at every step (cross_rank=True). torch says: {error}"
        )

    def make_room(self, values: int) -> None:
        """Make the buffers for so many values a rank."""
        self.fits = values
        self._slots: list[Any] = []
        if self.reduction is None:
            self._make_slots()
        else:  # which may do without what all ranks have: 31 MB for 120,960 of them
            self.reduction.make_room(values)

    def _make_slots(self) -> None:
        torch, size = self._torch, HEAD + self.fits
        self._inward = torch.zeros(size, dtype=torch.float64)
        self._mine: NDArray[np.float64] = self._inward.numpy()
        self._outward = torch.empty(self.ranks * size, dtype=torch.float64, device=self._device)
        self._slots = list(self._outward.split(size))
        host = self._outward if self._device is None else torch.empty(self.ranks * size)
        self._all: NDArray[np.float64] = host.numpy().reshape(self.ranks, size)

    def _texts(self, mine: bytes, longest: int = 0) -> list[bytes]:
        """Return every rank's text. Collective."""
        torch, device = self._torch, self._device
        if not longest:
            length = torch.tensor([len(mine)], dtype=torch.int64, device=device)
            self._dist.all_reduce(length, op=self._dist.ReduceOp.MAX, group=self._group)
            longest = int(length.item())
        sent = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
        got = torch.empty(self.ranks * longest, dtype=torch.uint8, device=device)
        sent = sent if device is None else sent.to(device)
        self._dist.all_gather(list(got.split(longest)), sent, group=self._group)
        whole = got.cpu().numpy().tobytes()
        return [whole[i : i + longest].rstrip(b"\0") for i in range(0, len(whole), longest)]

    def _plan(self, names: tuple[str, ...]) -> Plan:
        order = sorted(names)
        text = json.dumps(order).encode()  # whatever is in a name
        # 52 bits are a double exactly.
        digest = int.from_bytes(blake2b(text, digest_size=8).digest()) >> 12
        plan = Plan(names, order, (float(digest), len(order)), text, statistic_names(order))
        if len(self._plans) > 1000:  # names that change at each step would be kept for ever
            self._plans.clear()
        self._plans[names] = plan
        return plan

    def is_new(self, difference: tuple[float, ...]) -> bool:
        """Say whether this difference between ranks was not said yet, nor too many others."""
        if difference in self._said or len(self._said) >= _WARNINGS:
            return False
        self._said.add(difference)
        return True

    def names_of(self, table: NDArray[np.float64], plan: Plan) -> list[tuple[str, ...]]:
        """Return the names that each rank sent, asking for those not heard of. Collective."""
        digests = table[:, 0].tolist()
        if any(digest not in self._named for digest in digests):
            with self._everybody(int(table[0, 2])):
                texts = self._texts(plan.text, int(table[:, 3].max()))
            for digest, text in zip(digests, texts, strict=True):
                self._named[digest] = tuple(json.loads(text))
        return [self._named[digest] for digest in digests]
