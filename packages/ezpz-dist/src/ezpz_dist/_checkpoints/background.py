"""Saving in the background, and how its error reaches the caller."""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable

from ezpz_dist._errors import CheckpointError
from ezpz_dist._world import finish_before_leaving

logger = logging.getLogger(__name__)


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
        """Do the work; keep its error for `wait`."""
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it ends a thread; `wait` raises it
            self._error = error
        finally:
            self._done.set()

    def start(self, work: Callable[[], object]) -> None:
        """Do the work in a separate thread; `finish_saving` waits for it, also at exit."""
        global _current
        # A daemon: the interpreter would wait for another without bound, and before our atexit.
        thread = threading.Thread(target=self.run, args=(work,), name="ezpz-save", daemon=True)
        _current = self
        finish_before_leaving(finish_in_time)
        finish_at_exit()
        thread.start()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, and a call has raised its error, if there was one."""
        return self.done and (self._raised or self._error is None)


_current: Saving | None = None
AT_EXIT = 600.0  # seconds that `cleanup`, or a process at its end, waits for a save that goes on


def forget_current() -> None:
    global _current
    _current = None


# A child has no thread that saves: at its end it would wait for ever.
os.register_at_fork(after_in_child=forget_current)


def finish_saving(timeout: float | None = None) -> None:
    """Wait for the asynchronous save that goes on, if any. `cleanup` does it too.

    Args:
        timeout: Seconds; None: see `Saving.wait`.

    Raises:
        CheckpointError: It could not be written, and no call has raised it yet.
    """
    if _current is not None and not _current.is_over:
        _current.wait(timeout)
    forget_current()


def finish_in_time() -> None:
    finish_saving(AT_EXIT)


# At the end of a process, a failed save makes the exit status 1.

_FAILURE = "ezpz_dist's failure"
_finalized = 0  # the process of multiprocessing whose end is seen to


def finish_at_exit() -> None:
    """Have the save finished when the process ends."""
    global _finalized
    atexit.unregister(finish_or_fail)
    atexit.register(finish_or_fail)  # the last comes first: before a `cleanup` of setup_torch's
    if multiprocessing.parent_process() is not None and _finalized != os.getpid():
        _finalized = os.getpid()
        # A function's end: there Python < 3.14 calls nothing of atexit's.
        multiprocessing.util.Finalize(None, finish_or_fail, exitpriority=1)
        multiprocessing.util.Finalize(None, exit_if_failed, exitpriority=-1000)


def finish_or_fail() -> None:
    try:
        finish_in_time()
    except Exception:  # whatever ended the save, there is no caller left to raise it to
        logger.exception("the last asynchronous save failed; the exit status is 1")
        # Let go of with sys, after all other modules: their open files are written by then. Nothing
        # else holds it: from Python 3.12 on a module's own names can outlive sys.
        if _FAILURE not in vars(sys):
            vars(sys)[_FAILURE] = ExitWithFailure()


class ExitWithFailure:
    """Ends the process with 1, after all else: what atexit's functions raise Python ignores."""

    def __del__(self, end: Callable[[int], object] = os._exit) -> None:
        end(1)


def exit_if_failed() -> None:
    if _FAILURE in vars(sys):
        raise SystemExit(1)
