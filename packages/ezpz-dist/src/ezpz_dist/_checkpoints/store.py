"""Where checkpoints lie: a folder, which are there, who writes now, and with whom."""

from __future__ import annotations

import atexit
import errno
import gc
import json
import logging
import math
import os
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ezpz_dist._diagnosis import describe_gone, pid_namespace, stat_of
from ezpz_dist._errors import CheckpointError, DistError
from ezpz_dist._objects import receive_object, send_object
from ezpz_dist._watch import first_line, waiting
from ezpz_dist._world import World, finish_before_leaving
from ezpz_topo import get_hostname

# What a caller gives to be saved or filled.

Optimizers = Optimizer | Sequence[Optimizer]


class CheckpointArgs(NamedTuple):
    model: nn.Module
    optimizers: Sequence[Optimizer]
    scheduler: Any
    data: Any
    extra: Mapping[str, Any] | None = None
    frozen: bool = True

    @property
    def contents(self) -> tuple[str, ...]:
        others = {"scheduler": self.scheduler, "data": self.data, "extra": self.extra}
        there = ["optimizer"] * bool(self.optimizers)
        return (
            "model" if self.frozen else "trainable",
            *there,
            *(name for name, one in others.items() if one is not None),
        )


class SaveArgs(NamedTuple):
    step: int
    contents: tuple[str, ...]
    keep: int | None


def as_list(optimizer: Optimizers | None) -> list[Optimizer]:
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())


def give_memory(model: nn.Module) -> None:
    """Give elements of buffers that share memory (`expand`) some of their own, to be filled."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.layout is torch.strided and not buffer.is_meta:
                steps = zip(buffer.shape, buffer.stride(), strict=True)
                if any(size > 1 and not step for size, step in steps):
                    setattr(module, name, buffer.clone(memory_format=torch.contiguous_format))


# The names of checkpoints in a folder, and which of them are there.

MANIFEST = "manifest.json"
INDEX = "index.json"
LATEST = "latest"  # a text file with the newest folder's name: for people; loading lists
OWNER = "owner.json"  # who saves there
_NAME = re.compile(r"step-(\d{8,18})(?:\.(\d{1,6}))?")
_WORKING = re.compile(r"\.(?:step-\d+(?:\.\d+)?|latest|owner\.json)\.tmp-(?P<owner>.+)")
_GONE = re.compile(r"\.step-\d+(?:\.\d+)?\.gone-.+")
MAX_STEP = 10**18 - 1


@dataclass(frozen=True, slots=True, order=True)
class Name:
    """A checkpoint's folder: ``step-00000042``; ``step-00000042.1`` is a second of that step."""

    # A step that is saved again never touches the folder that is there: the second appears
    # beside it, whole, and only then the first goes.

    step: int
    generation: int = 0

    def __str__(self) -> str:
        return f"step-{self.step:08d}" + (f".{self.generation}" if self.generation else "")


def parse(name: str) -> Name | None:
    found = _NAME.fullmatch(name)
    return Name(int(found[1]), int(found[2] or 0)) if found else None


def names_in(entries: list[str]) -> list[Name]:
    """Return the checkpoints among a folder's entries, the highest step first."""
    return sorted((name for each in entries if (name := parse(each))), reverse=True)


# Who writes a checkpoint now, in a name that tells later whether the writer still lives.

logger = logging.getLogger(__name__)

_TOKEN = re.compile(r"(?P<host>.+)~(?P<space>\d+)~(?P<pid>\d+)~(?P<start>\d+)~[0-9a-f]{8}")


def owner_token() -> str:
    """Return a name for an attempt of this process: host, pid namespace, pid, start, a nonce."""
    space, start = _birth(os.getpid())
    return f"{get_hostname()}~{space}~{os.getpid()}~{start}~{uuid.uuid4().hex[:8]}"


def is_dead(token: str) -> bool | None:
    """Return whether the process that made a token has ended; None where that cannot be told."""
    # It can on its own host, within one pid namespace.
    found = _TOKEN.fullmatch(token)
    if found is None or found["host"] != get_hostname():
        return None
    space, start = _birth(int(found["pid"]))
    return start != int(found["start"]) if space == int(found["space"]) != 0 else None


