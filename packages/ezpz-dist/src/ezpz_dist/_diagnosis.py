"""Who is missing, and where each rank stands: asked through a side store when a wait fails."""

from __future__ import annotations

import importlib
import json
import logging
import os
import select
import site
import socket
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field
from functools import cache
from types import FrameType, TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed import DistNetworkError, DistStoreError, Store  # type: ignore[attr-defined]  # torch exports them so

from ._addresses import message
from ._errors import grouped

logger = logging.getLogger(__name__)

T = TypeVar("T")


# Requests to a store that end, and that stay small however many ranks there are.

# What torch raises where the store's server is gone, stopped, or has no such key in time.
LOST = (DistNetworkError, DistStoreError)
# Keys in one request: a server reads a request again with each piece of it that arrives. One of
# 120,960 keys takes it 0.9 s, in parts 0.03 s (torch 2.13, libuv).
_AT_ONCE = 1024


def within(seconds: float, request: Callable[[], T]) -> T:
    """Return what a request to a store answers; DistStoreError if it takes longer."""
    # A stopped server accepts connections and never answers, and most requests have no time-out
    # of their own (torch 2.13): the thread that waits for it is left behind.
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(request())
        except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
            answer.set_exception(error)

    threading.Thread(target=run, name="ezpz-asks", daemon=True).start()
    if not wait([answer], seconds).done:
        raise DistStoreError(f"the store did not answer in {seconds:g} s")
    return answer.result()


def arrived(store: Store, keys: Sequence[str], seconds: float) -> list[str]:
    """Return those keys that are there, once all are or the time is over."""
    # Store.wait writes two lines of torch's to standard error where it times out.
    deadline, pause = time.monotonic() + seconds, 0.1e-3
    while not all_there(store, keys):
        left = deadline - time.monotonic()
        if left <= 0:
            return _present(store, keys)
        time.sleep(min(pause, left))
        pause = min(2 * pause, 0.05)
    return list(keys)


def values(store: Store, keys: Sequence[str]) -> list[bytes]:
    return [value for part in _parts(keys) for value in store.multi_get(part)]


def all_there(store: Store, keys: Sequence[str]) -> bool:
    return all(store.check(part) for part in _parts(keys))


def _parts(keys: Sequence[str]) -> Iterator[list[str]]:
    return (list(keys[at : at + _AT_ONCE]) for at in range(0, len(keys), _AT_ONCE))


def _present(store: Store, keys: Sequence[str]) -> list[str]:
    # Halving: few are missing among many.
    if all_there(store, keys):
        return list(keys)
    if len(keys) == 1:
        return []
    half = len(keys) // 2
    return [*_present(store, keys[:half]), *_present(store, keys[half:])]


_STATES = {
    "T": "stopped", "t": "stopped by a debugger", "Z": "ended", "X": "ended",
    "D": "waiting for a disk or driver",
}  # fmt: skip


