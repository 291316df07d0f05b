"""Save a training state: by all ranks, at one step, or not at all."""

from __future__ import annotations

import errno
import gc
import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ezpz_dist._errors import CheckpointError, fold, grouped
from ezpz_dist._objects import as_tensor
from ezpz_dist._world import current_world

from . import contents as _contents
from . import files, listing, owner, random_state
from . import pieces as _pieces
from .background import Saving, finish_saving
from .contents import CheckpointArgs, Optimizers, encode_pieces, wrap_bytes
from .disk_format import (
    INDEX,
    MANIFEST,
    Chunk,
    DataWriter,
    Index,
    Key,
    Manifest,
    Saved,
    Written,
    describe_key,
    encode_index,
    encode_manifest,
    write_checksummed,
)
from .optimizers import (
    LocalState,
    Options,
    State,
    collect_optimizers,
    has_zero1,
    pop_counters,
    pop_local_state,
)
from .pieces import Layout, Pieces
from .plan import (
    Held,
    Holding,
    Item,
    Plan,
    compare_copies,
    compute_checksums,
    list_items,
    pack_items,
    plan_writers,
    unpack_items,
)
from .ranks import Ranks, find_ranks
from .values import encode

logger = logging.getLogger(__name__)

_VISIBLE_WITHIN = 10.0
"""Seconds in which rank 0 must see what others wrote. Network file systems remember misses."""


def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Optimizers | None = None,
    scheduler: Any = None,
    step: int,
    data: Any = None,
    extra: Mapping[str, Any] | None = None,
    frozen: bool = True,
    keep: int | None = 3,
    asynchronous: bool = False,
) -> Saving:
    """Save a training state under a path: the model, and what else is given.

    It is written aside with checksums, synced, and then renamed to ``step-00000042``. A crash
    at any moment leaves the checkpoint before it. Tensors have the model's own names, so that
    any number of ranks, and DDP, FSDP1, FSDP2, ZeRO-1, ezpz_tp's layers or the bare model can
    load it.

    The random streams of every rank are saved too, and so are buffers, extra state and numbers in
    an optimizer's state, where ranks differ in them. What an optimizer has of a shard and is no
    shard itself, such as 8-bit moments in blocks, is saved by each rank, and fits only the layout
    that saved it. Data-parallel ranks share the writing of parameters, and of what an optimizer has
    in their shape, which are taken for equal. So are, on the ranks of a tensor-parallel group,
    parameters that nothing says how they are split; where they are not, a warning names them. A
    failure on one rank is raised on all. Collective: every rank calls this.

    A step that exists already is saved beside it and then replaced. What interrupted saves left
    is removed.

    Args:
        path: A folder that all hosts share.
        model: Wrapped or not.
        optimizer: The model's, or several.
        scheduler: Has ``state_dict()``; or several.
        step: The step. What was saved last is loaded first: below a step that exists, it says
            that the run has gone back.
        data: Has ``state_dict()``, as a sampler; or several; or a dict. Each rank's own is saved.
        extra: Whatever else, of numbers, strings, tensors, lists and dicts. Rank 0's is saved.
            A numpy scalar comes back as a Python number, and a timedelta as seconds. A path, date,
            time or datetime comes back as text (ISO 8601), an Enum's member as its value, and a
            namedtuple as a tuple.
        frozen: Save parameters that require no gradient, too. False leaves them out, as for
            adapters of peft's; `load_checkpoint` then leaves them as they are.
        keep: How many steps to keep, the newest, and those of an abandoned branch last; None: all.
            The older ones go once the new one is complete.
        asynchronous: Copy what this rank writes to the host, return, and write in the background.
            One at a time: the next save waits for it, and so do `load_checkpoint`, `cleanup` and
            the end of the process. Its error comes up there, or in `Saving.wait`; at the end of
            the process, it makes the exit status 1.

    Returns:
        A handle: ``.wait()`` returns the folder once it is complete.

    Raises:
        CheckpointError: On all ranks, with the rank, host and file. The disk is full, the folder
            cannot be written, something cannot be saved, or ranks differ. Or another job, which
            may still run, saves there, and this one has not loaded from there. Or the
            asynchronous save before failed. No partial checkpoint is left.
        HangError: A rank does not come, or writes for longer than the timeout of `setup_torch`.
        LostRankError: A rank has ended.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
    """
    ranks = find_ranks(current_world("save_checkpoint()"))
    finish_saving()
    optimizers = _contents.list_optimizers(optimizer)
    args = CheckpointArgs(model, optimizers, scheduler, data, extra, frozen)
    with ranks.waiting(f"save_checkpoint(step={step})"), gc_paused():
        save = Save(ranks, path, step, keep, args)
        save.plan()
        saving = Saving(step, str(save.folder))
        if asynchronous:
            save.copy_to_host()
            saving.start(lambda: save.write("in the background"))
        else:
            saving.run(lambda: save.write("at once"))
            saving.wait()
    return saving


