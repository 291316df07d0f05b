"""torch's profiler for a few steps of a few ranks."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, Self

from ._context import find_rank_info
from ._errors import ObsError

logger = logging.getLogger("ezpz_obs")
_ROWS = 40


def profile(
    directory: str | os.PathLike[str],
    *,
    steps: tuple[int, int] = (10, 13),
    ranks: Collection[int] | None = (0,),
    first: int = 0,
    shapes: bool = False,
    memory: bool = False,
    stacks: bool = False,
) -> Profile:
    """Profile a few steps of a few ranks by torch's profiler; all the others cost nothing.

    A context manager around the loop; call its ``step()`` at the end of each step::

        with profile("outputs/profile", steps=(10, 13)) as profiler:
            for batch in loader:
                train(batch)
                profiler.step()

    Each rank that is chosen writes ``trace-rank00000-steps10-12.json`` (for Perfetto or
    ``chrome://tracing``) and beside it a table of the operators, ``.txt``. The step before the
    first runs under the profiler too, but is not recorded: starting takes long. A loop that ends
    early, or fails, has what there is by then. What cannot be written is a warning.

    Args:
        directory: Where to write; made by the ranks that are chosen.
        steps: The first step to record, and the one after the last.
        ranks: Which ranks; None: all.
        first: The number of the loop's first step; of a resumed run, the step at which it resumes.
        shapes: Record the operators' input shapes.
        memory: Record allocations.
        stacks: Record the Python lines that called; slow.

    Raises:
        ObsError: This rank is chosen, and torch is not imported.
        ValueError: ``steps`` is empty or lies before ``first``.
        ezpz_topo.TopoError: The rank cannot be known.
    """
    begin, end = steps
    if not first <= begin < end:
        raise ValueError(
            f"steps={steps!r}; expected (first, one after the last), the first at least {first}"
        )
    rank = find_rank_info().rank
    is_chosen = ranks is None or rank in ranks
    if is_chosen and "torch" not in sys.modules:
        raise ObsError(
            "profile() uses torch's profiler, and torch is not imported; import it first"
        )
    if not is_chosen:
        return Profile(None)
    return Profile(
        Path(directory), rank, first, begin, end,
        record_shapes=shapes, profile_memory=memory, with_stack=stacks,
    )  # fmt: skip


class Profile:
    """The profile of a loop, made by `profile`."""

    def __init__(
        self, directory: Path | None, rank: int = 0, first: int = 0, begin: int = 0, end: int = 0,
        **options: Any,
    ) -> None:  # fmt: skip
        self.trace: Path | None = None  # its file, once it is written
        self.table: str = ""  # of the operators, once the steps are over
        self._directory = directory
        self._rank = rank
        self._begin = begin
        self._end = end
        self._profiler: Any = None  # torch's, on a rank that is chosen
        if directory is None:
            return
        self._profiler = sys.modules["torch"].profiler.profile(
            schedule=self._plan, on_trace_ready=self._write, **options
        )
        # torch counts from 0; the trace is to call the steps by their numbers: ProfilerStep#10.
        self._profiler.step_num = first
        self._profiler.current_action = self._plan(first)

    def _plan(self, step: int) -> Any:
        """Return torch's action at a step."""
        # Not torch's `schedule`, which warns of a first step without one before.
        actions: Any = sys.modules["torch"].profiler.ProfilerAction
        if not self._begin - 1 <= step < self._end:
            return actions.NONE
        if step < self._begin:
            return actions.WARMUP
        if step < self._end - 1:
            return actions.RECORD
        return actions.RECORD_AND_SAVE

    def __enter__(self) -> Self:
        if self._profiler is not None:
            self._profiler.start()
        return self

    def step(self) -> None:
        """End a step."""
        if self._profiler is not None:
            self._profiler.step()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            if not self.table:
                logger.warning(
                    "nothing was profiled: the loop ended at step %d, and step %d was to be the "
                    "first", self._profiler.step_num, self._begin,
                )  # fmt: skip

    def _write(self, profiler: Any) -> None:
        assert self._directory is not None
        torch: Any = sys.modules["torch"]
        device = next((k for k in ("cuda", "xpu") if getattr(torch, k).is_initialized()), "cpu")
        last = min(profiler.step_num, self._end) - 1
        if last < self._begin:  # the first did not end
            return
        name = f"trace-rank{self._rank:05}-steps{self._begin}-{last}"
        try:
            self.table = profiler.key_averages().table(
                sort_by=f"self_{device}_time_total", row_limit=_ROWS
            )
            self._directory.mkdir(parents=True, exist_ok=True)
            (self._directory / f"{name}.txt").write_text(self.table, encoding="utf-8")
            # Under its name once it is whole.
            part = self._directory / f"{name}.json.part"
            profiler.export_chrome_trace(str(part))
            self.trace = part.replace(self._directory / f"{name}.json")
        except (OSError, RuntimeError) as error:
            # A profile that cannot be written (Kineto's errors are RuntimeError) ends no training.
            logger.warning("no profile in %s: %s", self._directory, error)
        else:
            logger.info("profile of steps %d to %d: %s", self._begin, last, self.trace)
