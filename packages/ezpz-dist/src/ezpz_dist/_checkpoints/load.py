"""Load the newest training state that is whole, on all ranks the same."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import and_, or_
from typing import Any

from torch import Tensor, nn

from ezpz_dist._errors import CheckpointError
from ezpz_dist._objects import raw_of
from ezpz_dist._world import World, current_world
from ezpz_tp import Piece

from . import index
from . import pieces as _pieces
from . import store as _store
from .ranks import Ranks, collecting_later, ranks_of
from .save import finish_saving
from .store import CheckpointArgs, Name, Store

# Fill this rank's tensors from a checkpoint's files, once these are known to be whole.


def wanted_of(
    saved: Mapping[str, index.Saved], held: Mapping[str, _pieces.Pieces]
) -> dict[str, list[index.Wanted]]:
    """Return what this rank reads, by file; all that it holds was saved, with these sizes."""
    wanted: dict[str, list[index.Wanted]] = {}
    for key, pieces in held.items():
        dtype = saved[key].dtype
        for chunk, part, target in _overlaps(pieces, saved[key].chunks):
            one = index.Wanted(key, chunk.extent, dtype, chunk.sizes, part, target)
            wanted.setdefault(chunk.file, []).append(one)
    return wanted


def _overlaps(
    pieces: _pieces.Pieces, chunks: Sequence[index.Chunk]
) -> Iterator[tuple[index.Chunk, Piece | None, Tensor]]:
    """Yield what pieces have in common with what is saved: of which chunk what, and where to."""
    same: dict[tuple[Any, ...], index.Chunk] = {(one.offsets, one.sizes): one for one in chunks}
    for piece, tensor in pieces.held:
        if (chunk := same.get(piece)) is not None:
            yield chunk, None, tensor
            continue
        for chunk in chunks:
            saved = Piece(chunk.offsets, chunk.sizes)
            if common := saved.overlap(piece):
                yield chunk, common.within(saved), tensor[common.within(piece).slices]


def shares(files: Sequence[str], manifest: index.Manifest, readers: int) -> list[list[str]]:
    """Divide files among the ranks of a node, so that each is verified once there."""
    loads = [0] * readers
    dealt: list[list[str]] = [[] for _ in range(readers)]
    for name in sorted(files, key=lambda each: (-manifest.files[each].size, each)):
        least = loads.index(min(loads))
        dealt[least].append(name)
        loads[least] += manifest.files[name].size
    return dealt


def bytes_of(held: Mapping[str, Any], key: str) -> bytes:
    pieces: _pieces.Pieces = held[key]
    ((_, tensor),) = pieces.held
    return bytes(raw_of(tensor))


# What a checkpoint is loaded into: planned, verified, and only then filled.

_NAMED = 5  # names that a message lists


class Target:
    """What a checkpoint is loaded into. Each method is a collective: every rank calls it."""

    def __init__(
        self, ranks: Ranks, layout: _pieces.Layout, args: CheckpointArgs, strict: bool
    ) -> None:
        self._ranks, self._layout = ranks, layout
        self._args, self._strict = args, strict
        self._notes: list[str] = []

    def plan(self, store: Store, folder: str, manifest: index.Manifest, data: bytes) -> list[str]:
        """Find out what each rank reads, and verify it; return what is wrong on any."""
        ranks = self._ranks
        self._what = f"{store.root}/{folder} cannot be loaded"
        self._manifest, self._notes = manifest, []
        saved, problem = _decoded(data, manifest)
        if problem:
            return [problem]
        self._saved = saved
        self._wanted = ranks.here(self._what, self._plan)
        self._place = store, folder
        mine, spare = self._shared_out(set(self._wanted))
        self._judge_unknown(spare)
        damages = (index.damage_of(store, folder, name, manifest.files[name]) for name in mine)
        found = ranks.tell(ranks.gather([each for each in damages if each]))
        return [
            f"rank {rank} on {ranks.hosts[rank]}: {each}" if ranks.size > 1 else each
            for rank, problems in enumerate(found)
            for each in problems
        ]

    def _shared_out(self, reads: set[str]) -> tuple[list[str], list[str]]:
        """Return the files that this rank is to verify, and the tensors that no rank has."""
        # What ranks of a host read is verified by one of them. Sent as bits: the names would be
        # too many.
        ranks, names = self._ranks, list(self._manifest.files)
        keys = [key for key in self._saved if key.startswith(_pieces.MODEL)]
        gathered = ranks.gather((_bits(names, reads), _bits(keys, self._unknown)))

        def share() -> list[tuple[int, int]]:
            mates: dict[str, list[int]] = {}
            for rank, host in enumerate(ranks.hosts):
                mates.setdefault(host, []).append(rank)
            spare = reduce(and_, (unknown for _, unknown in gathered))
            mine = [(0, spare)] * ranks.size
            for group in mates.values():
                read = reduce(or_, (gathered[rank][0] for rank in group))
                dealt = shares(_named(names, read), self._manifest, len(group))
                for rank, files in zip(group, dealt, strict=True):
                    mine[rank] = _bits(names, set(files)), spare
            return mine

        verifies, spare = ranks.first_for_each(self._what, share)
        return _named(names, verifies), sorted(_named(keys, spare))

    def _plan(self) -> dict[str, list[index.Wanted]]:
        _pieces.refuse_deepspeed(self._args.model)
        self._choose_contents()
        _store.give_memory(self._args.model)
        self._model_state = _pieces.model_state(self._args.model)
        self._state = self._room()
        parts = _pieces.Parts(self._args.model, self._layout)
        held, self._values, _ = _pieces.held_by(parts, self._model_state, self._state)
        known = {name: pieces for name, pieces in held.items() if name in self._saved}
        self._compare(held)
        stages = sum(1 for key in self._saved if key.startswith("stage."))
        size = self._manifest.world_size
        wanted = [_pieces.COMMON, _pieces.rank_key(0), *map(_pieces.stage_key, range(stages))]
        if self._ranks.rank < size:
            wanted.append(_pieces.rank_key(self._ranks.rank))
        if self._args.optimizers:
            wanted += [key for key in self._saved if key.startswith(_pieces.VALUES)]
        for key in wanted:
            if key not in self._saved:
                raise CheckpointError(f"there is no {key} in it; save_checkpoint writes one")
            known[key] = _pieces.blob_of(bytes(self._saved[key].size.numel()))
        self._held = known
        return wanted_of(self._saved, known)

    def _choose_contents(self) -> None:
        wanted = {"optimizer", "scheduler", "data"} & set(self._args.contents)
        lacking = sorted(wanted - set(self._manifest.contents))
        if not lacking:
            return
        if self._strict:
            raise CheckpointError(
                f"it holds {', '.join(self._manifest.contents)}, but no {', '.join(lacking)}; "
                "leave them out, or give strict=False"
            )
        self._notes.append(f"no {', '.join(lacking)} in it: left as they are")

    def _has(self, name: str) -> bool:
        return name in self._manifest.contents

    def _room(self) -> _pieces.State:
        if not self._args.optimizers or not self._has("optimizer"):
            return {}
        names = {key.removeprefix(_pieces.MODEL): 0 for key in self._saved}
        saved: dict[str, dict[str, Any]] = {}
        for key, about in self._saved.items():
            if key.startswith(_pieces.OPTIMIZER):
                name, entry = _pieces.split_key(key, names)
                saved.setdefault(name, {})[entry] = about
        return _pieces.room_for(self._args.model, self._args.optimizers, saved)

    def _compare(self, held: _pieces.Held) -> None:
        """Compare names, sizes and dtypes with those that were saved."""
        missing, cast = [], []
        for key, pieces in held.items():
            saved = self._saved.get(key)
            if saved is None:
                if math.prod(pieces.shape):  # of one without elements no rank had a piece to write
                    missing.append(key)
            elif saved.size != pieces.shape:
                raise CheckpointError(
                    f"{key} has shape {tuple(saved.size)} in it and {pieces.shape} here; expected "
                    "the model that was saved"
                )
            elif saved.dtype != pieces.dtype:
                cast.append(f"{key} from {saved.dtype} to {pieces.dtype}")
        self._unknown = {
            key for key in self._saved if key.startswith(_pieces.MODEL) and key not in held
        }
        self._judge("are not in it", "were left as they are", missing)
        self._judge("would be cast", "were cast", cast)

    def _judge(self, what: str, done: str, names: list[str]) -> None:
        """Refuse tensors that are not as they were saved, or note them."""
        if names and self._strict:
            raise CheckpointError(
                f"{len(names)} tensors {what}: {_some(names)}; expected the model that was "
                "saved; strict=False loads the rest"
            )
        if names:
            self._notes.append(f"{len(names)} tensors {done}: {_some(names)}")

    def _judge_unknown(self, spare: list[str]) -> None:
        """Refuse tensors in it that no rank has: pipeline stages have some each."""
        if spare and self._strict:
            raise CheckpointError(
                f"{self._what}: {len(spare)} tensors of it are none of the model's: "
                f"{_some(spare)}; expected the model that was saved; strict=False leaves them out"
            )
        if spare:
            self._notes.append(f"{len(spare)} tensors were left out: {_some(spare)}")

    def fill(self, world: World | None, rng: bool) -> tuple[dict[str, Any], Any, list[str]]:
        """Read everything; return ``extra``, the state of ``data``, and notes."""
        self._ranks.here(self._what, self._read)
        return self._ranks.here(self._what, lambda: self._apply(world, rng))

    def _read(self) -> None:
        store, folder = self._place
        for name, wanted in self._wanted.items():
            with store.open(f"{folder}/{name}", "rb") as file:
                index.read(file, wanted)

    def _object(self, key: str) -> Any:
        return _pieces.decode(key, bytes_of(self._held, key))

    def _apply(self, world: World | None, rng: bool) -> tuple[dict[str, Any], Any, list[str]]:
        stages = [self._object(key) for key in self._held if key.startswith("stage.")]
        common = self._object(_pieces.COMMON)
        here = common["degrees"] == self._layout.degrees
        own_key = _pieces.rank_key(self._ranks.rank if here else 0)
        own = self._object(own_key)
        saved: dict[str, Any] = {}
        for stage in reversed(stages):
            saved |= stage["model"]
        missing = [name for name in self._values if name not in saved]
        self._judge("are not in it", "were left as they are", missing)
        for name in self._values.keys() & saved.keys():
            self._model_state[name] = saved[name]
        _pieces.set_model_state(self._args.model, self._model_state, self._strict)
        if self._args.optimizers and self._has("optimizer"):
            self._set_optimizers(stages)
        if self._args.scheduler is not None and self._has("scheduler"):
            _pieces.load_state_dicts(self._args.scheduler, common["scheduler"])
        if self._args.data is not None and self._has("data"):
            _pieces.load_state_dicts(self._args.data, own["data"])
            if not here:
                self._notes.append("the position in the data is rank 0's, on every rank")
        if rng:
            self._set_rng(own, here, world)
        return common["extra"] or {}, own["data"], self._notes

    def _set_optimizers(self, stages: list[Mapping[str, Any]]) -> None:
        for key in self._held:
            if key.startswith(_pieces.VALUES):
                name = key.removeprefix(_pieces.VALUES)
                if name in self._state or not any(self._state):
                    self._state.setdefault(name, {}).update(self._object(key))
        groups = [group for stage in stages for group in stage["options"] or ()]
        _pieces.set_state(self._args.model, self._args.optimizers, self._state, groups)

    def _set_rng(self, own: Mapping[str, Any], here: bool, world: World | None) -> None:
        if here:
            self._notes += _pieces.set_rng_state(own["rng"], world)
            return
        saved, rank = bytes_of(self._held, _pieces.rank_key(0)), self._ranks.rank
        data_parallel = all(
            degree == 1 for axis, degree in self._layout.degrees.items() if axis != "data"
        )
        key = _pieces.rank_key(rank)
        if data_parallel and key in self._held:
            self._notes += _pieces.set_rng_state(self._object(key)["rng"], world)
        else:
            _pieces.derive_rng_state(saved, self._layout.stream)
        self._notes.append(
            f"saved by {self._manifest.world_size} ranks and loaded by {self._ranks.size}: random "
            "streams of ranks that were not there are derived from rank 0's"
        )


def _decoded(data: bytes, manifest: index.Manifest) -> tuple[dict[str, index.Saved], str]:
    try:
        saved = index.decode_index(data)
    except ValueError as error:
        return {}, str(error)
    files = {chunk.file for about in saved.values() for chunk in about.chunks}
    if unknown := files - manifest.files.keys():
        return {}, f"the manifest does not list {_some(sorted(unknown))}"
    return saved, ""


def _bits(names: Sequence[str], chosen: Collection[str]) -> int:
    return int("".join("1" if name in chosen else "0" for name in names) or "0", 2)


def _named(names: Sequence[str], bits: int) -> list[str]:
    return [name for name, bit in zip(names, f"{bits:0{len(names)}b}", strict=False) if bit == "1"]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


# Which checkpoints there are, and whether one is whole.


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was completed.

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


def described(store: Store, name: str, manifest: index.Manifest) -> Checkpoint:
    return Checkpoint(
        manifest.step, f"{store.root}/{name}", manifest.world_size, manifest.contents,
        manifest.size, manifest.time, manifest.torch,
    )  # fmt: skip


def list_checkpoints(path: str | os.PathLike[str]) -> list[Checkpoint]:
    """Return the checkpoints under a path that were completed, the newest last.

    Those that a run abandoned, as it went back to a lower step, come first. By their manifests:
    their other files are not looked at. Not a collective.
    """
    return list(reversed(_completed(_store.open_store(path))))


def latest_checkpoint(path: str | os.PathLike[str]) -> Checkpoint | None:
    """Return the completed checkpoint that was saved last; None: there is none yet.

    By its manifest: its other files are not looked at. Not a collective.
    """
    return next(iter(_completed(_store.open_store(path))), None)


def _completed(store: Store) -> list[Checkpoint]:
    found, _ = index.read_manifests(
        store, _store.names_in(store.entries())
    )  # loading says what is wrong
    newest: dict[int, Checkpoint] = {}
    for name, manifest in found.items():
        newest.setdefault(name.step, described(store, str(name), manifest))
    return list(newest.values())


def candidates(store: Store, step: int | None) -> list[Name]:
    """Return what to load, the newest first: that may be one whose manifest cannot be read."""
    names = [name for name in _store.names_in(store.entries()) if step in (None, name.step)]
    found, wrong = index.read_manifests(store, names)
    return [*wrong, *found]


def verify_checkpoint(path: str | os.PathLike[str], step: int | None = None) -> Checkpoint:
    """Read a checkpoint through and compare every file with its size and checksum.

    Not a collective.

    Args:
        path: Where checkpoints are, or the folder of one.
        step: Which; None: the last saved.

    Raises:
        CheckpointError: There is none, or it is damaged: every file that is, and how.
    """
    store = _store.open_store(path)
    above, _, last = store.root.rpartition("/")
    if step is None and _store.parse(last):
        store, name = _store.open_store(above), last
    else:
        names = candidates(store, step)
        if not names:
            raise CheckpointError(none_there(store, step))
        name = str(names[0])
    try:
        manifest = index.read_manifest(store, name)
    except ValueError as error:
        raise CheckpointError(f"{store.root}/{name}: {error}") from error
    problems = [
        problem
        for file, said in manifest.files.items()
        if (problem := index.damage_of(store, name, file, said))
    ]
    if problems:
        raise CheckpointError(f"{store.root}/{name}: {'; '.join(problems)}")
    return described(store, name, manifest)


def none_there(store: Store, step: int | None) -> str:
    names: list[Name] = _store.names_in(store.entries())
    steps = ", ".join(str(each) for each in sorted({name.step for name in names})) or "none"
    which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    return f"{which} in {store.root}; there are: {steps}"


# Load the newest training state that is whole, on all ranks the same.

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded.

    Attributes:
        step: The step that was saved; training resumes with the next.
        folder: Where it is.
        extra: As it was given to `save_checkpoint`; empty if nothing was.
        data: The state of ``data`` that this rank was given; None if there is none.
        world_size: Ranks that wrote it.
        skipped: Newer checkpoints that are damaged, and how.
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
    optimizer: _store.Optimizers | None = None,
    scheduler: Any = None,
    data: Any = None,
    step: int | None = None,
    rng: bool = True,
    strict: bool = True,
) -> Loaded | None:
    """Load the newest checkpoint that is whole into the model and what else is given.

        loaded = load_checkpoint("run/checkpoints", model=model, optimizer=optimizer)
        start = loaded.step + 1 if loaded else 0

    Sizes and checksums of all files that are read are compared first; each file is read for that
    by one rank of a node. A checkpoint that is damaged is passed over for the one before it, by
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
        None where there is no checkpoint yet.

    Raises:
        CheckpointError: On all ranks: every checkpoint is damaged, and how; or the one of ``step``
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
        store = ranks.here(f"{os.fspath(path)} cannot be loaded", lambda: _store.open_store(path))
        ranks.same("load_checkpoint", f"{store.root}, step {step}, rng {rng}, strict {strict}")
        names = ranks.first(f"{store.root} cannot be listed", lambda: _candidates(store, step))
        if not names and step is None:
            return None
        layout = _pieces.current_layout(ranks.rank, ranks.size)
        args = CheckpointArgs(model, _store.as_list(optimizer), scheduler, data)
        target = Target(ranks, layout, args, strict)
        found = _first_whole(store, names, target, ranks, step)
        if isinstance(found, str):
            raise CheckpointError(
                f"no checkpoint{'' if step is None else f' of step {step}'} in {store.root} can "
                f"be loaded: {found}. Expected one that is whole; remove them to start again"
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
    _store.follow(store)
    names = candidates(store, step)
    if step is not None and not names:
        raise CheckpointError(none_there(store, step))
    return names


def _first_whole(
    store: Store, names: list[Name], target: Target, ranks: Ranks, step: int | None
) -> tuple[Name, index.Manifest, list[str]] | str:
    """Return the newest that is whole, and what is wrong with those before it; or with all."""
    skipped: list[str] = []
    for name in names:
        folder = str(name)
        what = f"{store.root}/{folder} cannot be read"
        found: tuple[index.Manifest, bytes] | str = ranks.first(
            what, partial(_opened, store, folder)
        )
        damage = [found] if isinstance(found, str) else target.plan(store, folder, *found)
        if not damage:
            return name, found[0], skipped  # type: ignore[return-value]  # found is no text here
        skipped.append(f"{store.root}/{name}: {'; '.join(damage)}")
        if step is None and ranks.rank == 0:
            logger.warning("passing over a damaged checkpoint, %s", skipped[-1])
    return ". ".join(skipped)


def _opened(store: Store, folder: str) -> tuple[index.Manifest, bytes] | str:
    try:
        manifest = index.read_manifest(store, folder)
        if _store.INDEX not in manifest.files:
            return f"the manifest has no {_store.INDEX}"
        if damage := index.damage_of(store, folder, _store.INDEX, manifest.files[_store.INDEX]):
            return damage
        with store.open(f"{folder}/{_store.INDEX}", "rb") as file:
            return manifest, file.read()
    except (ValueError, OSError) as error:
        return str(error)


def _say(loaded: Loaded, manifest: index.Manifest, seconds: float) -> None:
    logger.info(
        "step %d loaded from %s: %.1f MB, saved by %d ranks, in %.2f s",
        loaded.step, loaded.folder, manifest.size / 1e6, loaded.world_size, seconds,
    )  # fmt: skip
    for note in loaded.notes:
        logger.warning("step %d: %s", loaded.step, note)