def _birth(pid: int) -> tuple[int, int]:
    """Return our pid namespace and the process's start in clock ticks; (space, 0): none such."""
    try:
        fields = stat_of(pid)
    except OSError:
        return pid_namespace(), 0
    return pid_namespace(), 0 if fields[0] in ("Z", "X") else int(fields[19])


_RUN = ("SLURM_JOB_ID", "PBS_JOBID", "EZPZ_LAUNCH_ID", "TORCHELASTIC_RUN_ID")


class Owner(NamedTuple):
    """Who saves in a folder: the process of rank 0 of the run that saved there last."""

    token: str
    run: str
    step: int
    sequence: int

    @property
    def process(self) -> str:
        return self.token.rpartition("~")[0]

    @property
    def is_me(self) -> bool:
        return self.process == owner_token().rpartition("~")[0]


_followed: set[str] = set()
"""Processes whose checkpoints this one went to load: it may take their place."""

_owned: dict[str, Store] = {}


def read_owner(store: Store) -> Owner | None:
    """Return who saves there; None: no process, as far as can be read."""
    with suppress(OSError, ArithmeticError, LookupError, TypeError, ValueError):
        if store.size(OWNER) is None:
            return None
        with store.open(OWNER, "rb") as file:
            read = json.loads(file.read())
        return Owner(str(read["owner"]), str(read["run"]), int(read["step"]), int(read["sequence"]))
    return None


def follow(store: Store) -> None:
    """Note that this process loads from there, and may save there next."""
    if (owner := read_owner(store)) is not None:
        _followed.add(owner.process)


def refuse_other(store: Store) -> Owner | None:
    """Return who saved there last; None: no process, as far as is known."""
    owner = read_owner(store)
    if owner is None or owner.is_me or owner.process in _followed:
        return owner
    if dead := is_dead(owner.token):
        return owner
    host, _, pid, _ = (owner.process.rsplit("~", 3) + ["?"] * 3)[:4]
    run = f"{owner.run}, " if owner.run else ""
    raise CheckpointError(
        f"another job saves in {store.root}: {run}process {pid} on {host}, which "
        f"{'runs' if dead is False else 'may run'} and saved step {owner.step}; expected one job "
        "at a time: give each its own folder; to take its place, load_checkpoint() from there "
        f"first; if it has ended, remove {store.root}/{OWNER}"
    )


def claim(store: Store, step: int, sequence: int) -> None:
    run = " ".join(f"{name}={os.environ[name]}" for name in _RUN if os.environ.get(name))
    about = {"owner": owner_token(), "run": run, "step": step, "sequence": sequence}
    store.put(OWNER, json.dumps(about).encode())


def release_at_end(store: Store) -> None:
    """Have the claim of this process taken back when it cleans up or ends."""
    if not _owned:
        atexit.register(_release)
    _owned[store.root] = store
    finish_before_leaving(_release)


def _release() -> None:
    while _owned:
        root, store = _owned.popitem()
        try:
            if (owner := read_owner(store)) is not None and owner.is_me:
                store.discard(OWNER)
        except OSError as error:
            logger.debug("%s/%s is not removed: %s", root, OWNER, error)


# Where checkpoints lie: a folder of a file system.

_ABANDONED = 3600.0  # seconds without a write: then an attempt of another host is taken for dead


def open_store(path: str | os.PathLike[str]) -> Store:
    text = os.fspath(path)
    if "://" in text:
        raise CheckpointError(f"{text} is a URL; expected a folder of a mounted file system")
    return Store(text)


