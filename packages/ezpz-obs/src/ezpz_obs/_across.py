"""Mean, standard deviation, extremes and their ranks of each metric, over all ranks.

By one all-gather: of reductions a second one (deviation, ranks) would have to wait for the first.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ._context import RankInfo
from ._errors import HistoryError
from ._records import STATISTICS, as_float

_HEAD: Final = 3  # numbers before the metrics: a digest of their names, the step, how many
ROW_BYTES: Final = 256  # that each rank sends, up to 29 metrics
_CLOSE_SECONDS: Final = 3.0  # that the end of a run waits for the other ranks


@dataclass(frozen=True)
class Exchange:
    """One update on its way."""

    step: int
    metrics: dict[str, float]  # sorted by name
    gathered: Any  # a tensor of shape (ranks, _HEAD + room), complete once the work is done
    work: Any


class Across:
    """Exchanges metrics by one all-gather an update. Collective: every rank makes one."""

    def __init__(self, place: RankInfo, first_step: int) -> None:
        torch: Any = sys.modules.get("torch")
        dist = None if torch is None else torch.distributed
        if dist is None or not dist.is_available() or not dist.is_initialized():
            raise HistoryError(
                f"cross_rank=True on rank {place.rank} of {place.world_size}, and "
                "torch.distributed is not set up; expected ezpz_dist.setup_torch() (or "
                "init_process_group) before History(cross_rank=True)"
            )
        self._torch = torch
        self._dist = dist
        self._room = ROW_BYTES // 8 - _HEAD  # metrics in a row
        self._device = _find_device(torch, dist)
        self._warned: set[str] = set()
        with _translate_errors("begins"):
            # A separate group: a rank that forgets to update cannot have its neighbours' metrics
            # taken for another collective.
            world = dist.group.WORLD._get_backend(torch.device(self._device))  # noqa: SLF001
            self._group = dist.new_group(timeout=world.options._timeout)  # noqa: SLF001
            facts: list[Any] = [None] * place.world_size
            dist.all_gather_object(facts, (first_step, place.host), group=self._group)
        self.first_step: int = max(step for step, _ in facts)  # rank 0 continues its file
        self._hosts = [host for _, host in facts]

    def begin(self, step: int, metrics: Mapping[str, Any]) -> Exchange:
        """Send this rank's numbers; the others' are waited for by `end`. Collective."""
        numbers = {name: as_float(metrics[name]) for name in sorted(metrics)}
        digest = blake2b(json.dumps(list(numbers)).encode(), digest_size=6).digest()
        row = [float(int.from_bytes(digest)), float(step), float(len(numbers))]  # 48 bits are exact
        row += [*numbers.values(), *[0.0] * self._room][: self._room]
        with _translate_errors(f"at step {step}"):
            own = self._torch.tensor(row, dtype=self._torch.float64, device=self._device)
            gathered = own.new_empty(len(self._hosts), len(row))
            parts = list(gathered.unbind())
            work = self._dist.all_gather(parts, own, group=self._group, async_op=True)
        return Exchange(step, numbers, gathered, work)

    def end(self, exchange: Exchange, *, closing: bool = False) -> tuple[dict[str, float], str]:
        """Return the statistics by name, and a warning where ranks differ ("" where not)."""
        with _translate_errors(f"at step {exchange.step}"):
            if closing and self._device == "cpu":
                exchange.work.wait(timedelta(seconds=_CLOSE_SECONDS))
            else:
                exchange.work.wait()
        table = exchange.gathered.cpu().numpy()
        most = int(table[:, _HEAD - 1].max())
        if most > self._room:  # all ranks see that, make room, and send once more
            self._room = 2 * most
            again = self.begin(exchange.step, exchange.metrics)
            return self.end(again, closing=closing)
        different = np.flatnonzero((table[:, :_HEAD] != table[0, :_HEAD]).any(axis=1)).tolist()
        if different:
            return {}, self._warn(table, different)
        return compute_statistics(table[:, _HEAD : _HEAD + most], list(exchange.metrics)), ""

    def _warn(self, table: NDArray[np.float64], different: Sequence[int]) -> str:
        """Return what differs between the ranks; "" if it was returned before."""
        ranks = ", ".join(f"rank {rank} ({self._hosts[rank]})" for rank in different[:3])
        if len(different) > 3:
            ranks += f" and {len(different) - 3} more"
        problem = "metrics of other names"
        if (table[:, 1] != table[0, 1]).any():
            problem = "other steps"
        warning = (
            f"{ranks} recorded {problem} than rank 0; expected the same steps and names on every "
            "rank: such records have no statistics"
        )
        is_new = warning not in self._warned
        self._warned.add(warning)
        return warning if is_new else ""


def compute_statistics(values: NDArray[np.float64], names: Sequence[str]) -> dict[str, float]:
    """Return ``loss/mean``, ``loss/std`` (of the population), ... of values (ranks, metrics)."""
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinities are allowed
        reductions = (values.mean, values.std, values.min, values.max, values.argmin, values.argmax)
        rows = [reduction(axis=0).tolist() for reduction in reductions]
    statistics: dict[str, float] = {}
    for name, *numbers in zip(names, *rows, strict=True):
        for statistic, number in zip(STATISTICS, numbers, strict=True):
            statistics[f"{name}/{statistic}"] = number
    return statistics


def _find_device(torch: Any, dist: Any) -> Any:
    """Return where the tensors of a collective must lie."""
    # "cpu:gloo,cuda:nccl": the CPU where it may be, which spares the device's queue.
    kinds = [pair.partition(":")[0] for pair in dist.get_backend_config().split(",")]
    if "cpu" in kinds:
        return "cpu"
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


@contextmanager
def _translate_errors(when: str) -> Iterator[None]:
    """Make torch's error of a collective a `HistoryError`, with what ezpz_dist knows of it."""
    try:
        yield
    except RuntimeError as error:  # torch's for time-outs, closed connections, aborts
        # Only a script that uses ezpz_dist has it; else torch's error is all that is known.
        watch: Any = sys.modules.get("ezpz_dist._watch")
        missing = watch.describe_missing_ranks() if watch else None
        raise HistoryError(
            f"History {when}: {missing or 'a rank did not come'}; expected every rank to call "
            f"update() at every step (cross_rank=True). torch says: {error}"
        ) from None
