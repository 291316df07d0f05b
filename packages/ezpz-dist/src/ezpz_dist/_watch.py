"""Bounds for waiting: a collective that fails is explained, a step that hangs ends the job."""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, Self, TypeVar

import torch.distributed as dist

from . import _diagnosis
from ._errors import CollectiveError, HangError, LostRankError, MismatchError, fold, grouped
from ._world import World, find_world, is_forked

logger = logging.getLogger(__name__)

# The part of a collective that waits for other ranks: named, timed, and explained if it fails.

_POLL = 1e-3  # seconds between two looks; before, a waiting rank looks as soon as it has the core
# Words in the errors of collectives; gloo raises a plain RuntimeError, with its file's name.
_SIGNS = ("/gloo/", "NCCL", "oneCCL", "Operation timed out", "Connection closed by peer")
_LINES = 16  # ranks, or groups of ranks at one line, that a message lists


@contextmanager
def waiting(
    what: str, world: World | None, members: Collection[int] | None = None
) -> Iterator[None]:
    """Say what this rank waits for; torch's error becomes one that names the missing members."""
    if world is None or world.info.world_size == 1:
        yield
        return
    if is_forked():
        raise CollectiveError(
            f"{what} at {_diagnosis.calling_line()} in a process that rank {world.info.rank} has "
            "forked, such as a worker of a data loader: it would take its parent's part; expected "
            "it in the process that called setup_torch"
        )
    waits = _diagnosis.waits_here()
    waits.append(what)
    start = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if not is_of_a_collective(error):
            raise
        raise explain(error, what, world, time.monotonic() - start, members) from error
    finally:
        waits.pop()


def poll(
    is_done: Callable[[], bool], limit: float, what: str, world: World,
    members: Collection[int] | None = None,
) -> None:  # fmt: skip
    """Look whether an operation is done, at most so long; used inside `waiting`."""
    start = time.monotonic()
    while not is_done():
        waited = time.monotonic() - start
        if waited > limit:
            late = TimeoutError(f"not done after {limit:g} s")
            raise explain(late, what, world, waited, members)
        time.sleep(0 if waited < _POLL else _POLL)


def is_of_a_collective(error: BaseException) -> bool:
    """Return whether it is torch.distributed's way to say that a rank did not come, or has gone."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def explain(
    error: BaseException, what: str, world: World, waited: float,
    members: Collection[int] | None = None,
) -> CollectiveError:  # fmt: skip
    """Return the error that names who is missing, where torch's names no one."""
    rank, line = world.info.rank, _diagnosis.calling_line()
    start = f"{what} at {line} on rank {rank} ({world.hosts[rank]}) failed after {waited:.1f} s: "
    responder = _diagnosis.find_responder()
    if responder is None:
        return CollectiveError(f"{start}{first_line(error)}")
    call = _diagnosis.call_roll(responder)
    if members is not None:
        call = call.among({*members, rank})
    text, missing = describe_missing(call, rank, what)
    kind = LostRankError if set(missing) & set(call.gone()) else HangError
    return kind(f"{start}{text} ({first_line(error)})", missing)


def describe_missing(call: _diagnosis.RollCall, rank: int, what: str = "") -> tuple[str, list[int]]:
    """Say who is not where this rank is, and where they are instead; return these ranks too."""
    mine = call.locations[rank]

    def is_away(other: _diagnosis.Location) -> bool:
        if what:
            return other.doing != what
        return (other.line, other.collectives) != (mine.line, mine.collectives)

    away = [one for one in call.locations.values() if one.rank != rank and is_away(one)]
    named = list(call.silent.items())[:_LINES]
    parts = [f"rank {one} on {call.hosts[one]} {fate}" for one, fate in named]
    if len(call.silent) > _LINES:
        parts.append(f"{len(call.silent)} ranks in all do not answer: {fold(call.silent)}")
    places: dict[str, list[int]] = {}
    for location in away:
        place = location.place
        if not what and location.collectives != mine.collectives:
            # Not in one of ours: torch's own tell whether they took different branches.
            theirs, my_own = ("".join(each.collectives) or "none" for each in (location, mine))
            place += f" (its last collective: {theirs}; here: {my_own})"
        places.setdefault(place, []).append(location.rank)
    for place, ranks in sorted(places.items(), key=lambda item: len(item[1]))[:_LINES]:
        one = f"rank {ranks[0]} on {call.locations[ranks[0]].host} stands"
        parts.append(f"{one if len(ranks) == 1 else f'ranks {fold(ranks)} stand'} at {place}")
    if not parts:
        return "every rank answers and waits in the same place: the network, or a device", []
    return "; ".join(parts), sorted([*call.silent, *(location.rank for location in away)])


def describe_missing_ranks() -> str | None:
    """Say which ranks are not where this one is, and where they are instead; None: unknown.

    ezpz_obs calls it, where this package is loaded. It takes two seconds at most.
    """
    responder = _diagnosis.find_responder()
    if responder is None:
        return None
    return describe_missing(_diagnosis.call_roll(responder), responder.side.rank)[0]


