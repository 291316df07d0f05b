"""A run's file: what a metric is called, how a line is written, and who writes it.

JSON has no NaN and no infinity, and its numbers of more than 64 bits are floats to most
readers. They are written as strings, which no metric is: ``"NaN"``, ``"Infinity"``,
``"-Infinity"``, and integers as their digits.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import weakref
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import orjson

from ._context import Place, is_at, open_to_append, to_json, to_text
from ._errors import HistoryError

RESERVED = frozenset({"step", "time", "replay", "event", "ezpz_obs", "crc"})
"""Names of the file's own: no metric may have one."""

FILE_NAME = "metrics.jsonl"
PLAIN = frozenset({int, float, bool})  # the types that JSON takes as they are


def flatten(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics under flat names, ``{"train": {"loss": 1}}`` as ``{"train/loss": 1}``."""
    # The values are plain numbers, or tensors that lie on a device: those are for `copy_to_host`.
    flat: dict[str, Any] = {}
    for name, value in _leaves(metrics, ""):
        if name in RESERVED:
            raise ValueError(
                f"a metric called {name!r}; expected another name: History writes one of its own"
            )
        if name in flat:
            raise ValueError(f"two metrics called {name!r}; expected each name once")
        flat[name] = (
            value if type(value) in PLAIN or is_on_device(value) else to_number(name, value)
        )
    return flat


def _leaves(metrics: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in metrics.items():
        if not isinstance(key, str):
            raise TypeError(
                f"a metric called {to_text(key, repr)}; expected its name to be a string"
            )
        if not key:
            raise ValueError(f"a metric of {prefix or 'the step'!r} has no name; expected one")
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}/")
        else:
            # A subclass of str is none to the encoder.
            yield f"{prefix}{key}", value


def to_number(name: str, value: Any) -> float | int:
    """Return one number, of anything that holds one: 0-d arrays and tensors, numpy's scalars."""
    if isinstance(value, str | bytes):
        raise TypeError(f"metric {name!r} is {to_text(value, repr):.60}; expected a number")
    if type(value) not in PLAIN:
        # numpy's float64 is a float to Python, and not to the encoder.
        item = getattr(value, "item", None)
        masked = sys.modules.get("numpy.ma")
        if masked is not None and masked.is_masked(value):
            return float("nan")  # its `item` is a number that is none
        try:
            value = item() if callable(item) else value
        except (ValueError, RuntimeError) as error:  # numpy's and torch's, of several elements
            raise TypeError(f"metric {name!r} is not one number: {error}") from error
    for kind in (bool, int, float):  # a boolean is an integer, too
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"metric {name!r} is a {type(value).__name__}; expected a number")


