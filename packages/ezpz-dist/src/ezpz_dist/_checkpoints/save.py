"""Save a training state: by all ranks, at one step, or not at all."""

from __future__ import annotations

import atexit
import hashlib
import heapq
import logging
import math
import multiprocessing.util
import os
import pickle
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ezpz_dist._errors import CheckpointError, fold, grouped
from ezpz_dist._objects import is_plain, raw_of
from ezpz_dist._world import current_world, finish_before_leaving
from ezpz_tp import Piece

from . import index, pieces
from . import store as _store
from .index import Extent, Files, Manifest, Written, begin, encode_manifest, superseded
from .pieces import Held, Layout, Pieces, current_layout, rank_key, replica_key, rng_state
from .store import CheckpointArgs, Name, Ranks, SaveArgs, Store

# Who writes what: the ranks compare what they hold, and each piece gets one that writes it.


class Item(NamedTuple):
    key: str
    piece: Piece  # that is to be written
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole

    @property
    def id(self) -> PieceId:
        return self.key, self.piece.offsets

    @property
    def nbytes(self) -> int:
        return math.prod(self.piece.sizes) * self.dtype.itemsize


PieceId = tuple[str, tuple[int, ...]]  # the key, and where it begins in the whole


def items_of(held: Mapping[str, Pieces]) -> list[Item]:
    return [
        Item(key, piece, pieces.dtype, pieces.shape)
        for key, pieces in held.items()
        for piece, _ in pieces.held
    ]


def agree(
    ranks: Ranks, what: str, held: Mapping[str, Pieces], copies: Copies, layout: Layout
) -> tuple[list[Tensor], list[list[Item]]]:
    """Plan together; return what this rank writes and, on rank 0, what each does. Collective."""
    stage = layout.index["pipeline"]
    # Of those that hold the same pieces, one rank sends their list: what rank 0 has to do grows
    # with the pieces of the model, not with its replicas.
    own = rank_key(ranks.rank)
    replica = replica_key(ranks.rank)
    items = items_of({key: pieces for key, pieces in held.items() if key not in (own, replica)})
    packed = pickle.dumps((items, stage))
    digest = hashlib.sha256(packed).digest()
    place = tuple(layout.index[axis] for axis in pieces.AXES if axis != "tensor")
    peers = (*place, hashlib.sha256(repr([key for key, _ in copies]).encode()).digest())

    def mine() -> RankSummary:
        sums = [zlib.crc32(raw_of(tensor)) for _, tensor in copies]
        values = held.get(replica)
        replica_items: list[Item] = []
        replica_digest = b""
        if values is not None:
            replica_items = items_of({replica: values})
            replica_digest = hashlib.sha256(raw_of(values.held[0][1])).digest()
        own_items = items_of({own: held[own]})
        return RankSummary(digest, own_items, peers, sums, stage, replica_items, replica_digest)

    gathered = ranks.everywhere(what, mine)
    like = grouped((each.digest, rank) for rank, each in enumerate(gathered))
    first = {members[0] for members in like.values()}
    is_first = ranks.deal([rank in first for rank in range(ranks.size)])
    sent = ranks.gather(packed if is_first else None)
    dealt: list[list[Item]] = []

    def plan() -> list[tuple[list[PieceId], list[PieceId], Unlike | None]]:
        nonlocal dealt
        lists: list[tuple[list[Item], int, list[int]]] = []
        for members in like.values():
            # From ranks of this very job; rank 0 has its own.
            theirs = pickle.loads(sent[members[0]]) if members[0] else (items, stage)  # noqa: S301
            lists.append((*theirs, members))
        tied = _check(lists)
        dealt = _deal(lists, _own_items(gathered))
        _check_whole(dealt)
        unlike = _unlike([each.peers for each in gathered], [each.sums for each in gathered])
        return [([item.id for item in each], tied, unlike) for each in dealt]

    chosen, tied, unlike = ranks.first_for_each(what, plan)
    if tied:
        _check_ties(ranks, what, held, tied)
    if unlike:
        _warn_of(ranks, what, copies, unlike)
    return [held[key].at(offsets) for key, offsets in chosen], dealt


class RankSummary(NamedTuple):
    digest: bytes  # of the items that it shares with its replicas
    own_items: list[Item]
    peers: object  # equal on ranks that should have equal copies
    sums: list[int]  # of these copies
    stage: int
    replica_items: list[Item]  # buffers and extra state
    replica_digest: bytes