def pid_namespace() -> int:
    """Return the number of this process's PID namespace; 0 where there is no /proc (macOS)."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def stat_of(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the third, the state, on: proc_pid_stat(5)."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The second, a name in parentheses, may hold anything.
        return file.read().rpartition(b")")[2].decode().split()


def state_of(pid: int, namespace: int) -> str:
    """Return ``"stopped"``, ``"ended"``, ``"running"``, ...; "" in another PID namespace."""
    if not namespace or namespace != pid_namespace():
        return ""
    try:
        letter = stat_of(pid)[0]
    except (FileNotFoundError, ProcessLookupError):
        return "ended"
    except OSError:
        return ""
    return _STATES.get(letter, "running")


# Where a rank stands: the line of the user's code that its main thread is in.

_OURS = os.path.dirname(os.path.abspath(__file__))

_waits: list[str] = []  # what the main thread waits in, in words; the innermost last
_debuggers = 0
_debugged_until = 0.0


@dataclass(frozen=True, slots=True)
class Location:
    """Where a rank stands, as it says itself."""

    rank: int
    host: str
    line: str  # ``"train.py:41 in load_batch"``: the innermost frame of the user's code, `is_users`
    inside: str = ""  # the innermost Python function that it called; empty: it is the line's own
    doing: str = ""  # the collective of ours that it waits in, in words
    stack: tuple[str, ...] = ()  # the whole stack, outermost first; only on request
    collectives: tuple[str, ...] = ()  # torch's last ones, ours or not, the latest last

    @staticmethod
    def from_json(told: Sequence[Any]) -> Location:
        return Location(*told[:-2], *map(tuple, told[-2:]))

    @property
    def place(self) -> str:
        """``"train.py:41 in load_batch, in barrier()"``."""
        inside = self.doing or self.inside
        return f"{self.line}, in {inside}" if inside else self.line

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}: {self.place}"


def waits_here() -> list[str]:
    """Return what this thread waits in; of others than the main one nothing is kept."""
    return _waits if threading.current_thread() is threading.main_thread() else []


@contextmanager
def held() -> Iterator[None]:
    """While this lasts, someone looks at a rank in a debugger: no step takes too long."""
    global _debuggers, _debugged_until
    _debuggers += 1
    try:
        yield
    finally:
        _debuggers -= 1
        _debugged_until = time.monotonic()


def last_held() -> float:
    """Return when someone last looked, by the monotonic clock: now, if they still do."""
    return time.monotonic() if _debuggers else _debugged_until


def describe_frames(frame: FrameType | None) -> tuple[str, str]:
    """Return (the user's line, the innermost function where it is another), from a frame."""
    if frame is None:
        return "no Python frame", ""
    users: FrameType | None = frame
    while users is not None and not is_users(users.f_code.co_filename):
        users = users.f_back
    if users is None:
        return _line(frame), ""
    module = frame.f_globals.get("__name__", "?")
    return _line(users), "" if users is frame else f"{module}.{frame.f_code.co_qualname}"


def main_frame() -> FrameType | None:
    # The interpreter's documented way to another thread's frame, for debuggers.
    return sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001


def whole_stack(frame: FrameType | None) -> tuple[str, ...]:
    found = traceback.extract_stack(frame) if frame else ()
    return tuple(
        f"{entry.filename}:{entry.lineno} in {entry.name}: {entry.line or ''}".rstrip(": ")
        for entry in found
    )


def calling_line() -> str:
    """Return the user's line that called us: ``"train.py:31"``."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # inspect's takes 100 times longer
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "?" if frame is None else _line(frame).partition(" in ")[0]


def raising_line(trace: TracebackType | None) -> str:
    """Return the user's line that an exception passed last: ``"train.py:12 in step"``."""
    line = "?"
    for frame, number in traceback.walk_tb(trace):
        code = frame.f_code
        if line == "?" or is_users(code.co_filename):
            line = f"{os.path.basename(code.co_filename)}:{number} in {code.co_name}"
    return line


def is_users(path: str) -> bool:
    """Return whether a file is neither Python's own, installed, nor ours."""
    if path.startswith("<"):
        # A cell of a notebook, `python -c`; but not importlib's frozen modules.
        return not path.startswith("<frozen")
    return not path.startswith(_libraries())


@cache
def _libraries() -> tuple[str, ...]:
    # sysconfig would know, and looks for 30 files: each rank asks when it cleans up. torch may lie
    # where only a .pth file points.
    folders = os.path.dirname(os.__file__), *site.getsitepackages(), site.getusersitepackages()
    return tuple(f"{os.path.abspath(one)}{os.sep}" for one in (_OURS, *folders, *torch.__path__))


def _line(frame: FrameType) -> str:
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"


def last_collectives(number: int) -> list[str]:
    """Return torch's last collectives, the latest last: ``"all_reduce 17 of default_pg, [3]"``."""
    library = importlib.import_module("torch._C._distributed_c10d")
    older = getattr(library, "_dump_nccl_trace_json", None)
    dump = getattr(library, "_dump_fr_trace_json", older)
    entries = json.loads(dump(True, False)).get("entries", []) if dump else []
    return [
        f"{str(entry.get('profiling_name', '?')).rpartition(':')[2]} "
        f"{entry.get('collective_seq_id', '?')} of {entry.get('process_group', ['?'])[-1]}, "
        f"{', '.join(map(str, entry.get('input_sizes', [])))}".rstrip(", ")
        for entry in entries[-number:]
    ]


# The side store: what ranks tell each other when something is wrong, and nothing before.

_BUSY = 0.3  # seconds after which the main thread's connection is taken to be in a long request


class Wakeup:
    """Wakes the responders of all ranks, by this node's call to rank 0's server."""

    def __init__(self, call: socket.socket, *, shared: bool) -> None:
        self._call, self._stop, self._heard = call, socket.socketpair(), b""
        self._shared = shared
        call.settimeout(None)
        # What the server sends is for all ranks that share this call, so none takes it out:
        # each hears that there is more. The system holds 100,000 rings.
        self._poll: Any = select.epoll() if shared else select.poll()
        edges = select.EPOLLRDHUP | select.EPOLLET if shared else 0
        self._poll.register(call, select.POLLIN | edges)
        self._poll.register(self._stop[0], select.POLLIN)

    def ring(self, last: str = "") -> None:
        """Wake all; the last time with a text, which needs no answer of the store's."""
        with suppress(OSError):  # rank 0 has gone, as the store tells
            self._call.send(message({"ring": last} if last else b""), socket.MSG_DONTWAIT)

    def wait(self) -> str:
        """Return the last text, or none, once it has rung or `stop` was called.

        Raises one of `LOST` if rank 0 has gone.
        """
        events, gone = dict(self._poll.poll()), False
        if what := events.get(self._call.fileno()):
            try:
                flags = socket.MSG_DONTWAIT | (socket.MSG_PEEK if self._shared else 0)
                heard = self._call.recv(1 << 17, flags)
            except BlockingIOError:
                return ""
            except OSError:
                heard = b""
            self._heard = heard if self._shared else self._heard.lstrip(b"!") + heard
            gone = not heard or (self._shared and what != select.EPOLLIN)
        begin, end, _ = self._heard.partition(b"\n")
        if end:
            return begin.lstrip(b"!").decode()
        if gone:
            raise DistNetworkError("rank 0 has closed the connection")
        return ""

    def stop(self) -> None:
        self._stop[1].send(b"!")

    def close(self) -> None:
        for each in (self._call, *self._stop):
            each.close()
        if self._shared:
            self._poll.close()


class SideStore(NamedTuple):
    """Events of one set-up, and their answers: put into a log, then those concerned are woken."""

    rank: int
    hosts: Sequence[str]
    store: Store  # the main thread's; it serves one caller, see `reach`
    # Makes a connection whose requests wait so many seconds; raises one of `LOST`.
    connect: Callable[[float], Store]
    wakeup: Wakeup  # by which the responders are woken
    holder: tuple[int, int] = (0, 0)  # process and PID namespace of rank 0, which holds the store

    def reach(self) -> Store:
        """Return a connection that answers, or raise one of `LOST`; to be used inside `within`."""
        # A new one is the second choice: it can take seconds, because torch asks the name service
        # about it, and where that does not answer the server stands still meanwhile (torch 2.13).
        try:
            within(_BUSY, lambda: self.store.add("events", 0))
        except LOST:
            return self.connect(1.0)
        return self.store

    def post(self, store: Store, kind: str, **event: Any) -> int:
        """Put an event into the log, wake all ranks, and return its number."""
        number = store.add("events", 1)
        text = json.dumps({"kind": kind, "from": self.rank, **event})
        store.set(f"event/{number}", text)
        # A rank's own connection to the store may be in a long request, as in torch's set-up.
        self.wakeup.ring(text if kind == "end" else "")
        return number


# The thread of each rank that answers for it while its main thread is stuck.

# Seconds that a rank goes on after another's failure, so that the launcher gets that one's
# traceback and exit status first. The whole job is to end within two.
FIRST_WORDS = 1.0
# Seconds of these that the line naming the failed rank waits for that rank's traceback, which
# launchers may bring another way (srun).
_ON_ITS_WAY = 0.2
_CONNECTING = 60.0
Notice = Callable[[dict[str, Any]], None]
_callbacks: dict[str, list[Notice]] = {}


class Responder(threading.Thread):
    """Sleeps at the side store until another rank posts an event, then serves it."""

    def __init__(self, side: SideStore) -> None:
        super().__init__(name="ezpz-responder", daemon=True)
        self.side = side
        self.pid = os.getpid()  # the process that it was started in; a forked child has none
        self.lost = False  # whether rank 0, which holds the store, has left before this rank
        self.ending = threading.Event()  # set once a rank, this one or another, has told all to end
        self.failed_at = ""  # the line at which the script has failed, whose frames are gone
        self._leaving = threading.Event()
        self._stopped = threading.Event()
        self.pinned: Location | None = None  # where this rank stands while it asks for the others

    def run(self) -> None:
        wakeup, seen = self.side.wakeup, 0
        try:
            while not self._leaving.is_set():
                last = wakeup.wait()
                if self._leaving.is_set():
                    break
                if last:
                    self._serve(self.side.store, json.loads(last))
                    break
                store = self._reach()
                while not self._leaving.is_set() and store.check([f"event/{seen + 1}"]):
                    seen += 1
                    self._serve(store, json.loads(store.get(f"event/{seen}")))
        except LOST as error:
            self.lost = not self._leaving.is_set()
            logger.debug("rank %d: the side store is gone: %s", self.side.rank, error)

    def _reach(self) -> Store:
        until = time.monotonic() + _CONNECTING
        while True:
            try:
                return self.side.reach()
            except LOST as error:
                if self._leaving.wait(1.0):
                    raise
                if time.monotonic() > until:
                    logger.warning(
                        "rank %d does not hear of the other ranks' failures any more: %s",
                        self.side.rank, error,
                    )  # fmt: skip
                    raise

    def stop(self) -> None:
        self._leaving.set()
        self._stopped.set()
        self.side.wakeup.stop()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(0.5)

    def _serve(self, store: Store, event: dict[str, Any]) -> None:
        kind, rank = event["kind"], self.side.rank
        if kind == "roll" and event["from"] != rank:
            mine = astuple(self.location(stack=event["stack"]))
            store.set(f"location/{event['roll']}/{rank}", json.dumps(mine))
        elif kind == "look":
            # For silent ranks of this host: have their processes ended, or are they stopped?
            here = [each for each in event["at"] if each[1] == self.side.hosts[rank]]
            for silent, _, pid, namespace in here:
                if state := state_of(pid, namespace):
                    store.set(f"state/{event['roll']}/{silent}", state)
        elif kind == "closed" and event["from"] != rank:
            self.lost = True
            self._leaving.set()
        elif kind == "end":
            self.ending.set()
            self._leaving.set()
            self._end(event)
        elif kind == "notice":
            for callback in tuple(_callbacks.get(event["name"], ())):
                try:
                    callback(event["payload"])
                except Exception:  # whatever it is: this thread has others to answer
                    logger.exception("rank %d: what hears of %s failed", rank, event["name"])

    def location(self, *, stack: bool) -> Location:
        """Return where this rank's main thread stands; with its whole stack on request."""
        if self.pinned is not None:
            return self.pinned
        frame = main_frame()
        line, inside = (self.failed_at, "") if self.failed_at else describe_frames(frame)
        return Location(
            self.side.rank, self.side.hosts[self.side.rank], line, inside,
            _waits[-1] if _waits else "",
            whole_stack(frame) if stack else (), tuple(last_collectives(5 if stack else 1)),
        )  # fmt: skip

    def _end(self, event: dict[str, Any]) -> None:
        if event["from"] == self.side.rank:
            return
        # ezpz-launch learns who failed, as that rank's process may take longer to end than this;
        # in a world of its own making, ranks have other numbers.
        path = os.environ.get("EZPZ_CAUSE_FILE", "")
        if path and os.environ.get("EZPZ_RANK") == str(self.side.rank):
            with suppress(OSError), open(path, "x", encoding="ascii") as file:
                file.write(f"{event['from']}\n")
        end = time.monotonic() + FIRST_WORDS
        if event["teller"] == self.side.rank:
            self._stopped.wait(_ON_ITS_WAY)
            tell(f"ezpz: {event['text']}; the other ranks end too")
        # Its own last words, which may be the better explanation, are not cut off. Nor is a rank
        # ended that has left this world by then.
        if not self._stopped.wait(end - time.monotonic()):
            flush()
            os._exit(event["status"])


def tell(text: str) -> None:
    """Write a line to standard error, whatever the main thread has locked."""
    with suppress(OSError):  # no one reads it any more
        os.write(2, f"{text}\n".encode())


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or no one reads it
            stream.flush()


_responder: Responder | None = None


def start_responder(side: SideStore) -> None:
    global _responder
    _responder = Responder(side)
    _responder.start()


def find_responder() -> Responder | None:
    """Return this process's; None in a world of one, before set-up, after clean-up, in a child."""
    return _responder if _responder is not None and _responder.pid == os.getpid() else None


def drop_responder() -> Responder | None:
    global _responder
    found, _responder = find_responder(), None
    return found


def on_notice(name: str, callback: Notice) -> Callable[[], None]:
    """Have a function called by the responder for each notice; what is returned takes it back."""
    _callbacks.setdefault(name, []).append(callback)
    return lambda: _callbacks[name].remove(callback)


# The roll call: all ranks are asked where they stand, once for all that want to know.

_ANSWER = 0.8  # seconds for a responder to answer, which needs the interpreter's lock for 1 ms
_LOOK = 0.3  # seconds for a neighbor to look what became of a silent rank's process
_LONGEST = 1.8  # seconds for it all: rank 0's process, which holds the store, can be stopped itself
_LOOKED_FOR = 64  # silent ranks whose processes are looked for
_NO_ANSWER = "does not answer: it is stopped, or in native code that keeps Python's lock"


@dataclass(frozen=True, slots=True)
class RollCall:
    locations: dict[int, Location]
    # What became of each rank that did not answer: ``"has ended"``, ``"is stopped (pid 71)"``.
    silent: dict[int, str] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)  # the host of each silent rank

    def gone(self) -> list[int]:  # who can come no more: ended, left or stopped
        return [rank for rank, fate in self.silent.items() if fate != _NO_ANSWER]

    def among(self, ranks: Collection[int]) -> RollCall:
        """Return what was found of these ranks, and of rank 0, which holds the store."""
        silent = {rank: fate for rank, fate in self.silent.items() if rank in ranks or rank == 0}
        locations = {rank: found for rank, found in self.locations.items() if rank in ranks}
        return RollCall(locations, silent, self.hosts)

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values: short, for most ranks stand in the same place."""
        places = grouped((json.dumps(astuple(one)[2:]), r) for r, one in self.locations.items())
        return {"places": list(places.items()), "silent": list(self.silent.items())}

    @staticmethod
    def from_json(told: dict[str, Any], hosts: Sequence[str]) -> RollCall:
        places = [(json.loads(place), some) for place, some in told["places"]]
        found = {r: Location.from_json((r, hosts[r], *more)) for more, some in places for r in some}
        silent: dict[int, str] = dict(told["silent"])
        return RollCall(dict(sorted(found.items())), silent, {r: hosts[r] for r in silent})


def call_roll(responder: Responder, *, stack: bool = False) -> RollCall:
    """Return where every rank stands, within two seconds: one asks for all that want to know."""
    mine = responder.pinned = responder.location(stack=stack)
    try:
        return within(_LONGEST, lambda: _call(responder.side, mine, stack))
    except LOST as error:
        return _without_store(responder.side, mine, error)
    finally:
        responder.pinned = None


def describe_gone(most: int) -> str:
    responder = find_responder()
    if responder is None:
        return "the other ranks cannot be reached"
    call = call_roll(responder)
    named = [f"rank {rank} on {call.hosts[rank]} {call.silent[rank]}" for rank in call.gone()]
    return "; ".join(named[:most]) or "the other ranks cannot be reached"


def _call(side: SideStore, mine: Location, stack: bool) -> RollCall:
    store = side.reach()
    turn = store.add("roll/turn", 0)
    key = f"roll/{turn}/{stack}"
    first = store.compare_set(key, "", str(side.rank))
    found = f"{key}/found"
    if int(first) != side.rank and arrived(store, [found], _ANSWER + _LOOK + 0.2):
        call = RollCall.from_json(json.loads(zlib.decompress(store.get(found))), side.hosts)
        call.locations[side.rank] = mine
        return call
    call = _ask(side, store, f"{turn}/{side.rank}", mine, stack)
    # Thousands read it, from one server.
    store.set(found, zlib.compress(json.dumps(call.as_json()).encode()))  # type: ignore[arg-type]
    store.add("roll/turn", 1)
    return call


def _without_store(side: SideStore, mine: Location, error: Exception) -> RollCall:
    """Say what can be said when rank 0's process, which holds the store, does not answer."""
    if side.rank == 0:
        return RollCall({0: mine})
    pid, namespace = side.holder
    state = state_of(pid, namespace) if side.hosts[0] == mine.host else ""
    words = str(error)
    fate = f"does not answer in {_LONGEST:g} s: it is stopped, cut off, overloaded, or in native "
    fate += "code that keeps Python's lock"
    if state == "ended" or "refused" in words or "onnection was likely closed" in words:
        fate = "has ended"
    elif state.startswith("stopped"):
        fate = f"is {state}"
    fate += f" (pid {pid}); it holds the store, so that nothing is known of the others"
    return RollCall({side.rank: mine}, {0: fate}, {0: side.hosts[0]})