def is_on_device(value: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return False
    return bool(value.device.type not in ("cpu", "meta"))


def as_float(value: float) -> float:
    """Return a number as a double; an integer beyond 1.8e308 as an infinity."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


STATISTICS = ("mean", "std", "min", "max", "min_rank", "max_rank")
"""What follows a metric's name: ``loss/mean``, ..."""


def statistic_names(metrics: Iterable[str]) -> list[str]:
    return [f"{name}/{statistic}" for name in metrics for statistic in STATISTICS]


def refuse_statistics(metrics: Collection[str]) -> None:
    for name in metrics:
        of, _, statistic = name.rpartition("/")
        if statistic in STATISTICS and of in metrics:
            raise ValueError(
                f"a metric called {name!r} beside {of!r}; expected another name: cross_rank=True "
                f"writes the {statistic} of {of!r} under that one"
            )


SCHEMA = 1  # the number in each header: what a reader must know to read the file

HEADER, RECORD, EVENT = b'{"ezpz_obs":', b'{"step":', b'{"event":'  # how lines begin
_CRC = b',"crc":"'
_CRC_LENGTH = len(_CRC) + 8 + len(b'"}')
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_STRING = frozenset({str})
LONGEST_LINE = 64 << 20  # bytes: no History writes more, and it is not read into memory
_LONGEST_INTEGER = 4000  # digits; Python's own limit is 4,300


def encode_record(record: Mapping[str, Any]) -> bytes | None:
    """Return a record of plain numbers as a line, or None where it has to be looked at closely."""
    # The quick way: most records are floats that JSON has.
    try:
        line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # integers beyond 64 bits, names that are no strings
        return None
    # What JSON has no number for, or a metric whose name says so: either way looked at.
    return None if b"null" in line else line


def encode_anything(line: Mapping[str, Any]) -> bytes:
    return orjson.dumps(to_json(line, _said), option=orjson.OPT_APPEND_NEWLINE)


def _said(value: Any) -> str:
    # A configuration may hold paths, dtypes and anything else: what they say will do.
    if isinstance(value, int) and value.bit_length() > 1 + math.log2(10) * _LONGEST_INTEGER:
        raise ValueError(
            f"an integer of {value.bit_length():,} bits; "
            f"expected at most {_LONGEST_INTEGER:,} digits"
        )
    return to_text(value)


def decode(line: bytes) -> dict[str, Any]:
    """Return what a line without its newline says; numbers of records are numbers again."""
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise HistoryError(f"no JSON: {error}: {line[:60]!r}") from None
    if not isinstance(found, dict):
        raise HistoryError(f"{line[:60]!r}; expected a JSON object")
    has_crc = line.endswith(b'"}') and line[-_CRC_LENGTH : -_CRC_LENGTH + len(_CRC)] == _CRC
    if has_crc and line[-10:-2] != b"%08x" % zlib.crc32(line[:-_CRC_LENGTH]):
        raise HistoryError(f"the checksum is another: {line[:60]!r}; expected it as it was written")
    if "crc" in found:
        del found["crc"]
    # Strings are rare: looking for one in the bytes is quicker than at every value.
    if line.startswith(RECORD) and (b':"' in line or b': "' in line):
        for name, value in found.items():
            if type(value) is str:
                found[name] = _number(value)
    return found


def _number(text: str) -> float | int:
    if text in _WORDS:
        return _WORDS[text]
    try:
        return int(text)
    except ValueError:
        raise HistoryError(f"a value {text[:60]!r}; expected a number") from None


def is_quick(metrics: Mapping[str, Any]) -> bool:
    """Say whether all values are plain numbers, and all names strings and not the file's own."""
    return (
        PLAIN.issuperset(map(type, metrics.values()))
        and RESERVED.isdisjoint(metrics)
        and "" not in metrics
        and _STRING.issuperset(map(type, metrics))
    )


Copies = list[tuple[list[str], Any, Any]]  # names of metrics, their numbers on the host, an event


def copy_to_host(flat: Mapping[str, Any]) -> Copies:
    """Begin to copy a record's device tensors to the host; `put_copies` waits for them."""
    # CUDA, ROCm and XPU copy beside the queue's next kernels; MPS waits.
    by_kind: dict[tuple[Any, bool], list[str]] = {}
    for name, value in flat.items():
        if is_on_device(value):
            if value.numel() != 1:
                raise TypeError(
                    f"metric {name!r} is not one number: a tensor of shape {tuple(value.shape)}"
                )
            by_kind.setdefault((value.device, value.is_floating_point()), []).append(name)
    copies: Copies = []
    for (device, floating), names in by_kind.items():
        torch = sys.modules["torch"]
        # MPS has no doubles.
        wide = torch.float32 if device.type == "mps" else torch.float64
        kind = wide if floating else torch.int64
        values = [_whole(flat[name].detach()).reshape(()).to(kind) for name in names]
        together = torch.stack(values)
        if device.type == "mps":
            copies.append((names, together.cpu(), None))
            continue
        host = torch.empty(together.shape, dtype=together.dtype, pin_memory=True)
        host.copy_(together, non_blocking=True)
        event = torch.get_device_module(device).Event()
        event.record()
        copies.append((names, host, event))
    return copies


def _whole(value: Any) -> Any:
    """A DTensor's value, such as FSDP2's gradient norm; collective unless it is replicated."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def put_copies(copies: Copies, flat: dict[str, Any]) -> None:
    while copies:
        names, host, event = copies.pop()
        if event is not None:
            event.synchronize()
        flat.update(zip(names, host.tolist(), strict=True))


logger = logging.getLogger("ezpz_obs")
_BLOCK = 1 << 20
_LOOK = 1.0  # seconds between looks whether the file is still where it was


@dataclass(frozen=True)
class Before:
    attempts: int = 0
    last_step: int | None = None  # the highest step of all

    @property
    def next_step(self) -> int:
        return 0 if self.last_step is None else self.last_step + 1


class Writer:
    """The file of a `History`: every line one write, which training never fails for."""

    # A last line that was torn by a crash is cut off when the file is opened. What is written is in
    # the kernel: the end of the process does not lose it; the end of the host may, unless the disk
    # confirms (fdatasync, about 130 µs). Of what cannot be written one warning says so.

    def __init__(self, path: Path, *, checksum: bool, sync: bool | float) -> None:
        self.path = path
        self._checksum = checksum
        self._sync_every = (0.0 if sync is True else float(sync)) if sync is not False else None
        self._synced = self._looked = time.time()
        self._said = False
        self.lost = 0  # lines that are not in the file
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = open_to_append(path)
        self._torn = 0  # bytes of a line at the end that are still to be cut off
        try:
            _claim(self._fd, path)
            self.before = _survey(self._fd, path)
        except BaseException:  # also Ctrl-C; raised again
            os.close(self._fd)
            raise
        of_parent = weakref.WeakMethod(self._disown)
        os.register_at_fork(after_in_child=lambda: (disown := of_parent()) and disown())

    def put(self, line: Mapping[str, Any], now: float, *, look: bool = True) -> None:
        """Write a header, event or record; with ``look``, make a folder again that is gone."""
        text = encode_record(line) or encode_anything(line)
        if self._checksum:
            body = text[:-2]  # without the brace and the newline
            text = b'%b%b%08x"}\n' % (body, _CRC, zlib.crc32(body))
        try:
            self._write(text)
        except OSError as error:
            self.lost += 1
            self._fail(error)
        try:
            if look and not 0 <= now - self._looked < _LOOK:
                self._looked = now
                if not is_at(self.path, self._fd):
                    self._restore()
            if self._sync_every is not None and now - self._synced >= self._sync_every:
                getattr(os, "fdatasync", os.fsync)(self._fd)  # macOS has fsync only
                self._synced = now
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        if self.lost:
            logger.warning("%d lines are missing in %s", self.lost, self.path)
            self.lost = 0
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _disown(self) -> None:
        """Leave the file to the parent: its lock is the copy's, which may outlive a training."""
        self.lost = 0  # for the parent to say
        self.close()

    def _write(self, line: bytes) -> None:
        if self._torn:
            self._cut()
        written = os.write(self._fd, line)
        if written != len(line):
            self._torn = written
            self._cut()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def _cut(self) -> None:
        os.ftruncate(self._fd, os.fstat(self._fd).st_size - self._torn)
        self._torn = 0

    def _restore(self) -> None:
        """Make the file again where somebody removed it, with all that was in it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        made = open_to_append(self.path, exclusive=True)
        try:
            _claim(made, self.path)
            os.lseek(self._fd, 0, os.SEEK_SET)
            with open(self._fd, "rb", closefd=False) as old, open(made, "wb", closefd=False) as new:
                shutil.copyfileobj(old, new, _BLOCK)
        except BaseException:  # also Ctrl-C; raised again
            os.close(made)
            raise
        os.close(self._fd)
        self._fd = made
        logger.warning(
            "%s was removed while it was being written; it is there again, with all records",
            self.path,
        )

    def _fail(self, error: OSError) -> None:
        if not self._said:
            self._said = True
            logger.warning(
                "metrics cannot be written to %s (%s); expected room and permission there: "
                "training goes on, and so do the attempts to write",
                self.path, os.strerror(error.errno) if error.errno else error,
            )  # fmt: skip


def _claim(fd: int, path: Path) -> None:
    """Refuse a file that another History, of this process or another, is writing."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise HistoryError(
            f"{path} is being written by another History; expected one writer a file: close() the "
            "other, or give each run its own outdir (where every rank is to write: per_rank=True)"
        ) from None
    except OSError:
        return  # a file system without locks: nothing can be known


