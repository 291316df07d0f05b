"""The debugger itself: pdb, at the caller's line, with the other ranks on a lead."""

from __future__ import annotations

import pdb  # noqa: T100  # it is what this is about
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from ezpz_dist._hangs.doing import held

from .console import Console


class RankPdb(pdb.Pdb):
    """pdb for one rank of several.

    It stops at the call itself, inside the `except` block that it stands in, as `breakpoint`
    does from Python 3.13 on; earlier ones stop a line later, where an exception's name may be
    gone. Beyond pdb's own there are the commands ``release`` and ``pm``.

    Attributes:
        traces: Whether Python is to trace the program from here on: to step, or to break.

    Args:
        console: Where to read and to write; closed when the program goes on.
        prompt: What it says before each command.
        release: Lets the other ranks go on; called once.
        exception: The exception that is being handled where it was called.
    """

    def __init__(
        self,
        console: Console,
        prompt: str,
        release: Callable[[], None],
        exception: BaseException | None,
    ) -> None:
        # SIGINT stays whose it is.
        super().__init__(stdin=console.stdin, stdout=console.stdout, nosigint=True)
        self.prompt = prompt
        self.traces = False
        self._console = console
        self._release: Callable[[], None] | None = release
        self._exception = exception

    def begin(self, frame: FrameType) -> None:
        """Take commands at a frame until one of them lets the program go on.

        The caller then has to `sys.settrace` our `trace_dispatch`, if `traces`: as the last
        thing, since every call is traced from there on. After ``quit``, `quitting` is true.
        """
        self.reset()
        outer: FrameType | None = frame
        while outer is not None:
            outer.f_trace = self.trace_dispatch
            self.botframe = outer
            outer = outer.f_back
        self.traces = True
        self.interaction(frame, None)

    def interaction(self, *place: Any) -> None:
        """Take commands; a `watch` is told that this may take its time."""
        with held():
            super().interaction(*place)

    def set_continue(self) -> None:
        """Let the program and the other ranks go on."""
        super().set_continue()
        self.traces = bool(self.breaks)
        self._let_go()
        if not self.traces:
            self._console.close()

    def set_quit(self) -> None:
        """Abort the program, and with it the job."""
        super().set_quit()
        self._console.close()

    def do_release(self, _arg: str) -> None:
        """Let the other ranks go on while this one stays in the debugger.

        Needed before a step over a collective. From then on their collectives wait for this
        rank, and time out.
        """
        self._let_go()
        self.message("the other ranks go on; their collectives wait for this one, and time out")

    def do_pm(self, _arg: str) -> None:
        """Look at the frames of the exception that is being handled, to where it was raised.

        ``q`` leads back.
        """
        error = self._exception
        if error is None or error.__traceback__ is None:
            self.error("no exception was being handled where breakpoint() was called")
            return
        inner = pdb.Pdb(stdin=self.stdin, stdout=self.stdout, nosigint=True, readrc=False)
        inner.use_rawinput = self.use_rawinput
        inner.prompt = "(pm) "
        # Going on in there would switch the outer one's tracing off.
        tracing = sys.gettrace()
        inner.reset()
        inner.interaction(None, error.__traceback__)
        sys.settrace(tracing)

    def _let_go(self) -> None:
        # Once: released, the others may have ended, and the store with them.
        release, self._release = self._release, None
        if release is not None:
            release()
