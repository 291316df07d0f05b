"""What all ranks say of a metric: mean, spread, and who is at the ends."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ezpz_obs._context import Place
from ezpz_obs._errors import HistoryError
from ezpz_obs._records.numbers import as_float

from .backend import device_of, find_distributed, is_ring
from .exchange import HEAD, Exchange, Plan, Reduced
from .names import statistic_names
from .reduced import Reduction
from .roll_call import call_roll

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
    """The exchange of one `History`, on every rank. Collective: every rank makes one.

    Args:
        place: Who this process is.
        first_step: From which this rank's file goes on.
        timeout: Seconds to wait for the others at each update; None: as torch.distributed does.

    Raises:
        HistoryError: torch.distributed is not set up, or a rank did not come.
    """

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
        """Name who is missing where a collective fails.

        Raises:
            HistoryError: It failed.
        """
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