class Summary(NamedTuple):
    """What a rank sends to rank 0."""

    arguments: str
    place: tuple[int, int]  # pipeline stage, tensor-parallel index
    packed: bytes  # what it holds
    replica_digest: bytes  # of its buffers, extra state and values of the optimizer


class StartedSave(NamedTuple):
    """What rank 0 decided before the first byte is written."""

    plan: Plan
    name: files.Name
    working: Path  # the folder that is renamed once it is whole
    sequence: int
    unlike_stages: set[int]  # of the pipeline, with different digests among their ranks


class Save:
    """One checkpoint on its way. Its public methods are collectives, in this order."""

    def __init__(
        self,
        ranks: Ranks,
        path: str | os.PathLike[str],
        step: int,
        keep: int | None,
        args: CheckpointArgs,
    ) -> None:
        self._ranks = ranks
        self._path = path
        self._step = step
        self._keep = keep
        self._args = args
        self._started = time.monotonic()
        self._layout = _pieces.find_layout(ranks.rank, ranks.size)
        self._what = f"step {step!r} cannot be saved to {os.fspath(path)}"

    # Planning.

    def plan(self) -> None:
        """Assign a writer to each piece, on rank 0, and make the folder."""
        ranks = self._ranks
        self._started_save: StartedSave = ranks.run_on_all(
            self._what, self._collect, self._plan_and_begin
        )
        if self._started_save.plan.shared:
            with self._discard_on_failure():
                ranks.run_on_all(self._what, self._compute_checksums, self._compare_copies)
        self._to_write = self._started_save.plan.find_own(ranks.rank, self._packed, self._items)
        if self._layout.index["pipeline"] in self._started_save.unlike_stages:
            replica = wrap_bytes(as_tensor(self._replica))
            self._own[_contents.replica_key(ranks.rank)] = replica
        self._to_write += list_items(self._own)

    def _collect(self) -> Summary:
        arguments = self._check_arguments()
        layout = self._layout
        self._held, self._own, self._replica = collect(self._ranks, layout, self._args)
        self._items = list_items(self._held)
        self._packed = pack_items(self._items)
        return Summary(
            arguments=arguments,
            place=(layout.index["pipeline"], layout.index["tensor"]),
            packed=self._packed,
            replica_digest=hashlib.sha256(self._replica).digest(),
        )

    def _check_arguments(self) -> str:
        step = self._step
        if type(step) is not int or not 0 <= step <= files.MAX_STEP:
            raise CheckpointError(f"step={step!r}; expected an int from 0 to {files.MAX_STEP}")
        if self._keep is not None and self._keep < 1:
            raise CheckpointError(f"keep={self._keep}; expected at least 1, or None to keep all")
        self._root = files.find_root(self._path)
        return f"{self._root}, step={step}, keep={self._keep}, {', '.join(self._args.contents)}"

    def _plan_and_begin(self, summaries: list[Summary]) -> StartedSave:
        arguments, places, packed, digests = zip(*summaries, strict=True)
        self._ranks.check_equal(arguments)
        self._stages = [stage for stage, _ in places]
        # What rank 0 has to do grows with the pieces of the model, not with its replicas.
        holdings = []
        for each, ranks in grouped(zip(packed, range(len(packed)), strict=True)).items():
            places_of_ranks = frozenset(map(places.__getitem__, ranks))
            holdings.append(Holding(each, unpack_items(each), ranks, places_of_ranks))
        plan = plan_writers(holdings)
        unlike_stages = set()
        for stage, digests_of_stage in grouped(zip(self._stages, digests, strict=True)).items():
            if len(set(digests_of_stage)) > 1:
                unlike_stages.add(stage)
        return self._begin(plan, unlike_stages)

    def _begin(self, plan: Plan, unlike_stages: set[int]) -> StartedSave:
        root = self._root
        files.make_folders(root)
        owner.claim(root)
        manifests, _ = listing.read_manifests(root)
        newest = next((name.step for name in manifests), -1)
        if newest > self._step:
            logger.warning(
                "step %d is saved below step %d, the last saved in %s: from now on it is the "
                "newest, which is loaded, and those above it count as abandoned, which keep= "
                "removes first",
                self._step,
                newest,
                root,
            )
        leftovers = files.remove_leftovers(root)
        if leftovers:
            logger.info("removed what unfinished saves left in %s: %s", root, ", ".join(leftovers))
        sequence = max((manifest.sequence for manifest in manifests.values()), default=0) + 1
        name = files.find_new_name(root, self._step)
        working = files.name_temporary(root / str(name))
        working.mkdir()
        return StartedSave(plan, name, working, sequence, unlike_stages)

    def _compute_checksums(self) -> list[int | None]:
        # Not of buffers: each rank gets its own back.
        names = _pieces.find_buffer_names(self._args.model)
        held = {key: pieces for key, pieces in self._held.items() if key[1] not in names}
        return compute_checksums(held, self._started_save.plan.shared)

    def _compare_copies(self, checksums: list[list[int | None]]) -> None:
        different = compare_copies(self._started_save.plan.shared, checksums, self._stages)
        for key, ranks in different.items():
            if key not in _warned:
                # No error: kernels that are tuned, or add in no fixed order, give other last bits.
                logger.warning(
                    "the values of %s differ between ranks %s, which are taken for copies: one "
                    "rank's are saved for all; expected equal ones; how a parameter is split, say "
                    "by ezpz_tp.set_shard",
                    describe_key(key),
                    fold(ranks),
                )
            _warned.add(key)

    @property
    def folder(self) -> Path:
        """Where the checkpoint will be."""
        return self._root / str(self._started_save.name)

    # Writing.

    def copy_to_host(self) -> None:
        """Copy what this rank writes: the training changes it."""
        with self._discard_on_failure():
            self._ranks.run_on_all(
                f"step {self._step} cannot be copied to the host", self._copy_to_host
            )

    def _copy_to_host(self) -> None:
        wanted = {item.id for item in self._to_write}
        copies: dict[Key, Pieces] = {}
        for key, pieces in self._held.items():
            copied = []
            for piece, tensor in pieces.held:
                if (key, piece.offsets) in wanted:
                    copied.append((piece, tensor.to("cpu", copy=True)))
            copies[key] = Pieces(pieces.shape, pieces.dtype, tuple(copied))
        self._held = copies

    def write(self, how: str) -> None:
        """Write the checkpoint and publish it. ``how`` is for the log."""
        ranks = self._ranks
        with ranks.waiting(f"save_checkpoint(step={self._step})"), self._discard_on_failure():
            size = ranks.run_on_all(self._what, self._write, self._complete)
        if ranks.rank == 0:
            seconds = time.monotonic() - self._started
            megabytes = size / 1e6
            logger.info(
                "step %d saved %s to %s: %.1f MB from %d ranks in %.2f s, %.0f MB/s",
                self._step,
                how,
                self.folder,
                megabytes,
                ranks.size,
                seconds,
                megabytes / max(seconds, 1e-9),
            )
            report_progress(self._step)

    def _write(self) -> WrittenItems:
        name = f"{self._ranks.rank:05d}.bin"
        tensors = {}
        for key, pieces in {**self._held, **self._own}.items():
            for piece, tensor in pieces.held:
                tensors[key, piece.offsets] = tensor
        with DataWriter(self._started_save.working / name) as writer:
            places = [writer.write(tensors[item.id]) for item in self._to_write]
            return WrittenItems(name, writer.finish(), self._to_write, places)

    def _complete(self, gathered: list[WrittenItems]) -> int:
        self._wait_until_visible(gathered)
        working = self._started_save.working
        index: Index = {}
        written = {}
        for each in gathered:
            written[each.name] = each.file
            for item, at in zip(each.items, each.places, strict=True):
                saved = index.setdefault(item.key, Saved(item.dtype, item.shape))
                saved.chunks.append(Chunk(item.piece, each.name, at))
        written[INDEX] = write_checksummed(working / INDEX, encode_index(index))
        manifest = Manifest(
            step=self._step,
            sequence=self._started_save.sequence,
            world_size=self._ranks.size,
            contents=(*self._args.contents, "rng"),
            time=time.time(),
            torch=torch.__version__,
            files=written,
        )
        owner.check_owner(self._root)  # another job may have begun as this one did
        write_checksummed(working / MANIFEST, encode_manifest(manifest))
        # One after the other is written, and then both are flushed: that takes half the time.
        files.flush(working / INDEX)
        files.flush(working / MANIFEST)
        self._publish()
        # It is saved: errors below must neither be raised nor discard it.
        try:
            listing.remove_superseded(self._root, self._started_save.name, self._keep)
        except OSError as error:
            logger.warning("step %d is saved, but older ones stay: %s", self._step, error)
        return manifest.size

    def _publish(self) -> None:
        try:
            files.publish(self._started_save.working, self.folder)
        except OSError as error:
            # rename() replaces an empty folder of that name, and fails for any other.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise CheckpointError(
                f"{self.folder.name} has appeared in {self._root} meanwhile; expected one job at a "
                "time to save there: give each its own folder"
            ) from error

    def _wait_until_visible(self, gathered: Sequence[WrittenItems]) -> None:
        """Make sure that rank 0 sees every rank's file: it does not in a host's own folder."""
        deadline = time.monotonic() + _VISIBLE_WITHIN
        for rank, each in enumerate(gathered):
            size = files.find_size(self._started_save.working / each.name)
            while size != each.file.size:
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"rank 0 on {self._ranks.hosts[0]} sees {size} bytes of {each.name}, rank "
                        f"{rank} on {self._ranks.hosts[rank]} wrote {each.file.size}; expected a "
                        "folder that all hosts share"
                    )
                time.sleep(0.05)
                size = files.find_size(self._started_save.working / each.name)

    @contextmanager
    def _discard_on_failure(self) -> Iterator[None]:
        """Remove what was written, if the checkpoint fails."""
        try:
            yield
        except CheckpointError:
            if self._ranks.rank == 0:
                with suppress(OSError):  # a later save removes it
                    files.discard(self._started_save.working)
            raise