def _own_items(gathered: Sequence[RankSummary]) -> list[list[Item]]:
    """Return what each rank writes of its own.

    Its buffers and extra state are among that if not all ranks of its stage have the same.
    """
    digests: dict[int, set[bytes]] = {}
    for each in gathered:
        digests.setdefault(each.stage, set()).add(each.replica_digest)
    own_items = []
    for each in gathered:
        if len(digests[each.stage]) > 1:
            own_items.append(each.own_items + each.replica_items)
        else:
            own_items.append(each.own_items)
    return own_items


Lists = Sequence[tuple[Sequence[Item], int, Sequence[int]]]  # pieces, their stage, who holds them


def _deal(lists: Lists, own: Sequence[Sequence[Item]]) -> list[list[Item]]:
    """Have each piece written by the one of its holders that has the least to write."""
    numbered = enumerate(items for items, _, _ in lists)
    holders = grouped((item.id, number) for number, items in numbered for item in items)
    dealt = [list(each) for each in own]
    loads = [0] * len(own)
    queues: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for items, _, _ in lists:
        for item in items:
            if numbers := tuple(holders.pop(item.id, ())):
                if numbers not in queues:
                    queues[numbers] = sorted((0, rank) for n in numbers for rank in lists[n][2])
                queue = queues[numbers]
                while queue[0][0] != loads[queue[0][1]]:  # of another queue it got more since
                    heapq.heapreplace(queue, (loads[queue[0][1]], queue[0][1]))
                rank = queue[0][1]
                loads[rank] += item.nbytes or 1
                dealt[rank].append(item)
    return dealt


def _check(lists: Lists) -> list[PieceId]:
    """Compare what ranks hold under one name; return what several pipeline stages have."""
    known: dict[str, tuple[Item, int]] = {}
    stage_of: dict[Any, int] = {}
    tied: dict[PieceId, None] = {}
    for items, stage, (rank, *_) in lists:
        for item in items:
            said, first = known.setdefault(item.key, (item, rank))
            if (said.shape, said.dtype) != (item.shape, item.dtype):
                raise CheckpointError(
                    f"{item.key} is {_shape(item)} on rank {rank} and {_shape(said)} on rank "
                    f"{first}; expected one tensor under one name, or equal copies of it; pipeline "
                    "stages use the names of the whole model"
                )
            if stage_of.setdefault(item.id, stage) != stage:
                tied[item.id] = None
    return list(tied)


def _shape(item: Item) -> str:
    return f"{item.dtype} {list(item.shape)}".removeprefix("torch.")


def _check_whole(dealt: Sequence[Sequence[Item]]) -> None:
    """Make sure that the pieces of each tensor are all of it, and nothing is there twice."""
    by_key = grouped((item.key, item) for items in dealt for item in items)
    for key, items in by_key.items():
        alone = len(items) == 1 and items[0].piece.sizes == items[0].shape
        if not alone and not _is_whole(items[0].shape, [item.piece for item in items]):
            pieces = ", ".join(f"{item.piece.sizes} at {item.piece.offsets}" for item in items[:4])
            raise CheckpointError(
                f"the ranks hold {len(items)} pieces of {key} ({pieces}), which are not "
                f"{_shape(items[0])} without gap and overlap; expected shards of one tensor"
            )


def _is_whole(shape: tuple[int, ...], pieces: Sequence[Piece]) -> bool:
    whole, near = Piece((0,) * len(shape), shape), list[Piece]()
    boxes = [piece for piece in pieces if all(piece.sizes)]
    if sum(math.prod(box.sizes) for box in boxes) != math.prod(shape):
        return False
    # Along the dim of which there are most, only neighbours have to be compared.
    dim = max(range(len(shape)), key=lambda each: len({box.offsets[each] for box in boxes}))
    for box in sorted(boxes, key=lambda each: each.offsets[dim]):
        near = [one for one in near if one.offsets[dim] + one.sizes[dim] > box.offsets[dim]]
        if box.overlap(whole) != box or any(box.overlap(one) for one in near):
            return False
        near.append(box)
    return True


