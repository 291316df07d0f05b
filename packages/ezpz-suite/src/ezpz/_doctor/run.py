"""All checks at once, each in a process of its own, until the last has answered or time is over."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from ezpz_topo import CheckResult

from .found import DoctorError, find_checks
from .running import Running

TIMEOUT: Final = 4.0
"""Seconds that all checks have together: the whole command then takes 5 at most."""

_LOOK = 0.1
"""Seconds between two looks at which processes have ended without a word."""


def run_checks(
    only: Sequence[str] = (),
    *,
    timeout: float = TIMEOUT,
    watch: Callable[[Sequence[str]], None] | None = None,
) -> list[CheckResult]:
    """Run the checks of all installed packages at once, and return what each says, by name.

    One that raises, crashes, hangs, or cannot be imported is an error that names it and its
    package; one that had no time left after its imports, or is not through with them (in less than
    a minute), is a warning. Nothing that a check started is left afterwards.

    Args:
        only: Names of those to run; all if empty.
        timeout: Seconds that they have together.
        watch: Called with the names of those that still run, some times a second.

    Raises:
        DoctorError: There are no checks, none of one of these names, or no room for processes.
        ValueError: ``timeout`` is not above 0 and finite.
    """
    if not 0 < timeout < float("inf"):
        raise ValueError(f"timeout={timeout}; expected seconds above 0")
    checks = find_checks(only)
    deadline = time.monotonic() + timeout
    running: list[Running] = []
    try:
        try:
            running.extend(Running(check, timeout, deadline) for check in checks)
        except OSError as error:
            raise DoctorError(
                f"no process can be started for the check {checks[len(running)].name!r} "
                f"({error.strerror}); expected room for {len(checks)}; see ulimit -u, or take some "
                "at a time with --only"
            ) from error
        results = [each.end() for each in _as_they_end(running, deadline, watch)]
    finally:
        for each in running:
            each.kill()
    return sorted(results, key=lambda result: (result.name, result.source))


def _as_they_end(
    running: Sequence[Running],
    deadline: float,
    watch: Callable[[Sequence[str]], None] | None,
) -> Iterator[Running]:
    """Yield each check when it has answered or ended; at the deadline those that are left."""
    left = list(running)
    with selectors.DefaultSelector() as selector:
        for each in running:
            for descriptor in (each.answer, each.printed):
                selector.register(descriptor, selectors.EVENT_READ, each)
        while left and time.monotonic() < deadline:
            if watch is not None:
                watch([each.check.name for each in left])
            for key, _ in selector.select(min(_LOOK, max(0.0, deadline - time.monotonic()))):
                if key.data.read(key.fd) is None:
                    selector.unregister(key.fd)
            for each in [each for each in left if each.is_done]:
                for descriptor in (each.answer, each.printed):
                    if descriptor in selector.get_map():
                        selector.unregister(descriptor)
                left.remove(each)
                yield each
    yield from left