def _ask(side: SideStore, store: Store, roll: str, mine: Location, stack: bool) -> RollCall:
    others = [rank for rank in range(len(side.hosts)) if rank != side.rank]
    side.post(store, "roll", roll=roll, stack=stack)
    there = arrived(store, [f"location/{roll}/{rank}" for rank in others], _ANSWER)
    found = [mine, *(Location.from_json(json.loads(text)) for text in values(store, there))]
    locations = {each.rank: each for each in sorted(found, key=lambda each: each.rank)}
    silent = [rank for rank in others if rank not in locations]
    if len(silent) == len(others) and side.rank != 0:
        raise DistStoreError("rank 0 does not wake the others")
    fates = _fates(side, store, roll, silent[:_LOOKED_FOR]) if silent else {}
    fates |= dict.fromkeys(silent[_LOOKED_FOR:], _NO_ANSWER)
    return RollCall(locations, fates, {rank: side.hosts[rank] for rank in silent})


def _fates(side: SideStore, store: Store, roll: str, silent: list[int]) -> dict[int, str]:
    processes = json.loads(zlib.decompress(store.get("processes")))  # as told at set-up
    at = [(rank, side.hosts[rank], *processes[rank]) for rank in silent]
    side.post(store, "look", roll=roll, at=at)
    left = _those(store, "left", silent, 0.0)
    states = _those(store, f"state/{roll}", [rank for rank in silent if rank not in left], _LOOK)
    fates = {}
    for rank, _, pid, _ in at:
        state = states.get(rank, "")
        if rank in left:
            fates[rank] = f"has left: {left[rank]}"
        elif state == "ended":
            fates[rank] = f"has ended (pid {pid})"
        elif state.startswith("stopped"):
            fates[rank] = f"is {state} (pid {pid})"
        else:
            fates[rank] = f"{_NO_ANSWER} (pid {pid}, {state})" if state else _NO_ANSWER
    return fates


def _those(store: Store, name: str, ranks: list[int], seconds: float) -> dict[int, str]:
    keys = {f"{name}/{rank}": rank for rank in ranks}
    there = arrived(store, list(keys), seconds)
    return {keys[key]: text.decode() for key, text in zip(there, values(store, there), strict=True)}
