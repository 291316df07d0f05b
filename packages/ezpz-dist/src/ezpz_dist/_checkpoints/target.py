"""What a check-point is loaded into: planned, verified, and only then filled."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from operator import and_, or_
from typing import Any

from ezpz_dist._errors import CheckpointError
from ezpz_dist._world import World

from . import index, objects, optimizers, state
from .given import Given, give_memory
from .layout import Layout
from .manifest import Manifest
from .names import refuse_deepspeed
from .pieces import blob_of
from .ranks import Ranks
from .reading import Reading, bytes_of, damages, shares
from .rng import derive_rng_state, set_rng_state
from .store import Store

_NAMED = 5
"""Names that a message lists."""


class Target:
    """A model and what else was given. Each method is a collective: every rank calls it."""

    def __init__(self, ranks: Ranks, layout: Layout, given: Given, strict: bool) -> None:
        self._ranks, self._layout = ranks, layout
        self._given, self._strict = given, strict
        self._notes: list[str] = []

    def plan(self, store: Store, folder: str, manifest: Manifest, data: bytes) -> list[str]:
        """Find out what each rank reads, and verify it; return what is wrong on any.

        Raises:
            CheckpointError: It is not for this model.
        """
        ranks = self._ranks
        self._what = f"{store.root}/{folder} cannot be loaded"
        self._manifest, self._notes = manifest, []
        saved, problem = _decoded(data, manifest)
        if problem:
            return [problem]
        self._saved = saved
        reading = ranks.here(self._what, lambda: self._reading(store, folder))
        self._reader = reading
        mine, spare = self._shared_out(reading.files)
        self._judge_unknown(spare)
        found = ranks.tell(ranks.gather(damages(store, folder, manifest, mine)))
        return [
            f"rank {rank} on {ranks.hosts[rank]}: {each}" if ranks.size > 1 else each
            for rank, problems in enumerate(found)
            for each in problems
        ]

    def _shared_out(self, reads: set[str]) -> tuple[list[str], list[str]]:
        """Return the files that this rank is to verify, and the tensors that no rank has.

        What ranks of a host read is verified by one of them. Sent as bits: the names
        would be too many.
        """
        ranks, names = self._ranks, list(self._manifest.files)
        keys = [key for key in self._saved if key.startswith(state.MODEL)]
        told = ranks.gather((_bits(names, reads), _bits(keys, self._unknown)))

        def share() -> list[tuple[int, int]]:
            mates: dict[str, list[int]] = {}
            for rank, host in enumerate(ranks.hosts):
                mates.setdefault(host, []).append(rank)
            spare = reduce(and_, (unknown for _, unknown in told))
            mine = [(0, spare)] * ranks.size
            for group in mates.values():
                read = reduce(or_, (told[rank][0] for rank in group))
                dealt = shares(_named(names, read), self._manifest, len(group))
                for rank, files in zip(group, dealt, strict=True):
                    mine[rank] = _bits(names, set(files)), spare
            return mine

        verifies, spare = ranks.first_for_each(self._what, share)
        return _named(names, verifies), sorted(_named(keys, spare))

    def _reading(self, store: Store, folder: str) -> Reading:
        refuse_deepspeed(self._given.model)
        self._choose_contents()
        give_memory(self._given.model)
        self._model_state = state.model_state(self._given.model)
        self._state = self._room()
        parts = state.Parts(self._given.model, self._layout)
        held, self._values, _ = state.held_by(parts, self._model_state, self._state)
        known = {name: pieces for name, pieces in held.items() if name in self._saved}
        self._compare(held)
        stages = sum(1 for key in self._saved if key.startswith("stage."))
        size = self._manifest.world_size
        wanted = [state.COMMON, state.rank_key(0), *map(state.stage_key, range(stages))]
        if self._ranks.rank < size:
            wanted.append(state.rank_key(self._ranks.rank))
        if self._given.optimizers:
            wanted += [key for key in self._saved if key.startswith(state.VALUES)]
        for key in wanted:
            if key not in self._saved:
                raise CheckpointError(f"there is no {key} in it; save_checkpoint writes one")
            known[key] = blob_of(bytes(self._saved[key].size.numel()))
        self._held = known
        return Reading(store, folder, self._saved, known)

    def _choose_contents(self) -> None:
        """Make sure that what is asked for was saved."""
        wanted = {"optimizer", "scheduler", "data"} & set(self._given.contents)
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

    def _room(self) -> optimizers.State:
        if not self._given.optimizers or not self._has("optimizer"):
            return {}
        names = {key.removeprefix(state.MODEL): 0 for key in self._saved}
        saved: dict[str, dict[str, Any]] = {}
        for key, about in self._saved.items():
            if key.startswith(state.OPTIMIZER):
                name, entry = state.split_key(key, names)
                saved.setdefault(name, {})[entry] = about
        return optimizers.room_for(self._given.model, self._given.optimizers, saved)

    def _compare(self, held: state.Held) -> None:
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
            key for key in self._saved if key.startswith(state.MODEL) and key not in held
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
        """Read everything; return ``extra``, the state of ``data``, and notes.

        Raises:
            CheckpointError: Something cannot be read, or not be taken.
        """
        self._ranks.here(self._what, self._reader.fill)
        return self._ranks.here(self._what, lambda: self._apply(world, rng))

    def _object(self, key: str) -> Any:
        return objects.decode(key, bytes_of(self._held, key))

    def _apply(self, world: World | None, rng: bool) -> tuple[dict[str, Any], Any, list[str]]:
        stages = [self._object(key) for key in self._held if key.startswith("stage.")]
        common = self._object(state.COMMON)
        here = common["degrees"] == self._layout.degrees
        own_key = state.rank_key(self._ranks.rank if here else 0)
        own = self._object(own_key)
        saved: dict[str, Any] = {}
        for stage in reversed(stages):
            saved |= stage["model"]
        missing = [name for name in self._values if name not in saved]
        self._judge("are not in it", "were left as they are", missing)
        for name in self._values.keys() & saved.keys():
            self._model_state[name] = saved[name]
        state.set_model_state(self._given.model, self._model_state, self._strict)
        if self._given.optimizers and self._has("optimizer"):
            self._set_optimizers(stages)
        if self._given.scheduler is not None and self._has("scheduler"):
            state.load_state_dicts(self._given.scheduler, common["scheduler"])
        if self._given.data is not None and self._has("data"):
            state.load_state_dicts(self._given.data, own["data"])
            if not here:
                self._notes.append("the position in the data is rank 0's, on every rank")
        if rng:
            self._set_rng(own, here, world)
        return common["extra"] or {}, own["data"], self._notes

    def _set_optimizers(self, stages: list[Mapping[str, Any]]) -> None:
        for key in self._held:
            if key.startswith(state.VALUES):
                name = key.removeprefix(state.VALUES)
                if name in self._state or not any(self._state):
                    self._state.setdefault(name, {}).update(self._object(key))
        groups = [group for stage in stages for group in stage["options"] or ()]
        optimizers.set_state(self._given.model, self._given.optimizers, self._state, groups)

    def _set_rng(self, own: Mapping[str, Any], here: bool, world: World | None) -> None:
        if here:
            self._notes += set_rng_state(own["rng"], world)
            return
        saved, rank = bytes_of(self._held, state.rank_key(0)), self._ranks.rank
        data_parallel = all(
            degree == 1 for axis, degree in self._layout.degrees.items() if axis != "data"
        )
        key = state.rank_key(rank)
        if data_parallel and key in self._held:
            self._notes += set_rng_state(self._object(key)["rng"], world)
        else:
            derive_rng_state(saved, self._layout.stream)
        self._notes.append(
            f"saved by {self._manifest.world_size} ranks and loaded by {self._ranks.size}: random "
            "streams of ranks that were not there are derived from rank 0's"
        )


def _decoded(data: bytes, manifest: Manifest) -> tuple[dict[str, index.Saved], str]:
    try:
        saved = index.decode(data)
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