_RECORD = re.compile(rb'\{"step": ?(-?\d+), ?"time"').match  # how each record begins


def _survey(fd: int, path: Path) -> Before:
    """Cut off a torn last line; return how many attempts there were, and how far they got."""
    attempts, place = 0, 0
    last: int | None = None
    torn = b""
    damaged: list[bytes] = []  # how each damaged line begins
    while block := os.pread(fd, _BLOCK, place):
        place += len(block)
        *lines, torn = (torn + block).split(b"\n")
        if len(torn) > LONGEST_LINE:
            raise HistoryError(
                f"{torn[:40]!r} is longer than {LONGEST_LINE >> 20} MiB; expected lines that a "
                "History wrote: give another outdir"
            )
        for line in lines:
            record = _RECORD(line)
            if record:
                step = int(record[1])
                last = step if last is None else max(last, step)
            elif line.startswith(HEADER):
                attempts += 1
            elif not line.startswith(EVENT):
                damaged.append(line[:40])
    before = Before(attempts, last)
    # A host that crashes leaves zeros where it had no time to write.
    begun = torn.rstrip(b"\0")
    is_torn = any(begun.startswith(kind[: len(begun)]) for kind in (HEADER, RECORD, EVENT))
    if before == Before() and (damaged or not is_torn):
        raise HistoryError(
            f"{path} holds {(damaged or [begun[:40]])[0]!r}; expected lines that a History wrote: "
            "give another outdir"
        )
    if damaged:
        logger.warning(
            "%s: damaged lines stay as they are, and readers leave them out: %d, the first %r",
            path, len(damaged), damaged[0],
        )  # fmt: skip
    if torn:
        os.ftruncate(fd, os.fstat(fd).st_size - len(torn))
    return before