def first_line(error: BaseException) -> str:
    """Return what an error says, without the traces that torch appends."""
    line = str(error).strip().partition("\n")[0]
    # gloo's begin with the source file of the machine that built it, and end with advice.
    line = line.partition(". This is typically")[0]
    return re.sub(r"^\[[^]]*\] |\[[^]]*\.\w+:\d+\] ", "", line) or type(error).__name__


# One rank's end is every rank's: an uncaught exception, a signal, a time-out of `watch`.

_TELLING = 1.0  # seconds to tell others something, should the store still answer
READING = 0.1  # seconds that the store stays for the others, once they were told of the end
_failed = False
_unwinding = False


def install() -> None:
    """Let an uncaught exception of this rank end the job, and SIGTERM clean up."""
    # After init_process_group, whose own hook captures standard error while it calls ours.
    global _failed, _unwinding
    _failed = _unwinding = False
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        try:
            previous(kind, value, trace)
        finally:
            if (world := find_world()) is not None and not is_forked():
                report_failure(world, value, trace)

    sys.excepthook = hook
    on_main = threading.current_thread() is threading.main_thread()
    if on_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)


def print_error(
    kind: type[BaseException], value: BaseException, trace: TracebackType | None
) -> None:
    """Be Python's own hook, but of a `HangError` or `MismatchError` say first what it says."""
    if not issubclass(kind, HangError | MismatchError) or os.environ.get("EZPZ_DEBUG"):
        sys.__excepthook__(kind, value, trace)
        return
    ours = os.path.dirname(__file__), contextmanager.__code__.co_filename
    frames = [one for one in traceback.extract_tb(trace) if not one.filename.startswith(ours)]
    where = "".join(traceback.format_list(frames))
    print(f"{kind.__name__}: {value}\n{where}", end="", file=sys.stderr, flush=True)


def has_failed() -> bool:
    return _failed


def release_sigterm() -> None:
    """Let SIGTERM end the process as before, unless someone else handles it by now."""
    on_main = threading.current_thread() is threading.main_thread()
    if on_main and signal.getsignal(signal.SIGTERM) is _terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminated(_: int, frame: FrameType | None) -> None:
    global _unwinding
    if _unwinding or not threading.main_thread().is_alive():
        # Launchers repeat it, and a `finally` that saves is not to be cut off. At exit the main
        # thread counts as ended: there is no script to unwind, and Python would print a traceback.
        return
    _unwinding = True
    leave_word(f"SIGTERM at {_diagnosis.describe_frames(frame)[0]}")
    # Unwinds the script, so that its own `finally` and our cleanup run.
    sys.exit(128 + signal.SIGTERM)


def report_failure(world: World, value: BaseException, trace: TracebackType | None) -> None:
    """Tell every other rank what this one ends of, and to end too."""
    _diagnosis.flush()
    rank, line = world.info.rank, _diagnosis.raising_line(trace)
    name, text = type(value).__name__, first_line(value)
    reason = name if text == name else f"{name}: {text}"
    start = f"rank {rank} on {world.hosts[rank]} failed at {line}: "
    responder = _diagnosis.find_responder()
    if responder is not None:
        responder.failed_at = line
        if is_of_a_collective(value):
            # torch's error names no one; ours have told already.
            missing, _ = describe_missing(_diagnosis.call_roll(responder), rank)
            reason = f"in a collective, because {missing}"
            _diagnosis.tell(f"ezpz: {start}{reason}")
    end_job(start + reason, 128 + signal.SIGINT if isinstance(value, KeyboardInterrupt) else 1)


def end_job(text: str, status: int) -> bool:
    """Tell every other rank to end, with this status, and one to say why; return if they know."""
    global _failed
    responder = _diagnosis.find_responder()
    if responder is None or responder.lost:
        return False
    _failed = True
    side, ending = responder.side, responder.ending

    def end() -> None:
        store = side.reach()
        store.compare_set(f"left/{side.rank}", "", text)
        if store.add("ended", 1) == 1:  # else who came first has told all
            # This rank too: its responder is not to notice the end of the store.
            teller = 0 if side.rank != 0 else 1
            if status == 128 + signal.SIGINT and os.environ.get("EZPZ_TERMINAL"):
                teller = -1  # who pressed Ctrl-C knows
            side.post(store, "end", text=text, status=status, teller=teller)
        elif side.rank != 0 or not ending.wait(_TELLING / 2):
            return
        # The server's process is rank 0, or may be ended by this one's end.
        time.sleep(READING)

    return _try_to_tell(side, end)


def leave_word(text: str) -> None:
    if (responder := _diagnosis.find_responder()) is not None and not responder.lost:
        side = responder.side
        # The first reason is the true one: what follows is the way out.
        _try_to_tell(side, lambda: side.reach().compare_set(f"left/{side.rank}", "", text))


def _try_to_tell(side: _diagnosis.SideStore, request: Callable[[], object]) -> bool:
    try:
        _diagnosis.within(_TELLING, request)
    except _diagnosis.LOST as error:
        logger.debug("rank %d could not tell the others: %s", side.rank, error)
        return False
    return True


