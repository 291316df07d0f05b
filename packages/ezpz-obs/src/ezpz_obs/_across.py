"""What all ranks say of a metric: mean, spread, and who is at the ends."""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ._context import Place
from ._errors import HistoryError
from ._file import as_float, statistic_names

if TYPE_CHECKING:
    from numpy.typing import NDArray


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


FEW = 16  # up to so many ranks Python is quicker than numpy: of 2 and 10 metrics 20 µs, not 60


def statistics(values: NDArray[np.float64], keys: Sequence[str]) -> dict[str, Any]:
    """Return mean, std (of the population), least, greatest and whose, of (ranks, metrics)."""
    if len(values) <= FEW:
        found = _of_few(values.tolist(), keys)
        if found is not None:
            return found
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinities are allowed
        mean = values.mean(0)
        # Of the deviations from the mean, not of sums of squares: 1e5 ± 20 stays exact.
        std = np.sqrt(np.square(values - mean).mean(0))
    rows = (mean, std, values.min(0), values.max(0), values.argmin(0), values.argmax(0))
    by_metric = zip(*(row.tolist() for row in rows), strict=True)
    return dict(zip(keys, itertools.chain.from_iterable(by_metric), strict=True))


def _of_few(rows: list[list[float]], keys: Sequence[str]) -> dict[str, Any] | None:
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


# Statistics by all-reduces, whose size does not grow with the number of ranks. (Gathered, each
# rank is sent what every other one has: 31 MB of ten metrics on 120,960 ranks.) Where the backend
# reduces by a tree (NCCL, XCCL, MPI; gloo does not), one finds the ends, and whether the ranks
# agree. Then two at once find mean and spread, and whose the ends are. Where ranks differ, or a
# number is not finite, all learn of it by the first, and gather.

ENDS_HEAD = 5
"""Numbers before the metrics': digest of the names and step, each with its negative (the greatest
of both is one number only where all are equal), and whether something is odd."""

_KEPT = 1000  # names that change at each step would be kept for ever


class Sent(NamedTuple):
    values: NDArray[np.float64]  # this rank's
    ends: Any  # where the greatest of all will be
    work: Any


class Reduction:
    """The exchange of metrics by all-reduces. Collective: every rank makes one."""

    def __init__(self, torch: Any, dist: Any, group: Any, device: Any) -> None:
        self._torch, self._dist, self._group, self._device = torch, dist, group, device
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self.room = 0  # how many metrics fit in

    def begin(self, digest: float, step: int, metrics: Sequence[Any]) -> Sent:
        """Send this rank's metrics, sorted by name. Collective."""
        try:
            values = np.array(metrics, dtype=np.float64)
        except OverflowError:  # an integer beyond 1.8e308
            values = np.array([as_float(each) for each in metrics])
        is_odd = len(values) > self.room or not np.isfinite(values).all()
        ends = np.zeros((2, self.room))
        if not is_odd:
            ends[:, : len(values)] = values, -values
        head = np.array([digest, -digest, step, -step, is_odd])
        return Sent(values, *self._reduce(np.append(head, ends), self._dist.ReduceOp.MAX))

    def end(self, sent: Sent, wait: Callable[[Any], None]) -> list[float] | None:
        """Return the statistics, in the order of `statistic_names`. Collective."""
        # None on every rank where ranks differ, a number is not finite, or there is no room.
        wait(sent.work)
        ends = sent.ends.cpu().numpy()
        digest, less_digest, step, less_step, is_odd = ends[:ENDS_HEAD].tolist()
        if is_odd or digest != -less_digest or step != -less_step:
            return None
        values, count = sent.values, len(sent.values)
        if not count:
            return []
        greatest, negative = ends[ENDS_HEAD:].reshape(2, -1)[:, :count]
        least = -negative
        with np.errstate(over="ignore", invalid="ignore"):
            # Of the deviations from what all ranks know, not of the numbers: 1e5 ± 20 stays exact.
            middle = least / 2 + greatest / 2
            off = values - middle
            sums, added = self._reduce(np.append(off, off * off), self._dist.ReduceOp.SUM)
            # Of several that have it the lowest rank, as where they are gathered.
            mine = [np.where(values == end, -self._rank, -self._ranks) for end in (least, greatest)]
            owners, found = self._reduce(
                np.array(mine, dtype=np.float64).ravel(), self._dist.ReduceOp.MAX
            )
            wait(added)
            wait(found)
            first, second = sums.cpu().numpy().reshape(2, count) / self._ranks
            spread = greatest > least
            mean = np.where(spread, np.clip(middle + first, least, greatest), least)
            std = np.where(spread, np.sqrt(np.maximum(second - first * first, 0.0)), 0.0)
        whose = -owners.cpu().numpy().astype(np.int64).reshape(2, count)
        rows = (row.tolist() for row in (mean, std, least, greatest, *whose))
        return [number for metric in zip(*rows, strict=True) for number in metric]

    def _reduce(self, numbers: NDArray[np.float64], op: Any) -> tuple[Any, Any]:
        there = self._torch.from_numpy(numbers).to(self._device or "cpu")
        # The group's own method, as in `Across`.
        return there, self._group.allreduce([there], op)