def html_table(rows: Iterable[tuple[str, object]]) -> str:
    from html import escape  # only a notebook needs it; 0.4 MB

    cells = ((escape(name), escape(str(value))) for name, value in rows)
    return f"<table>{''.join(f'<tr><th>{n}</th><td>{v}</td></tr>' for n, v in cells)}</table>"


_PLAIN_NAME = re.compile(r"[a-z0-9_]{1,40}")
_OTHERS = re.compile(r"[^a-z0-9_]+")


def file_name(kind: str, name: str) -> str:
    """Return a name for a file that every file system takes, one for each metric."""
    if _PLAIN_NAME.fullmatch(name):
        return f"{kind}-{name}"
    slug = _OTHERS.sub("-", name[:200].lower()).strip("-")[:40]
    parts = [kind, slug, f"{zlib.crc32(name.encode(errors='backslashreplace')):08x}"]
    return "-".join(part for part in parts if part)


_STARTED = time.time()  # when this process did, nearly
FINISHED = ("closed", "exit")  # what an end says that is no failure
_END = 1 << 16  # bytes at the end of a file that hold its last line: an end is short


def find_launch() -> str | None:
    return os.environ.get("EZPZ_LAUNCH_ID", "").rpartition(".")[0] or None


def find_folder(outdir: Path, own: str, *, finished: bool) -> Path:
    """Return the folder, or the first one beside it without a run that another launch finished."""
    # Every rank of a launch finds the same one, however late it is: rank 0's file decides.
    folder = outdir
    for number in () if finished else count(2):
        path = folder / FILE_NAME
        if not _is_of_another(_end_of(path if path.exists() else folder / own)):
            break
        folder = outdir.with_name(f"{outdir.name}-{number}")
    if folder != outdir and own == FILE_NAME:
        logger.warning(
            "%s has a finished run; this one is in %s (resume=True continues the former)",
            outdir, folder.name,
        )  # fmt: skip
    return folder


