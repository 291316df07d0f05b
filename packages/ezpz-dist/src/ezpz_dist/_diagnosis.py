"""Who is missing, and where each rank stands: asked through a side store when something fails."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import sysconfig
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import cache
from types import FrameType, TracebackType
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it so

from ._store import LOST, arrived, set_all, values, within

# Whether a process of this host runs, is stopped, or has ended: read from /proc.

STATES = {"T": "stopped", "t": "stopped by a debugger", "Z": "ended", "X": "ended"}


def pid_namespace() -> int:
    """Return the number of this process's PID namespace; 0 where there is no /proc (macOS)."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def state_of(pid: int, namespace: int) -> str:
    """Return ``"stopped"``, ``"ended"``, ``"running"``, ``"waiting for a disk or driver"``, or "".

    Args:
        pid: A process of this host.
        namespace: The PID namespace in which it has that number; another than ours: "".
    """
    if not namespace or namespace != pid_namespace():
        return ""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            letter = file.read().rpartition(b")")[2].split()[0].decode()
    except (FileNotFoundError, ProcessLookupError):
        return "ended"
    except OSError:
        return ""
    if letter == "D":
        return "waiting for a disk or driver"
    return STATES.get(letter, "running")


# The collective of ours that this rank's main thread waits in, for whoever asks.

_waits: list[str] = []

_failed_at = ""

_holds = 0

_held_until = 0.0


def failed_at() -> str:
    """Return the line at which this rank's script has failed, whose frames are gone; or ""."""
    return _failed_at


def fail(line: str) -> None:
    """Say where this rank's script has failed."""
    global _failed_at
    _failed_at = line


def current() -> str:
    """Return the innermost one in words; empty outside of any."""
    return _waits[-1] if _waits else ""


def enter(what: str) -> None:
    """Say what is waited for; nothing in another thread."""
    if threading.current_thread() is threading.main_thread():
        _waits.append(what)


def leave() -> None:
    """Say that the innermost wait is over."""
    if threading.current_thread() is threading.main_thread():
        _waits.pop()


@contextmanager
def held() -> Iterator[None]:
    """While this lasts somebody looks at a rank in a debugger: no step takes too long."""
    global _holds, _held_until
    _holds += 1
    try:
        yield
    finally:
        _holds -= 1
        _held_until = time.monotonic()


def last_held() -> float:
    """Return when somebody last looked, by the monotonic clock: now, if they still do."""
    return time.monotonic() if _holds else _held_until


# torch's flight recorder: which collectives each rank has started, for reports.

_SIZE = "TORCH_FR_BUFFER_SIZE"
_ITS_OLD_NAME = "TORCH_NCCL_TRACE_BUFFER_SIZE"
_ENTRIES = 200


def variables() -> dict[str, str]:
    """Return what to export before the first group is made; a user's own size stays."""
    known = _SIZE in os.environ or _ITS_OLD_NAME in os.environ
    return {} if known else {_SIZE: str(_ENTRIES)}


def last_collectives(number: int = 1) -> list[str]:
    """Return the last collectives that this process started, the latest last.

    Each as ``"all_reduce 17 of default_pg, [3, 2]"``: its sequence number in its group, and the
    sizes of its input. Nothing where this torch has no recorder, or it is off.
    """
    library = importlib.import_module("torch._C._distributed_c10d")
    dump = getattr(library, "_dump_fr_trace_json", None) or getattr(
        library, "_dump_nccl_trace_json", None
    )
    if dump is None:
        return []
    entries: list[dict[str, Any]] = json.loads(dump(True, False)).get("entries", [])
    return [_describe(entry) for entry in entries[-number:]]


def _describe(entry: dict[str, Any]) -> str:
    name = str(entry.get("profiling_name", "?")).rpartition(":")[2]
    group = entry.get("process_group", ["?"])[-1]
    sizes = ", ".join(str(size) for size in entry.get("input_sizes", []))
    return f"{name} {entry.get('collective_seq_id', '?')} of {group}, {sizes}".rstrip(", ")


# Where a rank stands: the line of the user's code that its main thread is in.