def _check_ties(
    ranks: Ranks, what: str, held: Mapping[str, Pieces], tied: Sequence[PieceId]
) -> None:
    gathered = ranks.everywhere(
        what, lambda: [_sum(held.get(key), offsets) for key, offsets in tied]
    )

    def compare() -> None:
        for number, (key, _) in enumerate(tied):
            found = {one[number] for one in gathered} - {None}
            if len(found) > 1:
                raise CheckpointError(
                    f"pipeline stages hold different values under {key}; expected a tied "
                    "parameter, equal on both, or the names of the whole model: number the layers "
                    "of a stage as they are in the model"
                )

    ranks.first(what, compare)


def _sum(pieces: Pieces | None, offsets: tuple[int, ...]) -> int | None:
    if pieces is None or all(piece.offsets != offsets for piece, _ in pieces.held):
        return None
    return zlib.crc32(raw_of(pieces.at(offsets)))


Copies = Sequence[tuple[str, Tensor]]  # taken for equal on the ranks of a tensor-parallel group


Unlike = tuple[list[int], int, int]
"""Whose copies are not equal, the first of these copies, and how many there are."""


def _unlike(peers: Sequence[object], sums: Sequence[Sequence[int]]) -> Unlike | None:
    for members in grouped((key, rank) for rank, key in enumerate(peers)).values():
        of_each = zip(*(sums[rank] for rank in members), strict=True)
        if found := [place for place, each in enumerate(of_each) if len(set(each)) > 1]:
            return members, found[0], len(found)
    return None


_warned: set[str] = set()  # of which copies it was said


def _warn_of(ranks: Ranks, what: str, copies: Copies, unlike: Unlike) -> None:
    # No error: kernels that are tuned, or add in no fixed order, give each rank other last bits.
    members, place, number = unlike

    def mine() -> tuple[str, Tensor] | None:
        return (copies[place][0], copies[place][1].cpu()) if ranks.rank in members else None

    gathered = ranks.everywhere(what, mine)

    def warn() -> None:
        (key, first), *others = (one for one in gathered if one)
        if key in _warned:
            return
        _warned.add(key)
        logger.warning(
            "ranks %s share a tensor-parallel group, and their values of %s%s differ, the first by "
            "up to %.3g: one rank's are saved for all; expected equal ones; how a parameter is "
            "split, say by ezpz_tp.set_shard",
            fold(members), key, f" and {number - 1} more" * (number > 1),
            max(_gap(first, other) for _, other in others),
        )  # fmt: skip

    ranks.first(what, warn)


def _gap(one: Tensor, other: Tensor) -> float:
    kind = torch.complex128 if one.is_complex() else torch.float64
    return float((one.to(kind) - other.to(kind)).abs().max())


# A checkpoint on its way: planned together, copied, written by each rank, completed by rank 0.

logger = logging.getLogger(__name__)

_SEEN_WITHIN = 10.0
"""Seconds in which rank 0 must see what others wrote; network file systems remember misses."""


def _name(rank: int) -> str:
    return f"__{rank}_0.distcp"  # as torch's own tools name it


@dataclass(slots=True)
class Draft:
    ranks: Ranks
    store: Store
    args: SaveArgs
    name: Name
    working: str
    sequence: int
    tensors: list[Tensor]
    dealt: list[list[Item]]
    started: float = field(default_factory=time.monotonic)

    def copy(self) -> None:  # the training changes them
        self.tensors = [tensor.to("cpu", copy=True) for tensor in self.tensors]


def _write(draft: Draft, how: str) -> None:
    """Write the checkpoint and make it exist. Collective: every rank calls this."""
    ranks, store, step = draft.ranks, draft.store, draft.args.step
    what = f"step {step} cannot be saved to {store.root}"
    files = Files(store, draft.working)

    def write_mine() -> tuple[list[Extent], dict[str, Written]]:
        with files.open(_name(ranks.rank)) as stream:
            extents = index.write(stream, draft.tensors)
        return extents, files.written

    with ranks.waiting(f"save_checkpoint(step={step})"):
        try:
            gathered = ranks.everywhere(what, write_mine)
            size = ranks.first(what, lambda: _complete(draft, files, gathered)).size / 1e6
        except CheckpointError:
            if ranks.rank == 0:
                with suppress(OSError):  # a later save's turn
                    store.discard(draft.working)
            raise
    if ranks.rank == 0:
        seconds = time.monotonic() - draft.started
        logger.info(
            "step %d saved %s to %s/%s: %.1f MB from %d ranks in %.2f s, %.0f MB/s", step, how,
            store.root, draft.name, size, ranks.size, seconds, size / max(seconds, 1e-9),
        )  # fmt: skip
        report_progress(step)