HEAD = 4  # each rank sends before its values: digest of their names, how many, step, bytes of names
ROOM = 28  # values at first: with the head 256 bytes, which take no longer than eight
_WARNINGS = 20  # of one kind; names that change at every step need no more
# Up to so many ranks a group is made for metrics alone, so that a rank that forgets to update
# cannot have its neighbours' metrics taken for another collective. Each connects to all others.
_GROUP_OF_ITS_OWN = 1024
# Up to so many ranks, and over gloo, one all-gather brings each what all have; beyond, statistics
# are made by all-reduces, and gathered only where ranks differ or a number is not finite.
GATHERED = 1024


class Plan(NamedTuple):
    """What does not change while the same names are recorded in the same order."""

    order: list[str]
    head: tuple[float, int]
    text: bytes
    keys: list[str]


class Exchange(NamedTuple):
    """One update on its way: what this rank sent, and torch's work, or that of a `Reduction`."""

    plan: Plan
    mine: list[Any]
    step: int
    work: Any


class Across:
    """The exchange of one `History`. Collective: every rank makes one."""

    def __init__(self, place: Place, first_step: int, timeout: float | None) -> None:
        torch: Any = sys.modules.get("torch")
        dist = None if torch is None else torch.distributed
        if dist is None or not dist.is_available() or not dist.is_initialized():
            raise HistoryError(
                f"cross_rank=True on rank {place.rank} of {place.world_size}, and "
                "torch.distributed is not set up; expected ezpz_dist.setup_torch() (or "
                "init_process_group) before History(cross_rank=True)"
            )
        self._torch, self._dist = torch, dist
        self._timeout = None if timeout is None else timedelta(seconds=timeout)
        self._ranks = dist.get_world_size()
        own = self._ranks <= _GROUP_OF_ITS_OWN
        with _Explained(None):
            self._group = dist.new_group(timeout=self._timeout) if own else dist.group.WORLD
        self._device = device_of(self._torch, dist, self._group)
        self._plans: dict[tuple[str, ...], Plan] = {}
        self._named: dict[float, tuple[str, ...]] = {}
        self._said: set[tuple[float, ...]] = set()
        self.reduction: Reduction | None = None
        if self._ranks > GATHERED and not is_ring(dist, self._group, self._device):
            self.reduction = Reduction(self._torch, dist, self._group, self._device)
        self._slots: list[Any]
        self._all: NDArray[np.float64]  # what was gathered: a row a rank
        self._make_room(ROOM)
        with _Explained(None):
            said = [text.decode() for text in self._texts(f"{first_step} {place.host}".encode())]
        self._hosts = [text.partition(" ")[2] for text in said]
        self.first_step = max(int(text.partition(" ")[0]) for text in said)

    def begin(self, step: int, metrics: Mapping[str, Any]) -> Exchange:
        """Send this rank's numbers; the others' are waited for by `end`."""
        names = tuple(metrics)
        plan = self._plans.get(names) or self._plan(names)
        mine = [metrics[name] for name in plan.order]
        if self.reduction is None:
            return self._gather(plan, mine, step)
        with _Explained(step):  # where connections are closed already
            sent = self.reduction.begin(plan.head[0], step, mine)
        return Exchange(plan, mine, step, sent)

    def end(
        self, exchange: Exchange, seconds: float | None = None
    ) -> tuple[dict[str, Any], str | None]:
        until = None if seconds is None else time.monotonic() + seconds
        plan, mine, step, work = exchange
        if self.reduction is not None and isinstance(work, Sent):
            with _Explained(step):  # its second round may find connections closed
                numbers = self.reduction.end(work, lambda each: self._wait(each, step, until))
            if numbers is not None:
                return dict(zip(plan.keys, numbers, strict=True)), None
            # Every rank finds that, and all gather: who differs is named, and whose number is NaN.
            work = self._gather(plan, mine, step).work
        self._wait(work, step, until)
        if self._device is not None:
            self._all = self._outward.cpu().numpy().reshape(self._ranks, -1)
        table = self._all
        count, heads = len(plan.order), table[:, :3].tolist()
        # One that has more metrics than there is room for has sent none.
        if count <= self._fits and all(head == heads[0] for head in heads):
            return statistics(table[:, HEAD : HEAD + count], plan.keys), None
        most = int(table[:, 1].max())
        if most > self._fits:
            # All ranks see that, make room, and send once more.
            self._make_room(max(most, 2 * self._fits))
            again = self.begin(step, dict(zip(plan.order, mine, strict=True)))
            return self.end(again, None if until is None else until - time.monotonic())
        steps = table[:, 2].astype(np.int64).tolist()
        names = self._names_of(table, plan)
        if len(set(steps)) > 1:
            new = self._is_new(tuple(other - steps[0] for other in steps))
            return {}, other_steps(steps, self._hosts) if new else None
        new = self._is_new(tuple(table[:, 0].tolist()))
        values = by_metric(table[:, HEAD:], names)
        return values, other_names(names, self._hosts) if new else None

    def _gather(self, plan: Plan, mine: list[Any], step: int) -> Exchange:
        if not self._slots:
            self._make_slots()
        head = (*plan.head, step, len(plan.text))
        if len(mine) > self._fits:
            self._mine[:HEAD] = head
        else:
            try:
                self._mine[: HEAD + len(mine)] = (*head, *mine)
            except OverflowError:  # an integer beyond 1.8e308
                self._mine[: HEAD + len(mine)] = (*head, *map(as_float, mine))
        inward = self._inward if self._device is None else self._inward.to(self._device)
        with _Explained(step):
            # The group's own method: torch.distributed.all_gather takes 50 µs to log the call.
            work = self._group.allgather([self._slots], [inward])
        return Exchange(plan, mine, step, work)

    def _wait(self, work: Any, step: int, until: float | None) -> None:
        limit = self._timeout
        if until is not None:
            limit = timedelta(seconds=max(until - time.monotonic(), 0.001))
        with _Explained(step):
            if limit is not None and self._device is None:
                work.wait(limit)
                return
            # Of a device's work the wait is its queue's, without a limit.
            while until is not None and not work.is_completed():
                if time.monotonic() > until:
                    raise RuntimeError("no answer in the time there is")
                time.sleep(0.01)
            work.wait()

    def _make_room(self, values: int) -> None:
        self._fits, self._slots = values, []
        if self.reduction is not None:
            self.reduction.room = values

    def _make_slots(self) -> None:
        """Make room for what all ranks have: 31 MB of 120,960 of them, whom a reduction spares."""
        torch, size = self._torch, HEAD + self._fits
        self._inward = torch.zeros(size, dtype=torch.float64)
        self._mine: NDArray[np.float64] = self._inward.numpy()
        self._outward = torch.empty(self._ranks * size, dtype=torch.float64, device=self._device)
        self._slots = list(self._outward.split(size))
        if self._device is None:
            self._all = self._outward.numpy().reshape(self._ranks, size)

    def _texts(self, mine: bytes, longest: int = 0) -> list[bytes]:
        """Return every rank's text. Collective."""
        torch, device = self._torch, self._device
        if not longest:
            length = torch.tensor([len(mine)], dtype=torch.int64, device=device)
            self._dist.all_reduce(length, op=self._dist.ReduceOp.MAX, group=self._group)
            longest = int(length.item())
        sent = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
        got = torch.empty(self._ranks * longest, dtype=torch.uint8, device=device)
        sent = sent if device is None else sent.to(device)
        self._dist.all_gather(list(got.split(longest)), sent, group=self._group)
        whole = got.cpu().numpy().tobytes()
        return [whole[i : i + longest].rstrip(b"\0") for i in range(0, len(whole), longest)]

    def _plan(self, names: tuple[str, ...]) -> Plan:
        order = sorted(names)
        text = json.dumps(order).encode()  # whatever is in a name
        # 52 bits are a double exactly.
        digest = int.from_bytes(blake2b(text, digest_size=8).digest()) >> 12
        plan = Plan(order, (float(digest), len(order)), text, statistic_names(order))
        if len(self._plans) >= _KEPT:
            self._plans.clear()
        self._plans[names] = plan
        return plan

    def _is_new(self, difference: tuple[float, ...]) -> bool:
        """Say whether this difference between ranks was not said yet, nor too many others."""
        if difference in self._said or len(self._said) >= _WARNINGS:
            return False
        self._said.add(difference)
        return True

    def _names_of(self, table: NDArray[np.float64], plan: Plan) -> list[tuple[str, ...]]:
        """Return the names that each rank sent, asking for those not heard of. Collective."""
        digests = table[:, 0].tolist()
        if any(digest not in self._named for digest in digests):
            with _Explained(int(table[0, 2])):
                texts = self._texts(plan.text, int(table[:, 3].max()))
            for digest, text in zip(digests, texts, strict=True):
                self._named[digest] = tuple(json.loads(text))
        return [self._named[digest] for digest in digests]


class _Explained:
    """Make torch's error of a collective a `HistoryError`, with what ezpz_dist knows of it."""

    # A class, since `contextmanager` takes 2 µs of each update.

    def __init__(self, step: int | None) -> None:
        self._step = step

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, RuntimeError):  # torch's for time-outs, closed connections, aborts
            return
        at = "begins" if self._step is None else f"at step {self._step}"
        # Only a script that uses ezpz_dist has it; else torch's error is all that is known.
        watch = sys.modules.get("ezpz_dist._watch")
        describe = getattr(watch, "describe_missing_ranks", None)
        who = (describe and describe()) or "a rank did not come"
        raise HistoryError(
            f"History {at}: {who}; expected every rank to call update() at every step "
            f"(cross_rank=True). torch says: {error}"
        ) from None