class Store:
    """A folder: a checkpoint is written under a temporary name, and renamed when whole."""

    def __init__(self, path: str) -> None:
        self.root = str(Path(path).absolute())

    def _at(self, path: str) -> Path:
        return Path(self.root, path)

    def entries(self) -> list[str]:
        """Return the names in the root; none if there is no root yet."""
        with suppress(FileNotFoundError):
            return os.listdir(self.root)
        return []

    def size(self, path: str) -> int | None:
        """Return a file's bytes; None: there is none."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return self._at(path).stat().st_size
        return None

    def open(self, path: str, mode: str) -> IO[bytes]:
        return self._at(path).open(mode)

    def begin(self, name: Name) -> str:
        root = self._at("")
        new = [path for path in (root, *root.parents) if not path.exists()]
        root.mkdir(parents=True, exist_ok=True)
        for path in new:
            _sync(path.parent)  # or all of it is gone after a power cut
        working = f".{name}.tmp-{owner_token()}"
        self._at(working).mkdir()
        return working

    def publish(self, working: str, name: Name) -> None:
        """Make the checkpoint, whose manifest is written, exist under its name."""
        _sync(self._at(working))
        # rename() replaces an empty folder of that name, and fails for any other.
        try:
            self._at(working).rename(self._at(str(name)))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise CheckpointError(
                f"{name} has appeared in {self.root} meanwhile; expected one job at a time to "
                "save there: give each its own folder"
            ) from error
        _sync(self._at(""))

    def discard(self, working: str) -> None:
        """Remove what was written into a folder that will not be published."""
        path = self._at(working)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def remove(self, name: Name) -> None:
        """Remove a checkpoint: at once it is one no longer, whatever happens."""
        gone = f".{name}.gone-{owner_token()}"
        with suppress(FileNotFoundError):  # another job was faster
            self._at(str(name)).rename(self._at(gone))
            self.discard(gone)

    def put(self, path: str, data: bytes) -> None:
        """Write a small file whole: a reader sees the old or the new one."""
        aside = self._at(f".{path}.tmp-{owner_token()}")
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self._at(path))

    def remove_leftovers(self, working: str) -> list[str]:
        """Remove what dead attempts left, never a live one's or ``working``; return the names."""
        # The file system's own clock, which other hosts' files were stamped by.
        now = self._at(working).stat().st_mtime
        removed = []
        for entry in self.entries():
            found = _WORKING.fullmatch(entry)
            left = found and entry != working and self._is_abandoned(entry, found["owner"], now)
            if left or _GONE.fullmatch(entry):
                with suppress(OSError):  # another job may be removing it too
                    self.discard(entry)
                    removed.append(entry)
        return removed

    def free(self) -> float:
        """Return the bytes that there is room for; infinity where that cannot be told."""
        with suppress(OSError):
            about = os.statvfs(self.root)
            return about.f_bavail * about.f_frsize
        return math.inf

    def _is_abandoned(self, entry: str, owner: str, now: float) -> bool:
        if (dead := is_dead(owner)) is not None:
            return dead
        path = self._at(entry)
        with suppress(FileNotFoundError):
            inside = path.iterdir() if path.is_dir() else ()
            last: float = max(each.stat().st_mtime for each in (path, *inside))
            return now - last > _ABANDONED
        return False  # renamed or removed while we look


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot sync a folder, and need not.
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


# What ranks tell each other about a checkpoint, so that one's failure is everyone's.

T = TypeVar("T")

