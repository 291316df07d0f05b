"""Load the newest training state that is whole, on all ranks the same."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from ezpz_dist._errors import CheckpointError
from ezpz_dist._world import current_world

from .background import finish_saving
from .folder import INDEX, Name
from .given import Given, Optimizers, listed
from .layout import current_layout
from .listing import candidates, none_there
from .manifest import Manifest, damage_of, read_manifest
from .owner import follow
from .ranks import Ranks, collecting_later, ranks_of
from .store import Store, open_store

if TYPE_CHECKING:
    from .target import Target

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded.

    Attributes:
        step: The step that was saved; training goes on with the next.
        folder: Where it is.
        extra: As it was given to `save_checkpoint`; empty if nothing was.
        data: The state of ``data`` that this rank was given; None if there is none.
        world_size: Ranks that wrote it.
        skipped: Newer check-points that are damaged, and how.
        notes: What is not as it was saved: random streams of new ranks, names left out.
    """

    step: int
    folder: str
    extra: Mapping[str, Any]
    data: Any
    world_size: int
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Optimizers | None = None,
    scheduler: Any = None,
    data: Any = None,
    step: int | None = None,
    rng: bool = True,
    strict: bool = True,
) -> Loaded | None:
    """Load the newest check-point that is whole into the model and what else is given.

        loaded = load_checkpoint("run/checkpoints", model=model, optimizer=optimizer)
        start = loaded.step + 1 if loaded else 0

    Sizes and checksums of all files that are read are compared first; each file is read for that
    by one rank of a node. A check-point that is damaged is passed over for the one before it, by
    all ranks, with a warning that names what is wrong. Nothing in a file is run: tensors are read
    with ``weights_only``, the rest is JSON. Any number of ranks, any wrapper, and any
    tensor-parallel degree of ezpz_tp's layers may load what others saved.
    Collective: every rank calls this.

    Args:
        path: As of `save_checkpoint`.
        model: Wrapped or not; it is filled in place.
        optimizer: Its state is made, if it has made no step yet.
        scheduler: Has ``load_state_dict()``; or several.
        data: Has ``load_state_dict()``; or several; or a dict, which is filled. On another number
            of ranks each is given rank 0's.
        step: Load this one or fail; None: the last saved. What a run abandoned, as it went back
            and saved a lower step, is loaded last.
        rng: Set the random streams of Python, numpy, torch, the device and ezpz_tp. In another
            layout of ranks, those that were not there get streams derived from rank 0's.
        strict: Names and dtypes must be the same; else what is missing is left as it is, what is
            too much is left out, and dtypes are cast, which ``Loaded.notes`` say.

    Returns:
        None where there is no check-point yet.

    Raises:
        CheckpointError: On all ranks: every check-point is damaged, and how; or the one of ``step``
            is, or is not there; or it does not fit the model. Never a silent fresh start.
        HangError: A rank does not come.
        LostRankError: A rank has ended.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
    """
    world = current_world("load_checkpoint()")
    ranks = ranks_of(world)
    finish_saving()
    started = time.monotonic()
    with ranks.waiting("load_checkpoint()"), collecting_later():
        from .target import Target  # noqa: PLC0415 - heavy to import

        store = ranks.here(f"{os.fspath(path)} cannot be loaded", lambda: open_store(path))
        ranks.same("load_checkpoint", f"{store.root}, step {step}, rng {rng}, strict {strict}")
        names = ranks.first(f"{store.root} cannot be listed", lambda: _candidates(store, step))
        if not names and step is None:
            return None
        layout = current_layout(ranks.rank, ranks.size)
        given = Given(model, listed(optimizer), scheduler, data)
        target = Target(ranks, layout, given, strict)
        found = _first_whole(store, names, target, ranks, step)
        if isinstance(found, str):
            raise CheckpointError(
                f"no check-point{'' if step is None else f' of step {step}'} in {store.root} can "
                f"be loaded: {found}. Expected one that is whole; remove them to start anew"
            )
        name, manifest, skipped = found
        extra, state, notes = target.fill(world, rng)
        loaded = Loaded(
            name.step, f"{store.root}/{name}", extra, state, manifest.world_size,
            tuple(skipped), tuple(notes),
        )  # fmt: skip
        if ranks.rank == 0:
            _say(loaded, manifest, time.monotonic() - started)
    return loaded


def _candidates(store: Store, step: int | None) -> list[Name]:
    follow(store)
    names = candidates(store, step)
    if step is not None and not names:
        raise CheckpointError(none_there(store, step))
    return names


def _first_whole(
    store: Store, names: list[Name], target: Target, ranks: Ranks, step: int | None
) -> tuple[Name, Manifest, list[str]] | str:
    """Return the newest that is whole, and what is wrong with those before it; or with all."""
    skipped: list[str] = []
    for name in names:
        folder = str(name)
        what = f"{store.root}/{folder} cannot be read"
        found: tuple[Manifest, bytes] | str = ranks.first(what, partial(_opened, store, folder))
        damage = [found] if isinstance(found, str) else target.plan(store, folder, *found)
        if not damage:
            return name, found[0], skipped  # type: ignore[return-value]  # found is no text here
        skipped.append(f"{store.root}/{name}: {'; '.join(damage)}")
        if step is None and ranks.rank == 0:
            logger.warning("passing over a damaged check-point, %s", skipped[-1])
    return ". ".join(skipped)


def _opened(store: Store, folder: str) -> tuple[Manifest, bytes] | str:
    """Return manifest and index, or what is wrong with them."""
    try:
        manifest = read_manifest(store, folder)
        if INDEX not in manifest.files:
            return f"the manifest has no {INDEX}"
        if damage := damage_of(store, folder, INDEX, manifest.files[INDEX]):
            return damage
        with store.open(f"{folder}/{INDEX}", "rb") as file:
            return manifest, file.read()
    except (ValueError, OSError) as error:
        return str(error)


def _say(loaded: Loaded, manifest: Manifest, seconds: float) -> None:
    logger.info(
        "step %d loaded from %s: %.1f MB, saved by %d ranks, in %.2f s",
        loaded.step, loaded.folder, manifest.size / 1e6, loaded.world_size, seconds,
    )  # fmt: skip
    for note in loaded.notes:
        logger.warning("step %d: %s", loaded.step, note)