_warned: set[Key] = set()  # tensors whose copies differ, logged once


class WrittenItems(NamedTuple):
    """What a rank has written."""

    name: str
    file: Written
    items: Sequence[Item]
    places: Sequence[int]  # in the file


def collect(ranks: Ranks, layout: Layout, args: CheckpointArgs) -> tuple[Held, Held, bytes]:
    """Return what this rank holds. Its tensors are those in use.

    Returns:
        Tensors that other ranks may hold, too; this rank's records; its buffers, extra state and
        optimizer values, encoded, which may differ between ranks.
    """
    model = args.model
    _pieces.refuse_deepspeed(model)
    splits = _pieces.Splits(model, layout)
    optimizers: State = {}
    options: Options = []
    if args.optimizers:
        optimizers, options = collect_optimizers(model, args.optimizers)
    local_state = pop_local_state(optimizers, splits)
    counters = pop_counters(optimizers, splits)
    state = _pieces.model_state(model)
    replica: dict[str, Any] = {"model": _pieces.replica_state(model, state), "optimizer": None}
    left_out: set[str] = set()
    if layout.is_replica:
        # Each replica has its own buffers, as of batch norm: the first one's are saved.
        left_out |= _pieces.find_buffer_names(model)
    if not args.frozen:
        left_out |= _pieces.find_frozen_names(model)
    state = {name: value for name, value in state.items() if name not in left_out}
    cut = _contents.cut_state(splits, state, optimizers)
    shared = dict(cut.tensors)
    for name, entries in counters.items():
        cut.optimizer_values.setdefault(name, {}).update(entries)
    is_shared_out = has_zero1(args.optimizers)
    if not is_shared_out:
        replica["optimizer"] = cut.optimizer_values
    if is_shared_out or layout.is_first_of_stage:
        for name, values in cut.optimizer_values.items():
            what = f"the optimizer's state of {name!r}"
            shared[_contents.values_key(name)] = encode_pieces(what, values)
    own: Held = {}
    own[_contents.rank_key(ranks.rank)] = encode_pieces(
        "", collect_rank_state(ranks, args, local_state)
    )
    if layout.is_first_of_stage:
        stage = {
            "model": cut.model_values,
            "options": options,
            "local_state": sorted(local_state),
            "counters": sorted(counters),
        }
        own[_contents.stage_key(layout.index["pipeline"])] = encode_pieces("", stage)
    if ranks.rank == 0:
        common = {
            "scheduler": _contents.collect_states(args.scheduler),
            "extra": dict(args.extra or {}),
            "degrees": layout.degrees,
        }
        own[_contents.COMMON] = encode_pieces("", common)
    return shared, own, encode("", replica)


