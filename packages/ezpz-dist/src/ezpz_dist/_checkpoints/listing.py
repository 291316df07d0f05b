"""Which checkpoints a folder has, which is the newest, and which are not needed any more."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ezpz_dist._errors import CheckpointError

from . import files
from .disk_format import Manifest, find_damage, read_manifest
from .files import Name, find_root, list_names, parse_name


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was completed.

    Attributes:
        step: The step.
        folder: Its path.
        world_size: Ranks that wrote it.
        contents: Of ``model`` (``trainable``: without its frozen parameters), ``optimizer``,
            ``scheduler``, ``data``, ``extra``, ``rng``.
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


def describe_checkpoint(folder: Path, manifest: Manifest) -> Checkpoint:
    return Checkpoint(
        step=manifest.step,
        folder=str(folder),
        world_size=manifest.world_size,
        contents=tuple(manifest.contents),
        size=manifest.size,
        time=manifest.time,
        torch=manifest.torch,
    )


def read_manifests(root: Path, step: int | None = None) -> tuple[dict[Name, Manifest], list[Name]]:
    """Return the manifests that can be read, the newest first, and the names of the others."""
    found: dict[Name, Manifest] = {}
    unreadable = []
    for name in list_names(root):
        if step is not None and name.step != step:
            continue
        try:
            found[name] = read_manifest(root / str(name))
        except ValueError:
            unreadable.append(name)
    return {name: found[name] for name in sort_by_age(found)}, unreadable


def sort_by_age(manifests: dict[Name, Manifest]) -> list[Name]:
    """Return names, the last saved first, and those that a run abandoned last."""
    # After a rewind, checkpoints above the rewound step are stale and sort last.
    last_first = sorted(manifests, key=lambda name: (manifests[name].sequence, name), reverse=True)
    current: list[Name] = []
    abandoned: list[Name] = []
    for name in last_first:
        if not current or name.step < current[-1].step:
            current.append(name)
        else:
            abandoned.append(name)
    return current + abandoned


def list_completed(root: Path) -> list[Checkpoint]:
    """Return one checkpoint of each step, the newest first."""
    manifests, _ = read_manifests(root)
    newest: dict[int, Checkpoint] = {}
    for name, manifest in manifests.items():
        if name.step not in newest:
            newest[name.step] = describe_checkpoint(root / str(name), manifest)
    return list(newest.values())


def list_checkpoints(path: str | os.PathLike[str]) -> list[Checkpoint]:
    """Return the checkpoints under a path that were completed, the newest last.

    Those that a run abandoned, as it went back to a lower step, come first. By their manifests:
    their other files are not looked at. Not a collective.
    """
    return list(reversed(list_completed(find_root(path))))


def latest_checkpoint(path: str | os.PathLike[str]) -> Checkpoint | None:
    """Return the completed checkpoint that was saved last; None: there is none yet.

    By its manifest: its other files are not looked at. Not a collective.
    """
    return next(iter(list_completed(find_root(path))), None)


def find_candidates(root: Path, step: int | None, *, must_exist: bool) -> list[Name]:
    """Return names to load, those with a damaged manifest first, then the newest first."""
    manifests, unreadable = read_manifests(root, step)
    if must_exist and not manifests and not unreadable:
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        steps = sorted({name.step for name in list_names(root)})
        known = ", ".join(str(each) for each in steps) or "none"
        raise CheckpointError(f"{which} in {root}; there are: {known}")
    return [*unreadable, *manifests]


def verify_checkpoint(path: str | os.PathLike[str], step: int | None = None) -> Checkpoint:
    """Read a checkpoint through and compare every file with its size and checksum.

    Not a collective.

    Args:
        path: Where checkpoints are, or the folder of one.
        step: Which; None: the last saved.

    Raises:
        CheckpointError: There is none, or it is damaged: every file that is, and how.
    """
    folder = find_root(path)
    if step is not None or parse_name(folder.name) is None:
        folder /= str(find_candidates(folder, step, must_exist=True)[0])
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    problems = []
    for name, file in manifest.files.items():
        damage = find_damage(folder, name, file)
        if damage is not None:
            problems.append(damage)
    if problems:
        raise CheckpointError(f"{folder}: {'; '.join(problems)}")
    return describe_checkpoint(folder, manifest)


# Removal.


def remove_superseded(root: Path, saved: Name, keep: int | None) -> None:
    """Remove checkpoints that a complete one supersedes, the oldest first."""
    # Folders without a valid manifest are neither counted nor removed.
    manifests, _ = read_manifests(root, saved.step if keep is None else None)
    kept_steps = list(dict.fromkeys(name.step for name in manifests))[:keep]
    for name in reversed(manifests):
        if name.step not in kept_steps or (name.step == saved.step and name != saved):
            files.remove(root / str(name))