def _complete(
    draft: Draft, files: Files, gathered: Sequence[tuple[list[Extent], dict[str, Written]]]
) -> Manifest:
    store, args = draft.store, draft.args
    saved: dict[str, index.Saved] = {}
    for rank, (items, (extents, _)) in enumerate(zip(draft.dealt, gathered, strict=True)):
        for item, extent in zip(items, extents, strict=True):
            if item.key not in saved:
                saved[item.key] = index.Saved(torch.Size(item.shape), item.dtype)
            saved[item.key].chunks.append(index.Chunk(item.piece, _name(rank), extent))
    files.write(".metadata", index.metadata_of(saved))
    files.write(_store.INDEX, index.encode_index(saved))
    written = {name: one for _, each in gathered for name, one in each.items()} | files.written
    _see(store, draft.working, draft.ranks, [each for _, each in gathered])
    manifest = Manifest(
        args.step, draft.ranks.size, args.contents, time.time(), torch.__version__, written,
        draft.sequence,
    )  # fmt: skip
    _store.refuse_other(store)  # one that began as this did
    files.write(_store.MANIFEST, encode_manifest(manifest))
    store.publish(draft.working, draft.name)
    # It is saved; what comes after must not tell the script that it is not, nor have it discarded.
    with _warning(args.step, f"{_store.LATEST} is not written"):
        store.put(_store.LATEST, f"{draft.name}\n".encode())
    with _warning(args.step, f"{_store.OWNER} is not written"):
        _store.claim(store, args.step, draft.sequence)
    with _warning(args.step, "older ones are not removed"):
        for name in superseded(store, draft.name, args.keep):
            with _warning(args.step, f"{name} is not removed"):
                store.remove(name)
    return manifest


@contextmanager
def _warning(step: int, otherwise: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.warning("step %d is saved, but %s: %s", step, otherwise, error)


def _see(store: Store, folder: str, ranks: Ranks, by_rank: Sequence[Mapping[str, Written]]) -> None:
    """Make sure that rank 0 sees every rank's files: folders of one host are a common mistake."""
    until = time.monotonic() + _SEEN_WITHIN
    for rank, files in enumerate(by_rank):
        for name, written in files.items():
            while (size := store.size(f"{folder}/{name}")) != written.size:
                if time.monotonic() > until:
                    raise CheckpointError(
                        f"rank 0 on {ranks.hosts[0]} sees {size} bytes of {name}, rank {rank} on "
                        f"{ranks.hosts[rank]} wrote {written.size}; expected a folder that all "
                        "hosts share"
                    )
                time.sleep(0.05)


# A save that goes on while the training does, and the one place where its error comes up.


class Saving:
    """A checkpoint that is being written, or is written.

    Attributes:
        step: The step.
        folder: Where it is, or will be.
    """

    def __init__(self, step: int, folder: str) -> None:
        self.step: int = step
        self.folder: str = folder
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._raised = False

    def __repr__(self) -> str:
        state = "done" if self.done else "being written"
        return f"<Saving step {self.step} to {self.folder}, {state}>"

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> str:
        """Wait until the checkpoint is complete; return its folder.

        Not a collective: each rank's own part has ended when all of them have written.

        Args:
            timeout: Seconds; None: until it ends, which the timeout of `setup_torch` bounds.

        Raises:
            CheckpointError: It could not be written; or is not complete after ``timeout``.
        """
        if not self._done.wait(timeout):
            raise CheckpointError(
                f"step {self.step} is not saved after {timeout:g} s; expected {self.folder}; wait "
                "longer, or look at the file system"
            )
        self._raised = True
        if self._error is not None:
            raise self._error
        return self.folder

    def run(self, work: Callable[[], object]) -> None:
        """Do the work; keep its error for those who wait."""
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it ends a thread; those who wait raise it
            self._error = error
        finally:
            self._done.set()

    def start(self, work: Callable[[], object]) -> None:
        """Do the work in a thread of its own; `finish_saving` waits for it, also at exit."""
        global _current, _function
        # A daemon: the interpreter would wait for another without bound, and before our atexit.
        thread = threading.Thread(target=self.run, args=(work,), name="ezpz-save", daemon=True)
        _current = self
        finish_before_leaving(_finish_in_time)
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)  # the last comes first: before a `cleanup` of setup_torch's
        if multiprocessing.parent_process() is not None and _function != os.getpid():
            _function = os.getpid()
            # A function's end: there Python < 3.14 calls nothing of atexit's.
            multiprocessing.util.Finalize(None, _at_exit, exitpriority=1)
            multiprocessing.util.Finalize(None, _end_function, exitpriority=-1000)
        thread.start()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, and a call has raised its error, if there was one."""
        return self.done and (self._raised or self._error is None)


_current: Saving | None = None
_function = 0  # the process of multiprocessing whose end is seen to
AT_EXIT = 600.0  # seconds that `cleanup`, or a process at its end, stays for a save that goes on


def _forget() -> None:
    global _current
    _current = None


# A child has no thread that saves: at its end it would wait for ever.
os.register_at_fork(after_in_child=_forget)


def finish_saving(timeout: float | None = None) -> None:
    """Wait for the asynchronous save that goes on, if any. `cleanup` does it too.

    Args:
        timeout: Seconds; None: see `Saving.wait`.

    Raises:
        CheckpointError: It could not be written, and no call has raised it yet.
    """
    global _current
    if _current is not None and not _current.is_over:
        _current.wait(timeout)
    _current = None


def _finish_in_time() -> None:
    finish_saving(AT_EXIT)


def _at_exit() -> None:
    try:
        _finish_in_time()
    except Exception:  # whatever ended the save, there is no caller left to raise it to
        logger.exception("the last asynchronous save failed; the exit status is 1")
        # Let go of with sys, after all other modules: their open files are written by then. Nothing
        # else holds it: from Python 3.12 on a module's own names can outlive sys.
        if _FAILURE not in vars(sys):
            vars(sys)[_FAILURE] = _Failure()


class _Failure:
    """Ends the process with 1, after all else: what atexit's functions raise Python ignores."""

    def __del__(self, end: Callable[[int], object] = os._exit) -> None:
        end(1)


