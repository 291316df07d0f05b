"""Load the newest training state that is whole, on all ranks the same."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import and_, or_
from typing import Any

from torch import Tensor, nn

from ezpz_dist._data import deal_by_size
from ezpz_dist._errors import CheckpointError, grouped
from ezpz_dist._objects import raw_of
from ezpz_dist._world import World, current_world
from ezpz_tp import Piece

from . import index
from . import pieces as _pieces
from . import store as _store
from .save import finish_saving
from .store import CheckpointArgs, Name, Ranks, Store


def _overlaps(
    pieces: _pieces.Pieces, chunks: Sequence[index.Chunk]
) -> Iterator[tuple[index.Chunk, Piece | None, Tensor]]:
    """Yield what pieces have in common with what is saved: of which chunk what, and where to."""
    same = {chunk.piece: chunk for chunk in chunks}
    for piece, tensor in pieces.held:
        if (chunk := same.get(piece)) is not None:
            yield chunk, None, tensor
            continue
        for chunk in chunks:
            if common := chunk.piece.overlap(piece):
                yield chunk, common.within(chunk.piece), tensor[common.within(piece).slices]


# What a checkpoint is loaded into: planned, verified, and only then filled.

_NAMED = 5  # names that a message lists


class Target:
    """What a checkpoint is loaded into. Each method is a collective: every rank calls it."""

    def __init__(
        self, ranks: Ranks, layout: _pieces.Layout, args: CheckpointArgs, strict: bool
    ) -> None:
        self._ranks, self._layout, self._args, self._strict = ranks, layout, args, strict

    def plan(self, store: Store, folder: str, manifest: index.Manifest, data: bytes) -> list[str]:
        """Find out what each rank reads, and verify it; return what is wrong on any."""
        ranks, self._place = self._ranks, (store, folder)
        self._what = f"{store.root}/{folder} cannot be loaded"
        self.manifest, self._notes = manifest, list[str]()
        try:
            self._saved = index.decode_index(data)
        except ValueError as error:
            return [str(error)]
        files = {chunk.file for about in self._saved.values() for chunk in about.chunks}
        if unknown := files - manifest.files.keys():
            return [f"the manifest does not list {_some(sorted(unknown))}"]
        self._wanted = ranks.here(self._what, self._plan)
        mine, spare = self._shared_out(set(self._wanted))
        # Of what is in it and here on no rank: pipeline stages have some each.
        remedy = "expected the model that was saved; strict=False leaves them out"
        about = "of it are none of the model's", "were left out"
        self._judge(*about, spare, f"{self._what}: ", remedy)
        damages = (index.damage_of(store, folder, name, manifest.files[name]) for name in mine)
        who = f"rank {ranks.rank} on {ranks.hosts[ranks.rank]}: " if ranks.size > 1 else ""
        listed = ranks.everywhere(self._what, lambda: [who + each for each in damages if each])
        found = ranks.tell(listed)
        return [each for problems in found for each in problems]

    def _shared_out(self, reads: set[str]) -> tuple[list[str], list[str]]:
        """Return the files that this rank is to verify, and the tensors that no rank has."""
        # What ranks of a host read is verified by one of them. Sent as bits: the names would be
        # too many.
        ranks, names = self._ranks, list(self.manifest.files)
        keys = [key for key in self._saved if key.startswith(_pieces.MODEL)]
        unknown = [key for key in keys if key not in self._held]
        gathered = ranks.gather((_bits(names, reads), _bits(keys, set(unknown))))

        def share() -> list[tuple[int, int]]:
            mates = grouped((host, rank) for rank, host in enumerate(ranks.hosts))
            spare = reduce(and_, (unknown for _, unknown in gathered))
            mine = [(0, spare)] * ranks.size
            for group in mates.values():
                read = reduce(or_, (gathered[rank][0] for rank in group))
                files = _named(names, read)
                sizes = [self.manifest.files[name].size for name in files]
                for rank, places in zip(group, deal_by_size(sizes, len(group)), strict=True):
                    mine[rank] = _bits(names, {files[place] for place in places}), spare
            return mine

        verifies, spare = ranks.first_for_each(self._what, share)
        return _named(names, verifies), sorted(_named(keys, spare))

    def _plan(self) -> dict[str, list[index.Wanted]]:
        model, rank = self._args.model, self._ranks.rank
        _pieces.refuse_deepspeed(model)
        self._choose_contents()
        _store.give_memory(model)
        self._model_state = _pieces.model_state(model)
        self._state = self._room()
        parts = _pieces.Parts(model, self._layout)
        held, self._values, _ = _pieces.held_by(parts, self._model_state, self._state)
        held = self._named_as_saved(held)
        known = {name: pieces for name, pieces in held.items() if name in self._saved}
        self._compare(held)
        stages = sum(1 for key in self._saved if key.startswith("stage."))
        blobs = [_pieces.COMMON, *map(_pieces.stage_key, range(stages))]
        blobs += map(_pieces.rank_key, {0, rank if rank < self.manifest.world_size else 0})
        blobs += self._replica_keys()
        if self._args.optimizers:
            blobs += [key for key in self._saved if key.startswith(_pieces.VALUES)]
        for key in blobs:
            if key not in self._saved:
                raise CheckpointError(f"there is no {key} in it; save_checkpoint writes one")
            known[key] = _pieces.blob_of(bytes(self._saved[key].size.numel()))
        self._held = known
        wanted: dict[str, list[index.Wanted]] = {}  # by file
        for key, pieces in known.items():
            dtype, chunks = self._saved[key].dtype, self._saved[key].chunks
            for chunk, part, target in _overlaps(pieces, chunks):
                one = index.Wanted(key, chunk.extent, dtype, chunk.piece.sizes, part, target)
                wanted.setdefault(chunk.file, []).append(one)
        return wanted

    def _named_as_saved(self, held: _pieces.Held) -> _pieces.Held:
        """Return tied tensors that were saved under one of their names under that one only."""
        names = _pieces.tied_names(self._args.model)
        found: _pieces.Held = {}
        for key, pieces in held.items():
            name = key.removeprefix(_pieces.MODEL)
            saved_as = [key]
            if key.startswith(_pieces.MODEL) and key not in self._saved:
                others = (_pieces.MODEL + other for other in names.get(name, ()))
                saved_as = [other for other in others if other in self._saved] or [key]
            found[saved_as[0]] = pieces
        return found

    def _choose_contents(self) -> None:
        wanted = {"optimizer", "scheduler", "data"} & set(self._args.contents)
        lacking = ", ".join(sorted(wanted - set(self.manifest.contents)))
        if lacking and self._strict:
            raise CheckpointError(
                f"it holds {', '.join(self.manifest.contents)}, but no {lacking}; leave them out, "
                "or give strict=False"
            )
        if lacking:
            self._notes.append(f"no {lacking} in it: left as they are")

    def _room(self) -> _pieces.State:
        if not self._args.optimizers or "optimizer" not in self.manifest.contents:
            return {}
        names = {
            key.removeprefix(_pieces.MODEL): key
            for key in self._saved
            if key.startswith(_pieces.MODEL)
        }
        saved: dict[str, dict[str, Any]] = {}
        for key, about in self._saved.items():
            if key.startswith(_pieces.OPTIMIZER):
                name, entry = _pieces.split_key(key, names)
                saved.setdefault(name, {})[entry] = about
        dtypes = {name: self._saved[key].dtype for name, key in names.items()}
        return _pieces.room_for(self._args.model, self._args.optimizers, saved, dtypes)

    def _compare(self, held: _pieces.Held) -> None:
        missing, cast, left_out = [], [], set[str]()
        if "trainable" in self.manifest.contents:
            left_out = {_pieces.MODEL + name for name in _pieces.frozen_names(self._args.model)}
        for key, pieces in held.items():
            if (saved := self._saved.get(key)) is None:
                # Of one without elements no rank had a piece to write.
                if key not in left_out and 0 not in pieces.shape:
                    missing.append(key)
            elif saved.size != pieces.shape:
                raise CheckpointError(
                    f"{key} has shape {tuple(saved.size)} in it and {pieces.shape} here; expected "
                    "the model that was saved"
                )
            elif saved.dtype != pieces.dtype:
                cast.append(f"{key} from {saved.dtype} to {pieces.dtype}")
        self._judge("are not in it", "were left as they are", missing)
        self._judge("would be cast", "were cast", cast)

    def _judge(
        self, what: str, done: str, names: list[str], start: str = "",
        remedy: str = "expected the model that was saved; strict=False loads the rest",
    ) -> None:  # fmt: skip
        """Refuse tensors that are not as they were saved, or note them."""
        if names and self._strict:
            raise CheckpointError(f"{start}{len(names)} tensors {what}: {_some(names)}; {remedy}")
        if names:
            self._notes.append(f"{len(names)} tensors {done}: {_some(names)}")

    def fill(self, world: World | None, rng: bool) -> tuple[dict[str, Any], Any, list[str]]:
        """Read everything; return ``extra``, the state of ``data``, and notes."""
        self._ranks.here(self._what, self._read)
        return self._ranks.here(self._what, lambda: self._apply(world, rng))

    def _read(self) -> None:
        store, folder = self._place
        for name, wanted in self._wanted.items():
            with store.open(f"{folder}/{name}", "rb") as file:
                index.read(file, wanted)

    def _bytes(self, key: str) -> bytes:
        ((_, tensor),) = self._held[key].held
        return bytes(raw_of(tensor))

    def _object(self, key: str) -> Any:
        return _pieces.decode(key, self._bytes(key))

    def _apply(self, world: World | None, rng: bool) -> tuple[dict[str, Any], Any, list[str]]:
        stages = [self._object(key) for key in self._held if key.startswith("stage.")]
        common = self._object(_pieces.COMMON)
        here = common["degrees"] == self._layout.degrees
        own = self._object(_pieces.rank_key(self._ranks.rank if here else 0))
        saved = {name: one for stage in reversed(stages) for name, one in stage["model"].items()}
        missing = [name for name in self._values if name not in saved]
        self._judge("are not in it", "were left as they are", missing)
        for name in self._values.keys() & saved.keys():
            self._set_value(name, saved[name])
        replicas = self._replica_keys()
        if here:
            for name, value in self._replica_state().items():
                self._set_value(name, value)
        elif replicas:
            names = list(self._object(replicas[0]))
            self._notes.append(
                f"the ranks had different buffers or extra state (of {_some(names)}): all have "
                "those of the first"
            )
        _pieces.set_model_state(self._args.model, self._model_state, self._strict)
        there = self.manifest.contents
        if self._args.optimizers and "optimizer" in there:
            self._set_optimizers(stages)
        if self._args.scheduler is not None and "scheduler" in there:
            _pieces.load_state_dicts(self._args.scheduler, common["scheduler"])
        if self._args.data is not None and "data" in there:
            _pieces.load_state_dicts(self._args.data, own["data"])
            if not here:
                self._notes.append("the position in the data is rank 0's, on every rank")
        if rng:
            self._set_rng(own, here, world)
        return common["extra"] or {}, own["data"], self._notes

    def _replica_keys(self) -> list[str]:
        """Return the keys of the first rank's own buffers and extra state, and of this rank's."""
        keys = sorted(key for key in self._saved if key.startswith(_pieces.REPLICA))
        own = _pieces.replica_key(self._ranks.rank)
        return [key for key in keys if key in (keys[0], own)]

    def _replica_state(self) -> dict[str, Any]:
        key = _pieces.replica_key(self._ranks.rank)
        if key not in self._held:
            return {}
        found: dict[str, Any] = self._object(key)
        return found

    def _set_value(self, name: str, value: Any) -> None:
        present = self._model_state.get(name)
        if isinstance(present, Tensor) and isinstance(value, Tensor):
            value = value.to(present.device)
        self._model_state[name] = value

    def _set_optimizers(self, stages: list[Mapping[str, Any]]) -> None:
        for key in self._held:
            if key.startswith(_pieces.VALUES):
                name = key.removeprefix(_pieces.VALUES)
                if name in self._state or not any(self._state):
                    self._state.setdefault(name, {}).update(self._object(key))
        groups = [group for stage in stages for group in stage["options"] or ()]
        _pieces.set_state(self._args.model, self._args.optimizers, self._state, groups)

    def _set_rng(self, own: Mapping[str, Any], here: bool, world: World | None) -> None:
        device = _pieces.device_of(self._args.model, world)
        if here:
            self._notes += _pieces.set_rng_state(own["rng"], device)
            return
        key = _pieces.rank_key(self._ranks.rank)
        if key in self._held and {*(self._layout.degrees | {"data": 1}).values()} == {1}:
            self._notes += _pieces.set_rng_state(self._object(key)["rng"], device)
        else:
            # Tensor-parallel ranks draw the same numbers.
            at, axes = self._layout.index, (axis for axis in _pieces.AXES if axis != "tensor")
            stream = tuple(at[axis] for axis in axes)
            _pieces.derive_rng_state(self._bytes(_pieces.rank_key(0)), stream)
        self._notes.append(
            f"saved by {self.manifest.world_size} ranks and loaded by {self._ranks.size}: random "
            "streams of ranks that were not there are derived from rank 0's"
        )


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
    found, _ = index.read_manifests(store)  # loading says what is wrong with the others
    newest: dict[int, Checkpoint] = {}
    for name, manifest in found.items():
        newest.setdefault(name.step, described(store, str(name), manifest))
    return list(newest.values())


def _candidates(store: Store, step: int | None, must_be: bool) -> list[Name]:
    """Return what to load, the newest first: that may be one whose manifest cannot be read."""
    found, wrong = index.read_manifests(store, step)
    if must_be and not (found or wrong):
        there = sorted({name.step for name in _store.names_in(store.entries())})
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        steps = ", ".join(map(str, there)) or "none"
        raise CheckpointError(f"{which} in {store.root}; there are: {steps}")
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
        name = str(_candidates(store, step, must_be=True)[0])
    try:
        manifest = index.read_manifest(store, name)
    except ValueError as error:
        raise CheckpointError(f"{store.root}/{name}: {error}") from error
    found = (index.damage_of(store, name, file, said) for file, said in manifest.files.items())
    if problems := [problem for problem in found if problem]:
        raise CheckpointError(f"{store.root}/{name}: {'; '.join(problems)}")
    return described(store, name, manifest)


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
    notes: tuple[str, ...] = ()


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
    """Resume from the newest undamaged checkpoint: load it into the model and what else is given.

        loaded = load_checkpoint("run/checkpoints", model=model, optimizer=optimizer)
        start = loaded.step + 1 if loaded else 0

    Sizes and checksums of all files that are read are compared first. One rank of a node reads
    each file for that. All ranks skip a damaged checkpoint for the one before it, with a warning
    that names what is wrong. No code in a file is run. Tensors are read with ``weights_only``,
    and the rest is JSON. Any number of ranks, any wrapper, and any tensor-parallel degree of
    ezpz_tp's layers may load what others saved.
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
        strict: Names and dtypes must be the same. False: missing names keep their values, names
            that are too many are left out, and dtypes are cast, as ``Loaded.notes`` say.

    Returns:
        None where there is no checkpoint yet.

    Raises:
        CheckpointError: On all ranks: every checkpoint is damaged, and how; or the one of ``step``
            is, or is not there; or it does not fit the model. Never a silent fresh start.
        HangError, LostRankError, NotSetUpError: As of `save_checkpoint`.
    """
    world = current_world("load_checkpoint()")
    ranks = _store.ranks_of(world)
    finish_saving()
    started = time.monotonic()
    with ranks.waiting("load_checkpoint()"), _store.collecting_later():
        store = ranks.here(f"{os.fspath(path)} cannot be loaded", lambda: _store.open_store(path))
        ranks.same("load_checkpoint", f"{store.root}, step {step}, rng {rng}, strict {strict}")
        names = ranks.first(f"{store.root} cannot be listed", lambda: _followed(store, step))
        if not names:
            return None
        layout = _pieces.current_layout(ranks.rank, ranks.size)
        args = CheckpointArgs(model, _store.as_list(optimizer), scheduler, data)
        target = Target(ranks, layout, args, strict)
        skipped: list[str] = []
        for name in names:
            folder = f"{store.root}/{name}"
            opened = partial(_opened, store, str(name))
            found = ranks.first(f"{folder} cannot be read", opened)
            damage = [found] if isinstance(found, str) else target.plan(store, str(name), *found)
            if not damage:
                break
            skipped.append(f"{folder}: {'; '.join(damage)}")
            if step is None and ranks.rank == 0:
                logger.warning("passing over a damaged checkpoint, %s", skipped[-1])
        else:
            raise CheckpointError(
                f"no checkpoint{'' if step is None else f' of step {step}'} in {store.root} can be "
                f"loaded: {'. '.join(skipped)}. Expected one that is whole; remove them to start "
                "again"
            )
        extra, state, notes = target.fill(world, rng)
        manifest = target.manifest
        if ranks.rank == 0:
            logger.info(
                "step %d loaded from %s: %.1f MB, saved by %d ranks, in %.2f s",
                name.step, folder, manifest.size / 1e6, manifest.world_size,
                time.monotonic() - started,
            )  # fmt: skip
            for note in notes:
                logger.warning("step %d: %s", name.step, note)
    damaged, odd = tuple(skipped), tuple(notes)
    return Loaded(name.step, folder, extra, state, manifest.world_size, damaged, odd)


def _followed(store: Store, step: int | None) -> list[Name]:
    _store.follow(store)
    return _candidates(store, step, must_be=step is not None)


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
