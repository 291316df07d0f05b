"""Load the newest training state that is whole, on all ranks the same."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ezpz_dist._data import deal_by_size
from ezpz_dist._errors import CheckpointError, grouped
from ezpz_dist._objects import raw_of
from ezpz_dist._replicas import unexpand_buffers
from ezpz_dist._world import World, current_world
from ezpz_tp import Piece

from .background import finish_saving
from .contents import (
    COMMON,
    CheckpointArgs,
    Optimizers,
    cut_state,
    list_optimizers,
    rank_key,
    replica_key,
    set_states,
    stage_key,
    wrap_bytes,
)
from .disk_format import (
    Chunk,
    Key,
    Manifest,
    Saved,
    Source,
    decode_index,
    describe_key,
    find_damage,
    read_index_file,
    read_manifest,
    read_tensors,
)
from .files import Name, find_root
from .listing import find_candidates
from .optimizers import Options, State, allocate_state, check_groups, set_optimizers
from .owner import record_resume_source
from .pieces import (
    Splits,
    find_frozen_names,
    find_layout,
    find_tied_names,
    is_fsdp1,
    model_state,
    refuse_deepspeed,
    set_model_state,
)
from .plan import Held
from .random_state import derive_rng_state, find_device, set_rng_state
from .ranks import Ranks, find_ranks
from .save import gc_paused
from .values import decode

T = TypeVar("T")

logger = logging.getLogger(__name__)

_MAX_NAMED = 5  # tensors that a message lists


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
    optimizer: Optimizers | None = None,
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
    that names what is wrong. No code in a file is run: there are bytes of tensors, and JSON.
    Any number of ranks, any wrapper, and any tensor-parallel degree of ezpz_tp's layers may load
    what others saved.
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
    ranks = find_ranks(world)
    finish_saving()
    started = time.monotonic()
    args = CheckpointArgs(model, list_optimizers(optimizer), scheduler, data)
    with ranks.waiting("load_checkpoint()"), gc_paused():
        arguments = f"{os.fspath(path)}, step {step}, rng {rng}, strict {strict}"
        ranks.run_on_all("load_checkpoint", lambda: arguments, ranks.check_equal)
        what = f"{os.fspath(path)} cannot be listed"
        root, names = ranks.run_on_rank0(what, lambda: list_candidates(path, step))
        if not names:
            return None
        skipped: list[str] = []
        for name in names:
            load = Load(ranks, root / str(name), args, strict)
            damage = load.prepare()
            if not damage:
                break
            skipped.append(f"{load.folder}: {'; '.join(damage)}")
            if step is None and ranks.rank == 0:
                logger.warning("passing over a damaged checkpoint, %s", skipped[-1])
        else:
            which = "" if step is None else f" of step {step}"
            raise CheckpointError(
                f"no checkpoint{which} in {root} can be loaded: {'. '.join(skipped)}. Expected one "
                "that is whole; remove them to start again"
            )
        load.fill(world, rng)
    if ranks.rank == 0:
        logger.info(
            "step %d loaded from %s: %.1f MB, saved by %d ranks, in %.2f s",
            name.step,
            load.folder,
            load.manifest.size / 1e6,
            load.manifest.world_size,
            time.monotonic() - started,
        )
        for note in load.notes:
            logger.warning("step %d: %s", name.step, note)
    return Loaded(
        step=name.step,
        folder=str(load.folder),
        extra=load.extra,
        data=load.data,
        world_size=load.manifest.world_size,
        skipped=tuple(skipped),
        notes=tuple(load.notes),
    )


def list_candidates(path: str | os.PathLike[str], step: int | None) -> tuple[Path, list[Name]]:
    root = find_root(path)
    record_resume_source(root)
    return root, find_candidates(root, step, must_exist=step is not None)


class OpenCheckpoint(NamedTuple):
    """The manifest of a checkpoint and its index, in bytes; or why they cannot be read."""

    manifest: Manifest | None = None
    index_data: bytes = b""
    damage: str = ""


def open_checkpoint(folder: Path) -> OpenCheckpoint:
    try:
        manifest = read_manifest(folder)
        return OpenCheckpoint(manifest, read_index_file(folder, manifest))
    except ValueError as error:
        return OpenCheckpoint(damage=str(error))


class LoadRequest(NamedTuple):
    """What a rank sends to rank 0 before anything is read."""

    files: list[str]  # that it reads
    unused: set[int]  # tensors of the model in the index that it has none for, by their number


class Load:
    """One checkpoint, and what it is loaded into. Its public methods are collectives."""

    def __init__(self, ranks: Ranks, folder: Path, args: CheckpointArgs, strict: bool) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self._ranks = ranks
        self._args = args
        self._strict = strict
        self._layout = find_layout(ranks.rank, ranks.size)
        self._what = f"{folder} cannot be loaded"

    # Planning and verification.

    def prepare(self) -> list[str]:
        """Plan what each rank reads, and verify it. Return descriptions of damage."""
        ranks = self._ranks
        opened = ranks.run_on_rank0(
            f"{self.folder} cannot be read", lambda: open_checkpoint(self.folder)
        )
        if opened.manifest is None:
            return [opened.damage]
        self.manifest = opened.manifest
        try:
            self._index = decode_index(opened.index_data)
        except ValueError as error:
            return [str(error)]
        self._keys = grouped((key[0], key) for key in self._index)
        for saved in self._index.values():
            for chunk in saved.chunks:
                if chunk.file not in self.manifest.files:
                    return [f"the manifest does not list {chunk.file}"]
        shares, unused = ranks.run_on_all(self._what, self._plan, self._share_files)
        self._refuse_or_note(
            sorted(describe_key(self._keys["model"][number]) for number in unused),
            "of it are none of the model's",
            "were left out",
            start=f"{self._what}: ",
            remedy="strict=False leaves them out",
        )
        return ranks.run_on_all(self._what, lambda: self._verify(shares), join_lists)

    def _plan(self) -> LoadRequest:
        args = self._args
        refuse_deepspeed(args.model)
        self._choose_contents()
        unexpand_buffers(args.model)
        self._model_state = model_state(args.model)
        self._splits = Splits(args.model, self._layout)
        self._optimizers = self._allocate_optimizers()
        cut = cut_state(self._splits, self._model_state, self._optimizers)
        self._model_values = cut.model_values
        held = self._rename_tied(cut.tensors)
        self._compare(held)
        self._held: Held = {}
        unused = set()
        for kind in ("model", "optimizer"):
            for number, key in enumerate(self._keys.get(kind, ())):
                if key in held:
                    self._held[key] = held[key]
                elif kind == "model":
                    unused.add(number)
        self._records = self._allocate_records()
        self._tensor_sources = self._find_sources(self._held)
        self._record_sources = self._find_sources(self._records)
        return LoadRequest([*self._tensor_sources, *self._record_sources], unused)

    def _choose_contents(self) -> None:
        wanted = {"optimizer", "scheduler", "data"}.intersection(self._args.contents)
        missing = ", ".join(sorted(wanted.difference(self.manifest.contents)))
        if missing and self._strict:
            raise CheckpointError(
                f"it holds {', '.join(self.manifest.contents)}, but no {missing}; leave them out, "
                "or give strict=False"
            )
        if missing:
            self.notes.append(f"no {missing} in it: left as they are")

    def _allocate_optimizers(self) -> State:
        if not self._args.optimizers or "optimizer" not in self.manifest.contents:
            return {}
        saved: dict[str, dict[str, Saved]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for key in self._keys.get("model", ()):
            dtypes[key[1]] = self._index[key].dtype
        for key in self._keys.get("optimizer", ()):
            _, name, entry = key
            saved.setdefault(name, {})[entry] = self._index[key]
        args = self._args
        return allocate_state(args.model, args.optimizers, self._splits, saved, dtypes)

    def _allocate_records(self) -> Held:
        """Return tensors to fill with the records that this rank reads."""
        keys = {COMMON, stage_key(0), *self._keys.get("stage", ()), rank_key(0)}
        keys.update(self._replica_keys())
        if self._ranks.rank < self.manifest.world_size:
            keys.add(rank_key(self._ranks.rank))
        if self._args.optimizers:
            keys.update(self._keys.get("optimizer-values", ()))
        found: Held = {}
        for key in sorted(keys):
            if key not in self._index:
                raise CheckpointError(
                    f"there is no {describe_key(key)} in it; save_checkpoint writes one"
                )
            found[key] = wrap_bytes(torch.empty(self._index[key].shape, dtype=torch.uint8))
        return found

    def _replica_keys(self) -> list[Key]:
        """Return the keys of what the first rank had itself, and this rank, if ranks differed."""
        keys = sorted(self._keys.get("replica", ()))
        own = replica_key(self._ranks.rank)
        if own in keys[1:]:
            return [keys[0], own]
        return keys[:1]

    def _rename_tied(self, held: Held) -> Held:
        """Return tied tensors, saved under one of their names, under that name."""
        tied = find_tied_names(self._args.model)
        found: Held = {}
        for key, pieces in held.items():
            saved_as = key
            if key[0] == "model" and key not in self._index:
                for name in sorted(tied.get(key[1], ())):
                    if ("model", name) in self._index:
                        saved_as = ("model", name)
                        break
            found[saved_as] = pieces
        return found

    def _compare(self, held: Held) -> None:
        """Refuse tensors that are not in the checkpoint, or not as they were saved."""
        left_out: set[str] = set()
        if "trainable" in self.manifest.contents:
            left_out = find_frozen_names(self._args.model)
        missing = []
        cast = []
        for key, pieces in held.items():
            name = describe_key(key)
            saved = self._index.get(key)
            if saved is None:
                # Of one without elements no rank had a piece to write.
                is_left_out = key[0] == "model" and key[1] in left_out
                if not is_left_out and 0 not in pieces.shape:
                    missing.append(name)
            elif saved.shape != pieces.shape:
                raise CheckpointError(
                    f"{name} has shape {saved.shape} in it and {pieces.shape} here; expected the "
                    "model that was saved"
                )
            elif saved.dtype != pieces.dtype:
                cast.append(f"{name} from {saved.dtype} to {pieces.dtype}")
        self._refuse_or_note(missing, "are not in it", "were left as they are")
        self._refuse_or_note(cast, "would be cast", "were cast")

    def _refuse_or_note(
        self,
        names: list[str],
        problem: str,
        note: str,
        *,
        start: str = "",
        remedy: str = "strict=False loads the rest",
    ) -> None:
        """Refuse tensors that are not as they were saved, or note them."""
        if names and self._strict:
            raise CheckpointError(
                f"{start}{len(names)} tensors {problem}: {list_some(names)}; expected the model "
                f"that was saved; {remedy}"
            )
        if names:
            self.notes.append(f"{len(names)} tensors {note}: {list_some(names)}")

    def _find_sources(self, held: Held) -> dict[str, list[Source]]:
        """Return what to read of each file, and where to."""
        sources: dict[str, list[Source]] = {}
        for key, pieces in held.items():
            saved = self._index[key]
            for piece, tensor in pieces.held:
                found = 0
                for chunk, common in find_overlaps(piece, saved.chunks):
                    found += math.prod(common.sizes)
                    part = None if common == chunk.piece else common.within(chunk.piece)
                    target = tensor if common == piece else tensor[common.within(piece).slices]
                    source = Source(chunk.at, saved.dtype, chunk.piece.sizes, part, target)
                    sources.setdefault(chunk.file, []).append(source)
                if found != math.prod(piece.sizes):
                    raise CheckpointError(
                        f"{describe_key(key)} is not all in it: {found} elements of "
                        f"{math.prod(piece.sizes)}; expected what save_checkpoint wrote"
                    )
        return sources

    def _share_files(self, needs: list[LoadRequest]) -> tuple[dict[int, list[str]], set[int]]:
        """Return the files that each rank verifies, and the tensors that no rank has."""
        # What ranks of a host read is verified by one of them.
        shares: dict[int, list[str]] = {}
        hosts = grouped((host, rank) for rank, host in enumerate(self._ranks.hosts))
        for members in hosts.values():
            files: set[str] = set()
            for rank in members:
                files.update(needs[rank].files)
            names = sorted(files)
            sizes = [self.manifest.files[name].size for name in names]
            for rank, places in zip(members, deal_by_size(sizes, len(members)), strict=True):
                shares[rank] = [names[place] for place in places]
        # Pipeline stages have some of the model's tensors each.
        return shares, set.intersection(*(each.unused for each in needs))

    def _verify(self, shares: Mapping[int, Sequence[str]]) -> list[str]:
        rank = self._ranks.rank
        damages = []
        for name in shares[rank]:
            damage = find_damage(self.folder, name, self.manifest.files[name])
            if damage is not None:
                damages.append(self._ranks.describe(rank) + damage)
        return damages

    # Filling.

    def fill(self, world: World | None, rng: bool) -> None:
        """Read everything into the model and what else was given."""
        # What is refused is refused on all ranks, before anything is filled.
        misfits = self._ranks.run_on_all(self._what, self._read_records, join_lists)
        self._refuse_or_note(
            sorted(set(misfits)),
            "have optimizer state of one rank's part, which fits only the layout that saved it",
            "have optimizer state of one rank's part: their optimizer state starts anew",
            start=f"{self._what}: ",
            remedy="strict=False leaves it out",
        )
        for name in misfits:
            self._optimizers[name] = {}
        # Giving FSDP1's optimizers their state takes collectives: all ranks have read by then.
        self._ranks.run_on_all(self._what, lambda: self._read(self._tensor_sources))
        self._ranks.run_on_all(self._what, lambda: self._apply(world, rng, set(misfits)))

    def _read(self, sources: Mapping[str, Sequence[Source]]) -> None:
        for name, sources_in_file in sources.items():
            read_tensors(self.folder / name, sources_in_file)

    def _read_records(self) -> list[str]:
        """Return parameters with local optimizer state that does not fit here."""
        self._read(self._record_sources)
        self._common = self._decode(COMMON)
        stages = list(map(self._decode, sorted(self._keys["stage"])))
        self._is_same_layout = self._common["degrees"] == self._layout.degrees
        # In another layout no rank has a state of its own: rank 0's stands for all.
        source_rank = 0
        if self._is_same_layout:
            source_rank = self._ranks.rank
        self._own = self._decode(rank_key(source_rank))
        self._saved_values: dict[str, Any] = {}
        self._options: Options = []
        names: list[str] = []
        for stage in reversed(stages):
            self._saved_values.update(stage["model"])
            self._options += stage["options"]
            names += stage["local_state"]
            if self._replica_keys() and not self._is_same_layout:
                names += stage["counters"]  # ranks differed, perhaps in these
        missing = sorted(self._model_values.keys() - self._saved_values.keys())
        self._refuse_or_note(missing, "are not in it", "were left as they are")
        if self._args.optimizers and "optimizer" in self.manifest.contents:
            check_groups(self._args.model, self._args.optimizers, self._options)
        return [name for name in names if name in self._optimizers and not self._fits(name)]

    def _fits(self, name: str) -> bool:
        """True if this rank's record has the state of the part of a parameter that it holds."""
        if is_fsdp1(self._args.model):
            return False
        pieces = self._splits.list_held_pieces(name)
        own = self._own["optimizer"].get(name)
        return not pieces or (own is not None and own["pieces"] == pieces)

    def _read_bytes(self, key: Key) -> bytes:
        ((_, data),) = self._records[key].held
        return bytes(raw_of(data))

    def _decode(self, key: Key) -> Any:
        return decode(describe_key(key), self._read_bytes(key))

    def _apply(self, world: World | None, rng: bool, misfits: set[str]) -> None:
        args = self._args
        contents = self.manifest.contents
        self._set_model()
        if args.optimizers and "optimizer" in contents:
            self._set_optimizers(misfits)
        if args.scheduler is not None and "scheduler" in contents:
            set_states(args.scheduler, self._common["scheduler"])
        if args.data is not None and "data" in contents:
            set_states(args.data, self._own["data"])
            if not self._is_same_layout:
                self.notes.append("the position in the data is rank 0's, on every rank")
        if rng:
            self._set_rng(world)
        self.extra: Mapping[str, Any] = self._common["extra"]
        self.data = self._own["data"]

    def _set_model(self) -> None:
        for name in self._model_values.keys() & self._saved_values.keys():
            self._set_value(name, self._saved_values[name])
        self._replica = self._find_replica()
        for name, value in self._replica["model"].items():
            self._set_value(name, value)
        set_model_state(self._args.model, self._model_state, self._strict)

    def _find_replica(self) -> dict[str, Any]:
        """Return what this rank had itself, if ranks differed in it and the layout is the same."""
        replicas = self._replica_keys()
        own = replica_key(self._ranks.rank)
        if self._is_same_layout and own in replicas:
            found: dict[str, Any] = self._decode(own)
            return found
        if replicas and not self._is_same_layout:
            first = self._decode(replicas[0])
            names = [*first["model"], *(f"optimizer.{name}" for name in first["optimizer"] or ())]
            self.notes.append(
                "the ranks had different buffers, extra state or values of the optimizer (of "
                f"{list_some(names)}): all have those of the first"
            )
        return {"model": {}, "optimizer": None}

    def _set_value(self, name: str, value: Any) -> None:
        present = self._model_state.get(name)
        if isinstance(present, Tensor) and isinstance(value, Tensor):
            value = value.to(present.device)
        self._model_state[name] = value

    def _set_optimizers(self, misfits: set[str]) -> None:
        values = self._replica["optimizer"]
        if values is None:
            keys = self._keys.get("optimizer-values", ())
            values = {key[1]: self._decode(key) for key in keys}
        local_state = self._own["optimizer"]
        # Of the parameters that are here; FSDP1 does not say which these are, until a step.
        names = self._optimizers.keys() or values.keys()
        for name in names - misfits:
            entries = self._optimizers.setdefault(name, {})
            entries.update(values.get(name, {}))
            if name in local_state:
                entries.update(local_state[name]["state"])
        set_optimizers(self._args.model, self._args.optimizers, self._optimizers, self._options)

    def _set_rng(self, world: World | None) -> None:
        device = find_device(self._args.model, world)
        if self._is_same_layout:
            self.notes += set_rng_state(self._own["rng"], device)
            return
        own = rank_key(self._ranks.rank)
        is_data_parallel = self._layout.degrees["data"] == self._ranks.size
        if own in self._records and is_data_parallel:
            self.notes += set_rng_state(self._decode(own)["rng"], device)
        else:
            # Tensor-parallel ranks draw the same numbers.
            index = self._layout.index
            place = (index["context"], index["pipeline"], index["data"])
            derive_rng_state(self._read_bytes(rank_key(0)), place)
        self.notes.append(
            f"saved by {self.manifest.world_size} ranks and loaded by {self._ranks.size}: random "
            "streams of ranks that were not there are derived from rank 0's"
        )


def find_overlaps(piece: Piece, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, Piece]]:
    """Yield the chunks that have a part of a piece, and that part, as a piece of the whole."""
    for chunk in chunks:
        if chunk.piece == piece:
            yield chunk, piece
            return
    for chunk in chunks:
        common = chunk.piece.overlap(piece)
        if common is not None:
            yield chunk, common


def join_lists(lists: Iterable[list[T]]) -> list[T]:
    return list(chain.from_iterable(lists))


def list_some(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    text = ", ".join(names[:_MAX_NAMED])
    if len(names) > _MAX_NAMED:
        text += f" and {len(names) - _MAX_NAMED} more"
    return text