_HOST = torch.device("cpu")
_LISTED = 8  # failures that a message lists


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that save and load together; a world of one needs no group."""

    world: World | None = None
    group: Any = None
    rank: int = 0
    size: int = 1
    hosts: tuple[str, ...] = field(default_factory=lambda: (get_hostname(),))

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value on rank 0; elsewhere nothing. Collective."""
        # Uneven: sent one by one, so that rank 0 needs no room for the longest of each.
        if self.rank:
            send_object(value, 0, _HOST, self.group)
            return []
        others = range(1, self.size)
        return [value, *(receive_object(rank, _HOST, self.group) for rank in others)]

    def tell(self, value: Any) -> Any:
        """Return rank 0's value on every rank. Collective."""
        told = [value]
        if self.size > 1:
            dist.broadcast_object_list(told, 0, self.group, _HOST)
        return told[0]

    def deal(self, values: Sequence[Any]) -> Any:
        """Return this rank's of rank 0's values, one a rank. Collective."""
        if self.rank:
            return receive_object(0, _HOST, self.group)
        for rank in range(1, self.size):
            send_object(values[rank], rank, _HOST, self.group)
        return values[0]

    def everywhere(self, what: str, work: Callable[[], T]) -> list[T]:
        """Do something on every rank; return every rank's result on rank 0. Collective."""
        mine, error = self._attempt(work)
        outcomes = self.gather(mine)
        failed = [each for each in outcomes if isinstance(each, CheckpointError)]
        self._judge(what, self.tell(failed), error)
        return cast("list[T]", outcomes)

    def here(self, what: str, work: Callable[[], T]) -> T:
        """Do something on every rank; return this rank's result. Collective."""
        held: list[T] = []
        self.everywhere(what, lambda: held.append(work()))
        return held[0]

    def first(self, what: str, work: Callable[[], T]) -> T:
        """Do something on rank 0; return its result on every rank. Collective."""
        mine, error = self._attempt(work) if self.rank == 0 else (None, None)
        found = self.tell(mine)
        self._judge(what, [found], error)
        return cast("T", found)

    def first_for_each(self, what: str, work: Callable[[], Sequence[T]]) -> T:
        """Do something on rank 0 that gives each rank something of its own. Collective."""
        mine, error = self._attempt(work) if self.rank == 0 else (None, None)
        failed = isinstance(mine, CheckpointError)
        found = self.deal([mine] * self.size if failed else cast("Sequence[T]", mine))
        self._judge(what, [found], error)
        return cast("T", found)

    def same(self, what: str, value: Any) -> None:
        """Make sure that every rank gave the same, or say both values on all. Collective."""
        every = self.gather(value)
        odd = next((rank for rank, each in enumerate(every) if each != every[0]), 0)
        if found := self.tell(odd and (odd, every[odd], every[0])):
            rank, other, first = found
            raise CheckpointError(
                f"{what}: rank {rank} on {self.hosts[rank]} has {other} and rank 0 {first}; "
                "expected the same on every rank"
            )

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Name what the main thread waits in, should a rank not come; for others say it plainly."""
        if threading.current_thread() is threading.main_thread():
            with waiting(what, self.world):
                yield
            return
        try:
            yield
        except RuntimeError as error:
            raise CheckpointError(
                f"{what} in the background: {describe_gone(_LISTED)} ({first_line(error)}); "
                "expected each rank to go on until it is complete: wait for it before cleanup()"
            ) from error

    def _attempt(self, work: Callable[[], T]) -> tuple[T | CheckpointError, Exception | None]:
        try:
            return work(), None
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait for word
            text = str(error) if isinstance(error, DistError) else _words(error)
            who = f"rank {self.rank} on {self.hosts[self.rank]}: " if self.size > 1 else ""
            return CheckpointError(who + text), error

    def _judge(self, what: str, outcomes: list[Any], cause: Exception | None) -> None:
        if failed := [str(each) for each in outcomes if isinstance(each, CheckpointError)]:
            more = [f"and {len(failed) - _LISTED} more ranks"] if len(failed) > _LISTED else []
            raise CheckpointError(f"{what}: {'; '.join([*failed[:_LISTED], *more])}") from cause


@contextmanager
def collecting_later() -> Iterator[None]:
    """Put garbage collection off: with 40,000 tensors to list it took half the time."""
    # In the main thread only: another would undo what the training does to it meanwhile.
    if later := gc.isenabled() and threading.current_thread() is threading.main_thread():
        gc.disable()
    try:
        yield
    finally:
        if later:
            gc.enable()


def _words(error: BaseException) -> str:
    """Return an error in words, with its cause: torch wraps what a file raised."""
    origin = error.__cause__ or error.__context__
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    return f"{_words(origin)} ({text})" if isinstance(origin, OSError) else text


def ranks_of(world: World | None) -> Ranks:
    """Return the ranks of a world. Collective the first time: it makes their group."""
    if world is None or world.info.world_size == 1:
        return Ranks(world)
    if "ranks" not in world.kept:
        with waiting("the group for checkpoints", world):
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=world.timeout))
        info = world.info
        world.kept["ranks"] = Ranks(world, group, info.rank, info.world_size, world.hosts)
    return cast("Ranks", world.kept["ranks"])