def _is_of_another(end: Mapping[str, Any]) -> bool:
    """Say whether a file's last line is the end of a run that another launch has finished."""
    if end.get("event") != "end" or end.get("message") not in FINISHED:
        return False
    launch, written = find_launch(), end.get("launch")
    # Without ids: what ended before this process began is of another.
    return launch != written if launch and written else (end.get("time") or 0) < _STARTED


def _end_of(path: Path) -> dict[str, Any]:
    """Return what the last line of a file says; nothing where there is none that is whole."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _END))
            *_, line, rest = file.read().split(b"\n")
        return {} if rest else decode(line)
    except (OSError, ValueError, HistoryError):  # the writer says what is wrong
        return {}


_WORTH_KNOWING = (
    "ezpz", "ezpz_device", "ezpz_dist", "ezpz_obs", "ezpz_topo", "ezpz_tp", "torch",
    "accelerate", "deepspeed", "mpi4py", "numpy", "transformers",
)  # fmt: skip
_GIT_SECONDS = 2.0  # a working tree on a busy file system is not worth more


def make_header(
    place: Place, before: Before, *, run: str, project: str | None, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what is known of this attempt. No command is started but rank 0's git, for 2 s."""
    from ezpz_topo import redact  # as below

    loaded = {name: getattr(sys.modules.get(name), "__version__", None) for name in _WORTH_KNOWING}
    versions = {name: str(version) for name, version in loaded.items() if version is not None}
    # ezpz-launch tells which attempt it is, and whose fault the end of the one before was.
    told = {"launch_attempt": "EZPZ_LAUNCH_ID", "last_fault": "EZPZ_LAST_FAULT"}
    own = {"argv": sys.argv, "config": config, **{k: os.environ.get(v) for k, v in told.items()}}
    return {
        "ezpz_obs": SCHEMA, "attempt": before.attempts, "time": time.time(), "run": run,
        "rank": place.rank, "world_size": place.world_size, "host": place.host,
        **_surroundings(), "continues": before.last_step,
        # git looks at every file of the folder, which all ranks share.
        "git": find_commit() if place.rank == 0 else None,
        "versions": {"python": platform.python_version(), **versions},
        # As it will stand in the file: what an object says of itself may hold a secret, too.
        **redact(orjson.loads(encode_anything(own))),
        **({"project": project} if project else {}),
    }  # fmt: skip


def _surroundings() -> dict[str, Any]:
    # Not above: a rank that writes nothing does without eight modules.
    from ezpz_topo import TopoError, detect, fold_nodelist

    try:
        topology = detect(ask=False)
    except TopoError as error:  # the rank is known by now: what else there is can wait
        return {"hosts": None, "machine": None, "job": None, "unknown": str(error)}
    job = topology.allocation
    return {
        "hosts": fold_nodelist(job.hosts) or None,
        "machine": topology.machine.name,
        "job": {"scheduler": job.scheduler, "id": job.job_id, "launcher": topology.rank.launcher},
    }


def find_commit() -> dict[str, Any] | None:
    # None where there is no repository, no git, or no answer within 2 s.
    script = Path(sys.argv[0] if sys.argv and sys.argv[0] else ".")
    folder = script.resolve().parent if script.is_file() else Path.cwd()
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changed is None else bool(changed)}


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, check=False,
            stdin=subprocess.DEVNULL, timeout=_GIT_SECONDS,
            # `status` may write the index, which is the user's.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None