# A bound for a training step: past it all ranks' stacks are written down and the job ends.

T = TypeVar("T")

TIMED_OUT = 124  # the exit status of all ranks, as timeout(1) has it
_OVERDUE = 15.0  # seconds beyond it until a rank whose native code keeps Python's lock is dumped
_HEARING = 0.5  # seconds for this rank's responder to read what it was told before the store went


class StepWatchdog(AbstractContextManager["StepWatchdog"]):
    """Watch a training loop: if a step takes too long, say where all ranks stand and end the job.

    Once one rank has waited for ``step_timeout`` seconds, the stacks of all are written to
    standard error as one report, equal ones once, and every rank ends with exit status 124. The
    time that ranks spend at `breakpoint` does not count.

    >>> with watch(step_timeout=600) as watching:
    ...     for step in range(3):
    ...         watching.step()                  # or: for batch in watching.over(loader)

    Args:
        step_timeout: Seconds for a step; the first one may have to load and compile.
        report: A file for the report too, such as one on a shared file system.

    Raises:
        ValueError: ``step_timeout`` is not above 0.
    """

    def __init__(self, step_timeout: float, report: str | os.PathLike[str] | None = None) -> None:
        if not step_timeout > 0:
            raise ValueError(f"step_timeout {step_timeout}; expected seconds above 0")
        self._timeout = step_timeout
        self._report = None if report is None else Path(report)
        self._last = 0.0
        self._steps = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def step(self) -> None:
        """Say that a step is done: the time begins again. It costs a tenth of a microsecond."""
        self._last = time.monotonic()
        self._steps += 1

    def over(self, steps: Iterable[T]) -> Iterator[T]:
        """Yield from a loader or a range, each round being a step."""
        for each in steps:
            yield each
            self.step()

    def __enter__(self) -> Self:
        self._last = time.monotonic()
        self._over.clear()
        self._thread = threading.Thread(target=self._run, name="ezpz-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        faulthandler.cancel_dump_traceback_later()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            seen = max(self._last, _diagnosis.last_held())
            left = seen + self._timeout - time.monotonic()
            if left <= 0:
                self._end()
            # The descriptor: what stands for sys.stderr in a notebook has none.
            faulthandler.dump_traceback_later(left + _OVERDUE, exit=True, file=2)
            if self._over.wait(left):
                return

    def _end(self) -> NoReturn:
        faulthandler.cancel_dump_traceback_later()
        text = (
            f"no step for {self._timeout:g} s (steps done on this rank: {self._steps}); "
            "where every rank stands"
        )
        responder = _diagnosis.find_responder()
        if responder is None:
            frame = _diagnosis.main_frame()
            where, stack = _diagnosis.describe_frames(frame), _diagnosis.whole_stack(frame)
            alone = _diagnosis.Location(0, "this host", *where, stack=stack)
            self._write(f"ezpz: {text}\n{picture(_diagnosis.RollCall({0: alone}))}")
        else:
            call, side = _diagnosis.call_roll(responder, stack=True), responder.side
            mine = str(side.rank)

            def is_first() -> bool:
                return side.reach().compare_set("watch/report", "", mine).decode() == mine

            try:
                first = _diagnosis.within(1.0, is_first)
            except _diagnosis.LOST:
                # Rank 0 has gone with the store, as it does once another rank has told it all.
                # Where none was heard to, better twice than not at all.
                first = not responder.ending.wait(_HEARING)
            if first:
                self._write(f"ezpz: rank {side.rank}: {text}\n{picture(call)}")
            end_job(f"no step for {self._timeout:g} s on rank {side.rank}", TIMED_OUT)
        _diagnosis.flush()
        os._exit(TIMED_OUT)

    def _write(self, text: str) -> None:
        _diagnosis.tell(text)
        if self._report is not None:
            try:
                self._report.write_text(f"{text}\n")
            except OSError as error:
                _diagnosis.tell(f"ezpz: the report could not be written to {self._report}: {error}")


watch = StepWatchdog


def picture(call: _diagnosis.RollCall) -> str:
    """Return a roll call as people read it: equal stacks once, the fewest ranks first."""
    alike = grouped(((one.place, one.stack), one) for one in call.locations.values())
    parts = [f"rank {rank} on {call.hosts[rank]} {fate}" for rank, fate in call.silent.items()]
    for (place, stack), locations in sorted(alike.items(), key=lambda item: len(item[1])):
        ranks = fold(location.rank for location in locations)
        hosts = sorted({location.host for location in locations})
        where = ", ".join(hosts[:3]) + (f" and {len(hosts) - 3} more" if len(hosts) > 3 else "")
        plural = "s" if len(locations) > 1 else ""
        parts.append(f"rank{plural} {ranks} on {where}: {place}")
        parts += [f"    {line}" for line in stack]
        one = locations[0]
        if one.collectives:
            last = "; ".join(one.collectives)
            parts.append(f"    last collectives of rank {one.rank}: {last}")
    return "\n".join(parts)
