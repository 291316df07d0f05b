"""Save a training state: by all ranks, at one step, or not at all."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ezpz_dist._errors import CheckpointError
from ezpz_dist._world import current_world

from .background import Saving, finish_saving
from .folder import MAX_STEP
from .given import Given, Optimizers, Order, listed
from .layout import Layout, current_layout
from .ranks import Ranks, collecting_later, ranks_of
from .rng import rng_state
from .store import Store, open_store

if TYPE_CHECKING:
    from .state import Held
    from .writing import Draft

logger = logging.getLogger(__name__)


def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Optimizers | None = None,
    scheduler: Any = None,
    step: int,
    data: Any = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = 3,
    asynchronous: bool = False,
) -> Saving:
    """Save a training state under a path: the model, and what else is given.

    Written aside with checksums, synced, and then renamed to ``step-00000042``: a crash at any
    moment leaves the check-point before it. Tensors go by the model's own names, so that any
    number of ranks, and DDP, FSDP1, FSDP2, ZeRO-1, ezpz_tp's layers or the bare model can load
    it. The random streams of every rank are saved too. What fails on one rank fails on all.
    Collective: every rank calls this.

    A step that is there already is saved beside it and then takes its place. What dead attempts
    left is removed: those of this host whose process has ended, of others after an hour without
    a write.

    Args:
        path: A folder that all hosts share, or a URL of fsspec's. Object stores rename nothing in
            one go: there the manifest, written last, is what makes a check-point exist.
        model: Wrapped or not.
        optimizer: The model's, or several.
        scheduler: Has ``state_dict()``; or several.
        step: The step. What was saved last is loaded first: below a step that is there, it says
            that the run has gone back.
        data: Has ``state_dict()``, as a sampler; or several; or a dict. Each rank's own is saved.
        extra: Whatever else, of numbers, strings, tensors, lists and dicts. Rank 0's is saved.
            A numpy scalar comes back as a Python number, a path and a date, time or datetime as
            text (ISO 8601), a timedelta as seconds, an Enum's member as its value, a namedtuple as
            a tuple.
        keep: How many steps to keep, the newest, and those of an abandoned branch last; None: all.
            The older ones go once the new one is there; where it would not fit beside them, before,
            but never the last whole one.
        asynchronous: Copy what this rank writes to the host, return, and write in the background.
            One at a time: the next save waits for it, and so do `load_checkpoint`, `cleanup` and
            the end of the process. Its error comes up there, or in `Saving.wait`; at the end of
            the process, it makes the exit status 1.

    Returns:
        A handle: ``.wait()`` returns the folder once it is complete.

    Raises:
        CheckpointError: On all ranks, with the rank, host and file: the disk is full, the folder
            cannot be written, something cannot be saved, or ranks differ; another job, which may
            still run, saves there, and this one has not loaded from there; or the asynchronous
            save before failed. Nothing half-done is left.
        HangError: A rank does not come, or writes for longer than the timeout of `setup_torch`.
        LostRankError: A rank has ended.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
    """
    ranks = ranks_of(current_world("save_checkpoint()"))
    finish_saving()
    with ranks.waiting(f"save_checkpoint(step={step})"), collecting_later():
        given = Given(model, listed(optimizer), scheduler, data, extra)
        draft = _draft(path, ranks, given, Order(step, (*given.contents, "rng"), keep))
        saving = Saving(step, f"{draft.store.root}/{draft.name}")
        if asynchronous:
            ranks.here(f"step {step} cannot be copied to the host", draft.copy)
            saving.start(lambda: _write(draft, "in the background"))
            return saving
        saving.run(lambda: _write(draft, "at once"))
        saving.wait()
    return saving


def _draft(path: str | os.PathLike[str], ranks: Ranks, given: Given, order: Order) -> Draft:
    from .writing import draft  # noqa: PLC0415 - heavy to import

    what = f"step {order.step!r} cannot be saved to {os.fspath(path)}"
    layout = current_layout(ranks.rank, ranks.size)
    store = ranks.here(what, lambda: _opened(path, order))
    ranks.same("save_checkpoint", f"{store.root}, {order}")
    # After all have agreed to come this far: FSDP1's state takes collectives.
    held = ranks.here(what, lambda: _collect(ranks, layout, given))
    return draft(ranks, store, order, held, layout.index["pipeline"])


def _opened(path: str | os.PathLike[str], order: Order) -> Store:
    step, keep = order.step, order.keep
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise CheckpointError(f"step={step!r}; expected an int from 0 to {MAX_STEP}")
    if keep is not None and keep < 1:
        raise CheckpointError(f"keep={keep}; expected at least 1, or None to keep all")
    return open_store(path)


def _collect(ranks: Ranks, layout: Layout, given: Given) -> Held:
    from . import objects, state  # noqa: PLC0415 - heavy to import
    from .names import refuse_deepspeed  # noqa: PLC0415
    from .optimizers import state_of  # noqa: PLC0415

    refuse_deepspeed(given.model)
    states, options = state_of(given.model, given.optimizers) if given.optimizers else ({}, [])
    parts = state.Parts(given.model, layout)
    whole = state.model_state(given.model)
    for name in [] if layout.is_first_replica else parts.buffers & whole.keys():
        del whole[name]  # each replica has its own, as of batch norm: one rank's, all together
    held, values, others = state.held_by(parts, whole, states)
    own = {"rng": rng_state(ranks.world), "data": state.state_dicts(given.data)}
    common = {
        "scheduler": state.state_dicts(given.scheduler),
        "extra": objects.plain(dict(given.extra or {})),
        "degrees": layout.degrees,
    }
    held |= state.values_of(others) | {state.rank_key(ranks.rank): state.encoded("rank", own)}
    if layout.is_first_of_stage:
        about = {"model": values, "options": options}
        held[state.stage_key(layout.index["pipeline"])] = state.encoded("model", about)
    if ranks.rank == 0:
        held[state.COMMON] = state.encoded("save_checkpoint", common)
    return held


def _write(draft: Draft, how: str) -> None:
    from .writing import write  # noqa: PLC0415 - heavy to import

    with draft.ranks.waiting(f"save_checkpoint(step={draft.order.step})"):
        manifest = write(draft)
    if draft.ranks.rank:
        return
    seconds = time.monotonic() - draft.started
    logger.info(
        "step %d saved %s to %s/%s: %.1f MB from %d ranks in %.2f s, %.0f MB/s",
        manifest.step, how, draft.store.root, draft.name, manifest.size / 1e6,
        manifest.world_size, seconds, manifest.size / 1e6 / max(seconds, 1e-9),
    )  # fmt: skip
    report_progress(manifest.step)


def report_progress(step: int) -> None:
    """Tell ezpz-launch how far the job got: it starts a failed one again while it gets further."""
    if not (path := os.environ.get("EZPZ_PROGRESS_FILE")):
        return
    file = Path(path)
    try:
        try:
            before = int(file.read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            before = -1
        if step > before:
            aside = file.with_name(file.name + ".new")
            aside.write_text(f"{step}\n", encoding="ascii")
            aside.replace(file)
    except OSError as error:
        logger.warning("step %d is saved, but not reported in %s: %s", step, path, error)
