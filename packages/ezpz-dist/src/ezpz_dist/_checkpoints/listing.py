"""Which check-points there are, and whether one is whole."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from ezpz_dist._errors import CheckpointError

from .folder import Name, names_in, newest_first, next_name, parse, to_remove
from .given import Order
from .manifest import Manifest, damage_of, read_manifest
from .owner import refuse_other
from .store import Store, open_store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A check-point that was completed.

    Attributes:
        step: The step.
        folder: Its path, or URL.
        world_size: Ranks that wrote it.
        contents: Of ``model``, ``optimizer``, ``scheduler``, ``data``, ``extra``, ``rng``.
        size: Bytes.
        time: When it was complete, in seconds since 1970.
        torch: torch's version.
    """

    step: int
    folder: str
    world_size: int
    contents: tuple[str, ...]
    size: int
    time: float
    torch: str


def described(store: Store, name: str, manifest: Manifest) -> Checkpoint:
    """Return what callers see of a check-point."""
    return Checkpoint(
        manifest.step, f"{store.root}/{name}", manifest.world_size, manifest.contents,
        manifest.size, manifest.time, manifest.torch,
    )  # fmt: skip


def list_checkpoints(path: str | os.PathLike[str]) -> list[Checkpoint]:
    """Return the check-points under a path that were completed, the newest last.

    Those that a run abandoned, as it went back to a lower step, come first. By their manifests:
    their other files are not looked at. Not a collective.
    """
    return list(reversed(_completed(open_store(path))))


def latest_checkpoint(path: str | os.PathLike[str]) -> Checkpoint | None:
    """Return the completed check-point that was saved last; None: there is none yet.

    By its manifest: its other files are not looked at. Not a collective.
    """
    return next(iter(_completed(open_store(path))), None)


def _completed(store: Store) -> list[Checkpoint]:
    found, _ = read_manifests(store, names_in(store.entries()))  # loading says what is wrong
    newest: dict[int, Checkpoint] = {}
    for name, manifest in found.items():
        newest.setdefault(name.step, described(store, str(name), manifest))
    return list(newest.values())


def read_manifests(
    store: Store, names: Sequence[Name]
) -> tuple[dict[Name, Manifest], dict[Name, str]]:
    """Return the manifests that can be read, of the newest first, and what is wrong with others."""
    found: dict[Name, Manifest] = {}
    wrong: dict[Name, str] = {}
    for name in names:
        try:
            found[name] = read_manifest(store, str(name))
        except ValueError as error:
            wrong[name] = str(error)
    order = newest_first({name: manifest.sequence for name, manifest in found.items()})
    return {name: found[name] for name in order}, wrong


def candidates(store: Store, step: int | None) -> list[Name]:
    """Return what to load, the newest first: that may be one whose manifest cannot be read."""
    names = [name for name in names_in(store.entries()) if step in (None, name.step)]
    found, wrong = read_manifests(store, names)
    return [*wrong, *found]


def verify_checkpoint(path: str | os.PathLike[str], step: int | None = None) -> Checkpoint:
    """Read a check-point through and compare every file with its size and checksum.

    Not a collective.

    Args:
        path: Where check-points are, or the folder of one.
        step: Which; None: the last saved.

    Raises:
        CheckpointError: There is none, or it is damaged: every file that is, and how.
    """
    store = open_store(path)
    above, _, last = store.root.rpartition("/")
    if step is None and parse(last):
        store, name = open_store(above), last
    else:
        names = candidates(store, step)
        if not names:
            raise CheckpointError(none_there(store, step))
        name = str(names[0])
    try:
        manifest = read_manifest(store, name)
    except ValueError as error:
        raise CheckpointError(f"{store.root}/{name}: {error}") from error
    problems = [
        problem
        for file, said in manifest.files.items()
        if (problem := damage_of(store, name, file, said))
    ]
    if problems:
        raise CheckpointError(f"{store.root}/{name}: {'; '.join(problems)}")
    return described(store, name, manifest)


def none_there(store: Store, step: int | None) -> str:
    """Return the words for a check-point that is not there."""
    names: list[Name] = names_in(store.entries())
    steps = ", ".join(str(each) for each in sorted({name.step for name in names})) or "none"
    which = "no check-point" if step is None else f"no check-point of step {step}"
    return f"{which} in {store.root}; there are: {steps}"


def begin(store: Store, order: Order, size: int) -> tuple[Name, str, int]:
    """Make the folder for a checkpoint; return its name, the folder's, and its sequence.

    Args:
        store: Where.
        order: What is to be saved.
        size: About how many bytes that are.

    Raises:
        CheckpointError: Another job saves there.
    """
    owner = refuse_other(store)
    entries = store.entries()
    # Who saved last knows how often; else the manifests do.
    known = {} if owner is not None and owner.is_me else read_manifests(store, names_in(entries))[0]
    last = owner.sequence if owner is not None else 0
    newest = owner.step if owner is not None and owner.is_me else None
    if known:
        newest = next(iter(known)).step
        last = max(last, *(manifest.sequence for manifest in known.values()))
    if newest is not None and newest > order.step:
        logger.warning(
            "step %d is saved below step %d, the last saved in %s: from now on it is the newest, "
            "which is loaded, and those above it count as abandoned, which keep= removes first",
            order.step, newest, store.root,
        )  # fmt: skip
    name = next_name(order.step, entries)
    working = store.begin(name)
    if left := store.remove_leftovers(working):
        logger.info("removed what unfinished saves left in %s: %s", store.root, ", ".join(left))
    if order.keep is not None and store.free() < size:
        _make_room(store, order.step, order.keep, size)
    return name, working, last + 1


def _make_room(store: Store, step: int, keep: int, size: int) -> None:
    """Remove the oldest beyond ``keep - 1``, but never the last whole one, if that is enough."""
    found, _ = read_manifests(store, names_in(store.entries()))
    # By the files' sizes: to read them all would take longer than the other ranks wait.
    whole = [
        name
        for name, manifest in found.items()
        if all(store.size(f"{name}/{file}") == said.size for file, said in manifest.files.items())
    ]
    spare = [name for name in list(found)[keep - 1 :] if name not in whole[:1]]
    if not whole or store.free() + sum(found[name].size for name in spare) < size:
        return  # it will fail, and leave what is there
    for name in reversed(spare):
        if (free := store.free()) >= size:
            return
        logger.warning(
            "step %d does not fit beside the others (%.1f MB, and %.1f MB free in %s): %s is "
            "removed before it is saved (keep=%d)",
            step, size / 1e6, free / 1e6, store.root, name, keep,
        )  # fmt: skip
        store.remove(name)


def superseded(store: Store, saved: Name, keep: int | None) -> list[Name]:
    """Return what is to be removed once a check-point is complete, the oldest first."""
    names = names_in(store.entries())
    if keep is None:
        names = [name for name in names if name.step == saved.step]
    # Not counted, and not touched: what bears the name and is no checkpoint.
    found, _ = read_manifests(store, names)
    return to_remove(list(found), saved, keep)