_OURS = os.path.dirname(os.path.abspath(__file__))


@dataclass(frozen=True, slots=True)
class Standing:
    """What a rank says of itself.

    Attributes:
        rank: The rank.
        host: Its host's name.
        line: ``"train.py:41 in load_batch"``: the innermost frame of code that is neither
            Python's own, installed, nor ours.
        inside: The innermost Python function that this line called; empty where it is the
            line's own (a C function, such as ``time.sleep``, has no frame).
        doing: The collective that it waits in, in words; empty where it is in none of ours.
        stack: The whole stack, outermost first; only where it was asked for.
        collectives: torch's last ones, ours or not, the latest last.
    """

    rank: int
    host: str
    line: str
    inside: str = ""
    doing: str = ""
    stack: tuple[str, ...] = ()
    collectives: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    @staticmethod
    def from_json(said: dict[str, Any]) -> Standing:
        """Return what `as_json` was made of."""
        lists = {name: tuple(said[name]) for name in ("stack", "collectives")}
        return Standing(**{**said, **lists})

    def __str__(self) -> str:
        """Return ``"rank 1 on nodeB: train.py:41 in load_batch, in barrier()"``."""
        inside = f", in {self.doing or self.inside}" if self.doing or self.inside else ""
        return f"rank {self.rank} on {self.host}: {self.line}{inside}"


def describe_frames(frame: FrameType | None) -> tuple[str, str]:
    """Return (the user's line, the innermost function where it is another), from a frame."""
    innermost = frame
    line = ""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            line = _short(frame)
            break
        frame = frame.f_back
    if innermost is None:
        return "no Python frame", ""
    if frame is innermost:
        return line, ""
    module = innermost.f_globals.get("__name__", "?")
    inside = f"{module}.{innermost.f_code.co_qualname}"
    return line or _short(innermost), inside if line else ""


def main_frame() -> FrameType | None:
    """Return the frame that the main thread is in."""
    # The interpreter's documented way to another thread's frame, for debuggers.
    return sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001


def whole_stack(frame: FrameType | None) -> tuple[str, ...]:
    """Return the stack that leads to a frame, outermost first, a line of text each."""
    if frame is None:
        return ()
    found = traceback.extract_stack(frame)
    return tuple(
        f"{entry.filename}:{entry.lineno} in {entry.name}: {entry.line or ''}".rstrip(": ")
        for entry in found
    )


def calling_line() -> str:
    """Return the user's line that called us: ``"train.py:31"``."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # inspect's takes 100 times longer
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "?"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def raising_line(trace: TracebackType | None) -> str:
    """Return the user's line that an exception passed last: ``"train.py:12 in step"``."""
    line = "?"
    while trace is not None:
        code = trace.tb_frame.f_code
        if line == "?" or is_users(code.co_filename):
            line = f"{os.path.basename(code.co_filename)}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return line


def is_users(path: str) -> bool:
    """Say whether a file is neither Python's own, installed, nor ours."""
    if path.startswith("<"):
        # A cell of a notebook, `python -c`; but not importlib's frozen modules.
        return not path.startswith("<frozen")
    return not path.startswith(_libraries())


