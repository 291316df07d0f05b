"""A breakpoint on one rank, while the others wait.

- The rank stops at the line of the call, also inside an ``except`` block.
- pdb is at the rank's terminal. A rank without one (below ezpz-launch, mpiexec or srun) listens
  at a free port of the loopback interface, and prints the one command that attaches.
- That command has a token: without it nobody on the host can attach, and run code as the user.
- Whoever leaves with Ctrl-D, or loses the connection, leaves the rank waiting: the command
  attaches once more.
- The other ranks wait however long it takes, and their watchdogs with them. ``c`` lets all go on,
  ``release`` only the others, and ``q`` ends the job. Nothing listens any more then.
- If the rank never comes, the others raise a HangError after the time-out; if it has ended, a
  LostRankError.
"""

from __future__ import annotations

import bdb
import hmac
import io
import logging
import os
import pdb  # noqa: T100  # it is what this is about
import secrets
import shlex
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import IO, Any, cast

from ezpz_topo import get_hostname, get_rank_info

from ._attach import VARIABLE
from ._diagnosis import call_roll, find_responder, flush, held
from ._errors import HangError, LostRankError
from ._watch import waiting
from ._world import World, current_world

logger = logging.getLogger(__name__)

# How often each line has called: the ranks' n-th calls at one line belong together.
_calls: Counter[tuple[str, int]] = Counter()


def breakpoint(rank: int = 0) -> None:  # noqa: A001  # the name that was promised
    """Stop one rank in pdb, at this line; the others wait for it, however long that takes.

    Collective: every rank calls this, at the same line. The commands are pdb's, and

    - ``c`` lets all ranks continue; ``q`` raises `bdb.BdbQuit`, which ends the job;
    - ``n``, ``s``, ``r`` run this rank alone, and the others still wait: type ``release``
      before you step over a collective.

    pdb is at the rank's own terminal. Where it has none (below ezpz-launch, mpiexec or srun, in a
    batch job), a command is printed that attaches to it from any shell on the rank's host. Leaving
    that with Ctrl-D keeps the rank waiting.

    If one rank alone calls this, because of an exception that the others do not have, they
    continue to their next collective. There they wait for ``setup_torch(timeout=...)``, so give
    enough time to look around. ``PYTHONBREAKPOINT=0`` switches it off, as it does Python's own.

    Args:
        rank: The rank to stop.

    Raises:
        ValueError: There is no such rank; on every rank.
        HangError: The rank to stop did not come here within the time-out.
        LostRankError: It ended while the others waited.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        bdb.BdbQuit: On the stopped rank: ``q``.
    """
    world = current_world("breakpoint()")
    size = 1 if world is None else world.info.world_size
    if not 0 <= rank < size:
        raise ValueError(f"breakpoint(rank={rank}); expected a rank from 0 to {size - 1}")
    if os.environ.get("PYTHONBREAKPOINT") == "0":
        return
    if size == 1:
        world = None  # no other rank waits
    frame = sys._getframe(1)  # noqa: SLF001  # the caller's, as pdb itself finds it
    place = (frame.f_code.co_filename, frame.f_lineno)
    line = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    key = f"breakpoint/{rank}/{line}/{_calls[place]}"
    _calls[place] += 1
    if world is not None and world.info.rank != rank:
        with waiting(f"breakpoint(rank={rank})", world), held():
            _wait(world, rank, key, line)
        return
    with waiting(f"pdb, breakpoint(rank={rank})", world):
        debugger = _debug(world, key, line, frame)
    if debugger.quitting:
        raise bdb.BdbQuit
    if debugger.traces:
        # The last thing: from here on every call is traced.
        sys.settrace(debugger.trace_dispatch)


# The rank that is debugged.


def _debug(world: World | None, key: str, line: str, frame: FrameType) -> RankPdb:
    info = get_rank_info() if world is None else world.info
    host = get_hostname() if world is None else world.hosts[info.rank]

    def release() -> None:
        if world is not None:
            world.store.set(f"{key}/over", "")

    prompt = "(Pdb) "
    if world is not None:
        prompt = f"(Pdb rank {info.rank}) "
        world.store.set(f"{key}/here", "")
    flush()
    console = None
    if not has_terminal():
        console = RemoteConsole()
        print(
            f"ezpz: rank {info.rank} of {info.world_size} stops at {line} and waits for you; "
            f"type in a shell on {host}: {console.command}",
            file=sys.stderr,
            flush=True,
        )
        with held():
            console.wait_for_person()
    debugger = RankPdb(console, prompt, release)
    if world is not None:
        debugger.message(
            f"rank {info.rank} on {host}; the others wait: c lets all go on, release the others, "
            "q ends the job"
        )
    debugger.begin(frame)
    return debugger


def has_terminal() -> bool:
    """True if standard input and output are a terminal, and this process may read from it."""
    if not (os.isatty(0) and os.isatty(1)):
        return False
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # no job control: it is not the terminal of this session, below torchrun, say
        return True


_TOKEN_TIME = 10.0  # seconds to send the token: whoever has none cannot keep the port busy


