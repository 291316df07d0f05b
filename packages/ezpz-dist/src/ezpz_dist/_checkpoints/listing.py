"""Which check-points there are, and whether one is whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from ezpz_dist._errors import CheckpointError

from .folder import MANIFEST, Name, names_in, parse
from .manifest import Manifest, damage_of, read_manifest
from .store import Store, open_store


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
    """Return the check-points under a path that were completed, the lowest step first.

    By their manifests: their other files are not looked at. Not a collective.
    """
    return list(reversed(list(_completed(open_store(path)))))


def latest_checkpoint(path: str | os.PathLike[str]) -> Checkpoint | None:
    """Return the completed check-point of the highest step; None: there is none yet.

    By its manifest: its other files are not looked at. Not a collective.
    """
    return next(_completed(open_store(path)), None)


def _completed(store: Store) -> Iterator[Checkpoint]:
    seen = set()
    for name in names_in(store.entries()):
        try:
            manifest = read_manifest(store, str(name))
        except ValueError:
            continue  # loading and verifying say why
        if manifest.step == name.step and name.step not in seen:
            seen.add(name.step)
            yield described(store, str(name), manifest)


def verify_checkpoint(path: str | os.PathLike[str], step: int | None = None) -> Checkpoint:
    """Read a check-point through and compare every file with its size and checksum.

    Not a collective.

    Args:
        path: Where check-points are, or the folder of one.
        step: Which; None: the highest.

    Raises:
        CheckpointError: There is none, or it is damaged: every file that is, and how.
    """
    store = open_store(path)
    above, _, last = store.root.rpartition("/")
    if step is None and parse(last):
        store, name = open_store(above), last
    else:
        names = [each for each in names_in(store.entries()) if step in (None, each.step)]
        if not names:
            raise CheckpointError(none_there(store, step))
        name = str(names[0])
    try:
        manifest = read_manifest(store, name)
    except ValueError as error:
        raise CheckpointError(f"{store.root}/{name}: {error}") from error
    problems = mismatch(name, manifest)
    problems += [
        problem
        for file, said in manifest.files.items()
        if (problem := damage_of(store, name, file, said))
    ]
    if problems:
        raise CheckpointError(f"{store.root}/{name}: {'; '.join(problems)}")
    return described(store, name, manifest)


def mismatch(folder: str, manifest: Manifest) -> list[str]:
    """Return what is wrong with a manifest in a folder of this name."""
    names = names_in([folder])
    if names and names[0].step != manifest.step:
        return [f"{MANIFEST} is of step {manifest.step}"]
    return []


def none_there(store: Store, step: int | None) -> str:
    """Return the words for a check-point that is not there."""
    names: list[Name] = names_in(store.entries())
    steps = ", ".join(str(each) for each in sorted({name.step for name in names})) or "none"
    which = "no check-point" if step is None else f"no check-point of step {step}"
    return f"{which} in {store.root}; there are: {steps}"