@cache
def _libraries() -> tuple[str, ...]:
    # sysconfig reads a large file for it: not at import.
    paths = {os.path.abspath(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    return (_OURS, *paths)


def _short(frame: FrameType) -> str:
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"


# The side store: what ranks tell each other when something is wrong, and nothing before.

EVENTS = "events"
FOREVER = timedelta(days=3650)

_HELD = 0.3
"""Seconds after which the main thread's connection is taken to be in a long request of its."""


@dataclass(frozen=True, slots=True)
class Board:
    """Keys under which the ranks of one set-up leave events and answers.

    A rank waits for its own key; an event is put into the log, then those whom it concerns
    are woken by theirs. A store's client serves one caller at a time, so that the watcher,
    which sleeps in a request, has a connection of its own.

    Attributes:
        rank: This rank.
        hosts: By rank, the name of its host.
        store: The main thread's connection.
        connect: Makes a connection whose requests wait so many seconds; raises
            `torch.distributed.DistNetworkError` or ``DistStoreError``.
        holder: Process and PID namespace of rank 0, which holds the store.
    """

    rank: int
    hosts: Sequence[str]
    store: Store
    connect: Callable[[float], Store]
    holder: tuple[int, int] = (0, 0)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.hosts)

    def reach(self) -> Store:
        """Return a connection that answers: the main thread's, or a new one where that is held.

        A new one can take seconds, because torch asks the name service about it, on both
        sides, and where that does not answer the server stands still meanwhile (torch 2.13).
        To be used inside `within`: a stopped server is waited for without end.

        Raises:
            torch.distributed.DistNetworkError: Rank 0, which holds the store, is gone; or
                ``DistStoreError``: it does not answer.
        """
        try:
            within(_HELD, lambda: self.store.add(EVENTS, 0))
        except LOST:
            return self.connect(1.0)
        return self.store

    def post(self, store: Store, kind: str, wake: Iterable[int] | None = None, **event: Any) -> int:
        """Put an event into the log and wake the ranks it is for; return its number.

        Args:
            store: A connection.
            kind: What happened.
            wake: Ranks; default: all but this one.
            event: JSON-able details.
        """
        number = store.add(EVENTS, 1)
        store.set(_event(number), json.dumps({"kind": kind, "from": self.rank, **event}))
        others = (rank for rank in range(self.size) if rank != self.rank)
        set_all(store, [_wake(rank) for rank in (others if wake is None else wake)], "!")
        return number

    def events_after(self, store: Store, seen: int) -> list[dict[str, Any]]:
        """Return the events after the first ``seen``, in order."""
        last = store.add(EVENTS, 0)
        # An event is announced a moment before it can be read: `get` waits for it.
        return [json.loads(store.get(_event(number))) for number in range(seen + 1, last + 1)]

    def sleep(self, store: Store) -> None:
        """Wait until this rank is woken; nothing is sent meanwhile."""
        store.wait([_wake(self.rank)], FOREVER)
        store.delete_key(_wake(self.rank))

    def wake_myself(self, store: Store) -> None:
        """End this rank's `sleep`."""
        store.set(_wake(self.rank), "!")


def _event(number: int) -> str:
    return f"event/{number}"


def _wake(rank: int) -> str:
    return f"wake/{rank}"


# The thread of each rank that answers for it while its main thread is stuck.

logger = logging.getLogger(__name__)

FIRST_WORDS = 1.0
"""Seconds that a rank goes on after another's failure, so that that one's traceback is first and
its exit status the one that the launcher sees first. The whole job is to end within two."""

_ON_ITS_WAY = 0.2
"""Seconds of these that the line naming the failed rank waits for that rank's traceback: launchers
bring the words of each node by a way of its own (srun), and what was written later comes first."""

JOIN = 0.5

_CONNECTING = 60.0

_LAST = 5

Notice = Callable[[dict[str, Any]], None]

_callbacks: dict[str, list[Notice]] = {}


class Watcher(threading.Thread):
    """Sleeps at the side store until another rank posts an event, then serves it.

    Attributes:
        board: Where events are.
        pid: The process that it was started in; a forked child has none.
        lost: Whether rank 0, which holds the store, has left before this rank.
        ending: Set once a rank, this one or another, was heard to end the job.
    """

    def __init__(self, board: Board) -> None:
        """Prepare the thread for one set-up's board; `start` starts it."""
        super().__init__(name="ezpz-watcher", daemon=True)
        self.board = board
        self.lost = False
        self.ending = threading.Event()
        self.pid = os.getpid()
        self._leaving = threading.Event()
        self._stopped = threading.Event()
        self._pinned: Standing | None = None

    def run(self) -> None:
        """Serve events until `stop`, or until the store is gone."""
        try:
            # Not on the caller's time: set-up need not wait for this connection.
            store = self._connect()
            seen = 0
            while not self._leaving.is_set():
                for event in self.board.events_after(store, seen):
                    seen += 1
                    self._serve(store, event)
                if not self._leaving.is_set():
                    self.board.sleep(store)
        except LOST as error:
            self.lost = not self._leaving.is_set()
            logger.debug("rank %d: the side store is gone: %s", self.board.rank, error)

    def _connect(self) -> Store:
        """Try again and again: the server stands still while torch asks the name service."""
        until = time.monotonic() + _CONNECTING
        while True:
            try:
                return self.board.connect(FOREVER.total_seconds())
            except LOST as error:
                if self._leaving.wait(1.0):
                    raise
                if time.monotonic() > until:
                    logger.warning(
                        "rank %d will not hear of the other ranks' failures: %s",
                        self.board.rank, error,
                    )  # fmt: skip
                    raise

    def stop(self, store: Store) -> None:
        """End the thread; harmless when it has ended.

        Args:
            store: A connection, through which its sleep is ended.
        """
        self._leaving.set()
        self._stopped.set()
        if self.lost:
            return
        try:
            self.board.wake_myself(store)
        except LOST:
            return  # its own connection is gone as well
        self.join(JOIN)

    def _serve(self, store: Store, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "roll" and event["from"] != self.board.rank:
            said = self.standing(stack=event["stack"]).as_json()
            store.set(f"standing/{event['roll']}/{self.board.rank}", json.dumps(said))
        elif kind == "look":
            self._look(store, event)
        elif kind == "closed":
            self.lost = True
            self._leaving.set()
        elif kind == "end":
            self.ending.set()
            self._leaving.set()
            if event["from"] != self.board.rank:
                self._name_the_cause(event["from"])
                self._end(event)
        elif kind == "notice":
            for callback in tuple(_callbacks.get(event["name"], ())):
                self._call(callback, event)

    def _call(self, callback: Notice, event: dict[str, Any]) -> None:
        try:
            callback(event["payload"])
        # Whatever it is: this thread has others to answer.
        except Exception:
            logger.exception("rank %d: what hears of %s failed", self.board.rank, event["name"])

    def standing(self, *, stack: bool) -> Standing:
        """Return where this rank's main thread stands; with its whole stack on demand."""
        if self._pinned is not None:
            return self._pinned
        frame = main_frame()
        line, inside = describe_frames(frame)
        if failed_at():
            line, inside = failed_at(), ""
        return Standing(
            self.board.rank,
            self.board.hosts[self.board.rank],
            line,
            inside,
            current(),
            whole_stack(frame) if stack else (),
            tuple(last_collectives(_LAST if stack else 1)),
        )

    @contextmanager
    def pinned(self, standing: Standing) -> Iterator[None]:
        """Let this rank be said to stand there, while it asks where the others are."""
        self._pinned = standing
        try:
            yield
        finally:
            self._pinned = None

    def _look(self, store: Store, event: dict[str, Any]) -> None:
        """Answer for silent ranks of this host: have their processes ended, or are they stopped?"""
        host = self.board.hosts[self.board.rank]
        for rank, where, pid, namespace in event["at"]:
            state = state_of(pid, namespace) if where == host else ""
            if state:
                store.set(f"state/{event['roll']}/{rank}", state)

    def _name_the_cause(self, rank: int) -> None:
        """Tell ezpz-launch who failed, as that rank's process may take longer to end than this."""
        path = os.environ.get("EZPZ_CAUSE_FILE", "")
        # In a world of its own making, ranks have other numbers.
        if path and os.environ.get("EZPZ_RANK") == str(self.board.rank):
            with suppress(OSError), open(path, "x", encoding="ascii") as file:
                file.write(f"{rank}\n")

    def _end(self, event: dict[str, Any]) -> None:
        end = time.monotonic() + FIRST_WORDS
        if event["teller"] == self.board.rank:
            self._stopped.wait(_ON_ITS_WAY)
            tell(f"ezpz: {event['text']}; the other ranks end too")
        # Its own last words, which may be the better explanation, are not cut off. Nor is a rank
        # ended that has left this world by then.
        if self._stopped.wait(end - time.monotonic()):
            return
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue  # closed, or nobody reads it
        os._exit(event["status"])


def tell(text: str) -> None:
    """Write a line to standard error, whatever the main thread has locked."""
    try:
        os.write(2, f"{text}\n".encode())
    except OSError:
        return  # nobody reads it any more


_watcher: Watcher | None = None


def start(board: Board) -> Watcher:
    """Start this rank's watcher."""
    global _watcher
    _watcher = Watcher(board)
    _watcher.start()
    return _watcher


def find_watcher() -> Watcher | None:
    """Return this process's watcher; None in a world of one, before set-up and in a child."""
    if _watcher is None or _watcher.pid != os.getpid():
        return None
    return _watcher


def forget() -> None:
    """Drop the watcher that has been stopped."""
    global _watcher
    _watcher = None


def on_notice(name: str, callback: Notice) -> Callable[[], None]:
    """Have a function called, in the watcher's thread, for each notice of this name.

    Returns:
        A function that takes the callback back.
    """
    _callbacks.setdefault(name, []).append(callback)
    return lambda: _callbacks[name].remove(callback)


# Asking all ranks where they stand, once for all that want to know.

ANSWER = 0.8
"""Seconds for a rank's watcher to answer. It needs the interpreter's lock for a millisecond;
whoever does not get it in this time is stopped, gone, or in native code that keeps the lock."""

LOOK = 0.3
"""Seconds for a neighbour to look what became of a silent rank's process."""

LONGEST = 1.8
"""Seconds for it all: rank 0's process, which holds the store, can be stopped itself."""

SHOWN = 64
"""Ranks that are looked for and named one by one; a longer list nobody reads."""


@dataclass(frozen=True, slots=True)
class RollCall:
    """Who answered what.

    Attributes:
        standings: Where those stand who answered, by rank.
        silent: For each rank that did not answer, what became of it, as far as it is known:
            ``"has ended"``, ``"is stopped (pid 71)"``, ``"left: cleanup() at train.py:90"``.
        hosts: The host of each silent rank.
    """

    standings: dict[int, Standing]
    silent: dict[int, str] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)

    def gone(self) -> list[int]:
        """Return the ranks that can come no more: ended, left or stopped, as far as is known."""
        return [rank for rank, fate in self.silent.items() if fate != _NO_ANSWER]

    def among(self, ranks: Collection[int]) -> RollCall:
        """Return what was found of these ranks; of rank 0 too, if it is silent.

        Without rank 0, which holds the store, there is no telling of the others.
        """
        silent = {rank: fate for rank, fate in self.silent.items() if rank in ranks or rank == 0}
        standings = {rank: said for rank, said in self.standings.items() if rank in ranks}
        return RollCall(standings, silent, self.hosts)

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values: short, for most ranks stand in the same place."""
        places: dict[str, list[int]] = {}
        for rank, standing in self.standings.items():
            place = {**standing.as_json(), "rank": 0, "host": ""}
            places.setdefault(json.dumps(place), []).append(rank)
        return {"places": list(places.items()), "silent": list(self.silent.items())}

    @staticmethod
    def from_json(said: dict[str, Any], hosts: Sequence[str]) -> RollCall:
        """Return what `as_json` was made of; `hosts` are those of all ranks."""
        standings: dict[int, Standing] = {}
        for place, ranks in said["places"]:
            there = Standing.from_json(json.loads(place))
            standings |= {r: replace(there, rank=r, host=hosts[r]) for r in ranks}
        silent: dict[int, str] = dict(said["silent"])
        return RollCall(dict(sorted(standings.items())), silent, {r: hosts[r] for r in silent})


_NO_ANSWER = "does not answer: it is stopped, or in native code that keeps Python's lock"


def call_roll(watcher: Watcher, *, stack: bool = False) -> RollCall:
    """Return where every rank stands, within about two seconds; never an error.

    When many ranks want to know at once, as all peers of one that died do, one of them asks
    and the others read what it was told.
    """
    mine = watcher.standing(stack=stack)
    with watcher.pinned(mine):
        try:
            return within(LONGEST, lambda: _call(watcher.board, mine, stack))
        except LOST as error:
            return _without_store(watcher.board, mine, error)


def _call(board: Board, mine: Standing, stack: bool) -> RollCall:
    store = board.reach()
    turn = store.add("roll/turn", 0)
    key = f"roll/{turn}/{stack}"
    first = store.compare_set(key, "", str(board.rank))
    if int(first) != board.rank:
        said = _read(store, f"{key}/said", ANSWER + LOOK + 0.2)
        if said is not None:
            found = RollCall.from_json(json.loads(zlib.decompress(said)), board.hosts)
            found.standings[board.rank] = mine
            return found
    call = _ask(board, store, f"{turn}/{board.rank}", mine, stack)
    # Thousands read it, from one server.
    store.set(f"{key}/said", zlib.compress(json.dumps(call.as_json()).encode()))  # type: ignore[arg-type]
    store.add("roll/turn", 1)
    return call


def _without_store(board: Board, mine: Standing, error: Exception) -> RollCall:
    """Say what can be said when rank 0's process, which holds the store, does not answer."""
    if board.rank == 0:
        return RollCall({0: mine})
    pid, namespace = board.holder
    state = state_of(pid, namespace) if board.hosts[0] == mine.host else ""
    words = str(error)
    if state == "ended" or "refused" in words or "onnection was likely closed" in words:
        fate = f"has ended (pid {pid})"
    elif state.startswith("stopped"):
        fate = f"is {state} (pid {pid})"
    else:
        fate = f"does not answer in {LONGEST:g} s: it is stopped, cut off or overloaded (pid {pid})"
    fate += "; it holds the store, so that nothing is known of the others"
    return RollCall({board.rank: mine}, {0: fate}, {0: board.hosts[0]})


def _ask(board: Board, store: Store, roll: str, mine: Standing, stack: bool) -> RollCall:
    others = [rank for rank in range(board.size) if rank != board.rank]
    board.post(store, "roll", others, roll=roll, stack=stack)
    keys = {rank: f"standing/{roll}/{rank}" for rank in others}
    there = arrived(store, list(keys.values()), ANSWER)
    standings = {board.rank: mine}
    for text in values(store, there):
        standing = Standing.from_json(json.loads(text))
        standings[standing.rank] = standing
    silent = [rank for rank in others if rank not in standings]
    return RollCall(
        dict(sorted(standings.items())),
        _fates(board, store, roll, silent[:SHOWN]) | dict.fromkeys(silent[SHOWN:], _NO_ANSWER),
        {rank: board.hosts[rank] for rank in silent},
    )


def _fates(board: Board, store: Store, roll: str, silent: list[int]) -> dict[int, str]:
    """Find out what became of ranks that do not answer."""
    if not silent:
        return {}
    at: list[tuple[int, str, int, int]] = []
    for said in values(store, [f"facts/{rank}" for rank in silent]):  # as told at set-up
        host, pid, namespace, _ = json.loads(said)
        at.append((silent[len(at)], host, pid, namespace))
    board.post(store, "look", range(board.size), roll=roll, at=at)
    words = _those(store, "left", silent)
    states = _those(store, f"state/{roll}", [rank for rank in silent if rank not in words], LOOK)
    fates = {}
    for rank, _, pid, _ in at:
        state = states.get(rank, "")
        if rank in words:
            fates[rank] = f"has left: {words[rank]}"
        elif state == "ended":
            fates[rank] = f"has ended (pid {pid})"
        elif state.startswith("stopped"):
            fates[rank] = f"is {state} (pid {pid})"
        elif state:
            fates[rank] = f"{_NO_ANSWER} (pid {pid}, {state})"
        else:
            fates[rank] = _NO_ANSWER
    return fates


def _those(store: Store, name: str, ranks: list[int], seconds: float = 0.0) -> dict[int, str]:
    """Return what is there under a name for each rank."""
    keys = {f"{name}/{rank}": rank for rank in ranks}
    there = arrived(store, list(keys), seconds)
    texts = values(store, there)
    return {keys[key]: text.decode() for key, text in zip(there, texts, strict=True)}


def _read(store: Store, key: str, seconds: float) -> bytes | None:
    return bytes(store.get(key)) if arrived(store, [key], seconds) else None