class RemoteConsole:
    """Standard input and output of pdb, for one person at a time, by a token."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._token = secrets.token_hex(16)
        self._link: socket.socket | None = None
        self._lines: IO[str] = io.StringIO()  # of the person
        self._last = ""  # what was written last: the prompt, when a line is read
        host, port = self._listener.getsockname()
        attach = shlex.join([sys.executable, "-m", f"{__package__}._attach", host, str(port)])
        self.command = f"{VARIABLE}={self._token} {attach}"

    def wait_for_person(self) -> None:
        self._disconnect()
        while True:
            link, _ = self._listener.accept()
            link.settimeout(_TOKEN_TIME)
            lines = link.makefile(encoding="utf-8", errors="replace")
            token = ""
            with suppress(OSError):  # silent, or gone already
                token = lines.readline(len(self._token) + 1).strip()
            if hmac.compare_digest(token.encode(), self._token.encode()):
                break
            lines.close()
            link.close()
        link.settimeout(None)
        self._link = link
        self._lines = lines

    def readline(self, _limit: int = -1) -> str:
        while True:
            with suppress(OSError):  # the connection is lost
                line = self._lines.readline()
                if line:
                    return line
            self.wait_for_person()
            self.write(self._last)

    def write(self, text: str) -> int:
        self._last = text
        if self._link is not None:
            with suppress(OSError):  # the connection is lost, which the next readline sees
                self._link.sendall(text.encode("utf-8", "replace"))
        return len(text)

    def flush(self) -> None:
        """Do nothing: what is written is sent."""

    def close(self) -> None:
        self._disconnect()
        self._listener.close()

    def _disconnect(self) -> None:
        self._lines.close()
        if self._link is not None:
            self._link.close()
            self._link = None


class RankPdb(pdb.Pdb):
    """pdb for one rank of several, with the command ``release`` beside its own."""

    # It stops at the call itself, inside the `except` block that it stands in, as `breakpoint` does
    # from Python 3.13 on; earlier ones stop a line later, where an exception's name may be gone.

    def __init__(
        self, console: RemoteConsole | None, prompt: str, release: Callable[[], None]
    ) -> None:
        file = cast("IO[str] | None", console)  # None: standard input, with line editing
        # The handler of SIGINT is left alone.
        super().__init__(stdin=file, stdout=file, nosigint=True)
        self.prompt = prompt
        self.traces = False
        self._console = console
        self._release: Callable[[], None] | None = release

    def begin(self, frame: FrameType) -> None:
        """Take commands at a frame; then, if `traces`, the caller sets `trace_dispatch` last."""
        self.reset()
        outer: FrameType | None = frame
        while outer is not None:
            outer.f_trace = self.trace_dispatch
            self.botframe = outer
            outer = outer.f_back
        self.traces = True
        self.interaction(frame, None)

    def interaction(self, *place: Any) -> None:
        with held():
            super().interaction(*place)

    def set_continue(self) -> None:
        super().set_continue()
        self.traces = bool(self.breaks)
        self._release_others()
        if not self.traces:
            self._close()

    def set_quit(self) -> None:
        super().set_quit()
        self._close()

    # The docstring of a command is its help.

    def do_release(self, _arg: str) -> None:
        """Let the other ranks go on while this one stays in the debugger.

        Needed before a step over a collective. From then on their collectives wait for this
        rank, and time out.
        """
        self._release_others()
        self.message("the other ranks go on; their collectives wait for this one, and time out")

    def _release_others(self) -> None:
        # Once: released, the others may have ended, and the store with them.
        release = self._release
        self._release = None
        if release is not None:
            release()

    def _close(self) -> None:
        if self._console is not None:
            self._console.close()


# The ranks that wait.

EVERY = 60.0  # seconds after which one of them logs that, and whether the rank can still come

_MIN_PAUSE = 0.05  # seconds between two looks whether it is over
_MAX_PAUSE = 5.0
_REQUESTS = 2000  # looks a second, of all ranks together, that the store's server is given


def _wait(world: World, rank: int, key: str, line: str) -> None:
    """Wait until the debugged rank lets go; raise if it does not come, or has ended."""
    store = world.store
    is_reporter = store.add(f"{key}/others", 1) == 1
    # Often enough for a person, and few enough requests for one server.
    pause = min(_MAX_PAUSE, max(_MIN_PAUSE, world.info.world_size / _REQUESTS))
    began = time.monotonic()
    next_look = began + EVERY
    is_here = False
    while not store.check([f"{key}/over"]):
        # Not a wait at the store: signals are served meanwhile.
        time.sleep(pause)
        now = time.monotonic()
        is_here = is_here or store.check([f"{key}/here"])
        if not is_here and now - began > world.timeout:
            raise HangError(
                f"breakpoint(rank={rank}) at {line} on rank {world.info.rank} "
                f"({world.hosts[world.info.rank]}): rank {rank} on {world.hosts[rank]} did not "
                f"come within {world.timeout:g} s; expected every rank to call it at that line; "
                f"{_locate(rank)[0]}",
                [rank],
            )
        if is_reporter and now > next_look:
            next_look = now + EVERY
            place, has_ended = _locate(rank)
            if has_ended:
                store.set(f"{key}/over", f"{place}; the ranks at breakpoint(rank={rank}) waited")
            logger.warning(
                "breakpoint(rank=%d) at %s: the other ranks wait for %.0f s; %s",
                rank, line, now - began, place,
            )  # fmt: skip
    lost = store.get(f"{key}/over").decode()
    if lost:
        raise LostRankError(f"breakpoint(rank={rank}) at {line}: {lost}", [rank])


def _locate(rank: int) -> tuple[str, bool]:
    """Return a rank's location, or its fate, and whether it has ended."""
    responder = find_responder()
    if responder is None:
        return f"rank {rank} cannot be asked", False
    call = call_roll(responder)
    if rank in call.locations:
        return str(call.locations[rank]), False
    fate = call.silent.get(rank, "is not known of")
    place = f"rank {rank} on {call.hosts.get(rank, '?')} {fate}"
    return place, fate.startswith(("has ended", "has left"))