_FAILURE = "ezpz_dist's failure"


def _end_function() -> None:
    if _FAILURE in vars(sys):
        raise SystemExit(1)


def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: _store.Optimizers | None = None,
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
    load it. The random streams of every rank are saved too, and so are buffers and extra state
    where ranks differ in them. Parameters that nothing says how they are split are taken for equal
    on the ranks of a tensor-parallel group; where they are not, a warning names them. A failure on
    one rank is raised on all. Collective: every rank calls this.

    A step that exists already is saved beside it and then replaced. Leftovers of dead attempts
    are removed, those of this host once their process has ended, those of others after an hour
    without a write.

    Args:
        path: A folder that all hosts share.
        model: Wrapped or not.
        optimizer: The model's, or several.
        scheduler: Has ``state_dict()``; or several.
        step: The step. What was saved last is loaded first: below a step that is there, it says
            that the run has gone back.
        data: Has ``state_dict()``, as a sampler; or several; or a dict. Each rank's own is saved.
        extra: Whatever else, of numbers, strings, tensors, lists and dicts. Rank 0's is saved.
            A numpy scalar comes back as a Python number, and a timedelta as seconds. A path, date,
            time or datetime comes back as text (ISO 8601), an Enum's member as its value, and a
            namedtuple as a tuple.
        frozen: Save parameters that require no gradient, too. False leaves them out, as for
            adapters of peft's; `load_checkpoint` then leaves them as they are.
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
        CheckpointError: On all ranks, with the rank, host and file. The disk is full, the folder
            cannot be written, something cannot be saved, or ranks differ. Or another job, which
            may still run, saves there, and this one has not loaded from there. Or the
            asynchronous save before failed. No partial checkpoint is left.
        HangError: A rank does not come, or writes for longer than the timeout of `setup_torch`.
        LostRankError: A rank has ended.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
    """
    ranks = _store.ranks_of(current_world("save_checkpoint()"))
    finish_saving()
    with ranks.waiting(f"save_checkpoint(step={step})"), _store.collecting_later():
        state = CheckpointArgs(model, _store.as_list(optimizer), scheduler, data, extra, frozen)
        args = SaveArgs(step, (*state.contents, "rng"), keep)
        layout = current_layout(ranks.rank, ranks.size)
        what = f"step {step!r} cannot be saved to {os.fspath(path)}"
        store = ranks.here(what, lambda: _opened(path, args))
        ranks.same("save_checkpoint", f"{store.root}, {args}")
        # After all have agreed to come this far: FSDP1's state takes collectives.
        held, copies = ranks.here(what, lambda: _collect(ranks, layout, state))
        what = f"step {step} cannot be saved to {store.root}"
        mine, dealt = agree(ranks, what, held, copies, layout)
        size = sum(item.nbytes + 4096 for items in dealt for item in items)  # rather too many
        begun: tuple[Name, str, int] = ranks.first(what, lambda: begin(store, args, size))
        if ranks.rank == 0:
            _store.release_at_end(store)
        draft = Draft(ranks, store, args, *begun, mine, dealt)
        saving = Saving(step, f"{store.root}/{draft.name}")
        if asynchronous:
            ranks.here(f"step {step} cannot be copied to the host", draft.copy)
            saving.start(lambda: _write(draft, "in the background"))
            return saving
        saving.run(lambda: _write(draft, "at once"))
        saving.wait()
    return saving


def _opened(path: str | os.PathLike[str], args: SaveArgs) -> Store:
    step, keep = args.step, args.keep
    if type(step) is not int or not 0 <= step <= _store.MAX_STEP:
        raise CheckpointError(f"step={step!r}; expected an int from 0 to {_store.MAX_STEP}")
    if keep is not None and keep < 1:
        raise CheckpointError(f"keep={keep}; expected at least 1, or None to keep all")
    return _store.open_store(path)


def _collect(ranks: Ranks, layout: Layout, state: CheckpointArgs) -> tuple[Held, Copies]:
    """Return what this rank holds, and which of it its tensor-parallel group should hold, too."""
    pieces.refuse_deepspeed(state.model)
    model, optimizers = state.model, state.optimizers
    states, options = pieces.state_of(model, optimizers) if optimizers else ({}, [])
    parts, at = pieces.Parts(model, layout), layout.index
    whole = pieces.model_state(model)
    replica = pieces.replica_state(model, whole)
    if at["data"] or at["context"]:
        # Each replica has its own, as of batch norm: one rank's are saved, all together.
        for name, _ in model.named_buffers(remove_duplicate=False):
            whole.pop(pieces.plain_name(model, name), None)
    if not state.frozen:
        for name in pieces.frozen_names(model):
            whole.pop(name, None)
    held, values, others = pieces.held_by(parts, whole, states)
    shared = {name: value for name, value in whole.items() if name not in replica}
    copied = (pieces.MODEL + name for name, one in shared.items() if parts.are_copies(name, one))
    copies = [(key, one) for key in copied for _, one in held[key].held if is_plain(one)]
    rng = rng_state(pieces.device_of(model, ranks.world))
    own = {"rng": rng, "data": pieces.state_dicts(state.data)}
    common = {
        "scheduler": pieces.state_dicts(state.scheduler),
        "extra": pieces.plain(dict(state.extra or {})),
        "degrees": layout.degrees,
    }
    for name, each in others.items():
        held[pieces.VALUES + name] = pieces.encoded(f"the state of {name!r}", each)
    held[rank_key(ranks.rank)] = pieces.encoded("rank", own)
    if replica:
        held[replica_key(ranks.rank)] = pieces.encoded("model", replica)
    if not any(at[axis] for axis in pieces.AXES if axis != "pipeline"):
        about = {"model": values, "options": options}
        held[pieces.stage_key(at["pipeline"])] = pieces.encoded("model", about)
    if ranks.rank == 0:
        held[pieces.COMMON] = pieces.encoded("save_checkpoint", common)
    return held, copies


def report_progress(step: int) -> None:
    """Tell ezpz-launch how far the job got: it starts a failed one again while it gets further."""
    if not (path := os.environ.get("EZPZ_PROGRESS_FILE")):
        return
    before, (folder, name) = -1, os.path.split(path)
    try:
        with suppress(FileNotFoundError, ValueError):
            before = int(Path(path).read_text(encoding="ascii"))
        if step > before:
            _store.Store(folder).put(name, f"{step}\n".encode())
    except OSError as error:
        logger.warning("step %d is saved, but not reported in %s: %s", step, path, error)
