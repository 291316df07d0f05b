"""A save that goes on while the training does, and the one place where its error comes up."""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

from ezpz_dist._errors import CheckpointError
from ezpz_dist._world import finish_before_leaving

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Saving:
    """A check-point that is being written, or is written.

    Attributes:
        step: The step.
        folder: Where it is, or will be: a path, or a URL.
    """

    def __init__(self, step: int, folder: str) -> None:
        self.step: int = step
        self.folder: str = folder
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._told = False

    def __repr__(self) -> str:
        return f"<Saving step {self.step} to {self.folder}, {'done' if self.done else 'going on'}>"

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> str:
        """Wait until the check-point is complete; return its folder.

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
        self._told = True
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
        global _going, _function
        # A daemon: the interpreter would wait for another without bound, and before our atexit.
        thread = threading.Thread(target=self.run, args=(work,), name="ezpz-save", daemon=True)
        _going = self
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
    def is_unheard(self) -> bool:
        """Whether its error has not come up yet."""
        return self._error is not None and not self._told


_going: Saving | None = None
_function = 0
"""The process of multiprocessing whose end is seen to."""

AT_EXIT = 600.0
"""Seconds that `cleanup`, or a process at its end, stays for a save that goes on."""


def _forget() -> None:
    global _going
    _going = None


# A child has no thread that saves: at its end it would wait for ever.
os.register_at_fork(after_in_child=_forget)


def finish_saving(timeout: float | None = None) -> None:
    """Wait for the asynchronous save that goes on, if any. `cleanup` does it too.

    Args:
        timeout: Seconds; None: see `Saving.wait`.

    Raises:
        CheckpointError: It could not be written, and nobody was told yet.
    """
    global _going
    saving = _going
    if saving is None:
        return
    if saving.done and not saving.is_unheard:
        _going = None
        return
    saving.wait(timeout)
    _going = None


def _finish_in_time() -> None:
    finish_saving(AT_EXIT)


def _at_exit() -> None:
    global _failure
    try:
        _finish_in_time()
    except Exception:  # whatever ended the save, there is no caller left to raise it to
        logger.exception("the last asynchronous save failed; the exit status is 1")
        _failure = _failure or _Failure()
        # Let go of with sys, after all other modules: their open files are written by then.
        vars(sys)["ezpz_dist's failure"] = _failure


class _Failure:
    """Ends the process with 1, after all else: what atexit's functions raise Python ignores."""

    def __del__(self, end: Callable[[int], object] = os._exit) -> None:
        end(1)


_failure: _Failure | None = None


def _end_function() -> None:
    if _failure is not None:
        raise SystemExit(1)