def collect_rank_state(
    ranks: Ranks, args: CheckpointArgs, local_state: LocalState
) -> dict[str, Any]:
    """Return a rank's random streams, position in the data, and parts of optimizer state."""
    rng = random_state.get_rng_state(random_state.find_device(args.model, ranks.world))
    data = _contents.collect_states(args.data)
    return {"rng": rng, "data": data, "optimizer": local_state}


@contextmanager
def gc_paused() -> Iterator[None]:
    """Put garbage collection off: with 40,000 tensors to list it took half the time."""
    # In the main thread only: another would undo what the training does to it meanwhile.
    is_paused = gc.isenabled() and threading.current_thread() is threading.main_thread()
    if is_paused:
        gc.disable()
    try:
        yield
    finally:
        if is_paused:
            gc.enable()


def report_progress(step: int) -> None:
    """Report the step to ezpz-launch, which restarts a failed job while it makes progress."""
    variable = os.environ.get("EZPZ_PROGRESS_FILE")
    if not variable:
        return
    path = Path(variable)
    before = -1
    try:
        with suppress(FileNotFoundError, ValueError):
            before = int(path.read_text(encoding="ascii"))
        if step > before:
            files.write_file(path, f"{step}\n".encode())
    except OSError as error:
        logger.warning("step %d is saved, but not reported in %s: %s", step, path, error)
