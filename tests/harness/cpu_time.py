"""A plugin: keeps tests that take long marked as slow, so that the quick ones stay quick.

It adds the CPU seconds of each test, with those of the processes that it uses, to its report
(``--junitxml``). In CI an unmarked test that takes too long fails.
"""

import os
from pathlib import Path

import pytest

LIMIT = 5.0
"""Seconds of CPU that a test may take which is not marked slow; people mark it from 3 s."""

_TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds():
    """Return the CPU time of this process, its descendants, and those that they have waited for."""
    times = {}
    children = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # What follows the command's name, which may hold anything.
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(path.parent.name)
        times[pid] = sum(map(int, fields[11:15]))
        children.setdefault(int(fields[1]), []).append(pid)
    total = 0
    waiting = [os.getpid()]
    while waiting:
        pid = waiting.pop()
        total += times.get(pid, 0)
        waiting += children.get(pid, [])
    return total / _TICK


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    is_measured = item.config.option.xmlpath or os.environ.get("CI") == "true"
    if not is_measured:
        return (yield)
    before = cpu_seconds()
    result = yield
    seconds = cpu_seconds() - before
    item.user_properties.append(("cpu", round(seconds, 2)))
    is_marked = any(item.get_closest_marker(mark) for mark in ("slow", "end_to_end"))
    if seconds > LIMIT and not is_marked and os.environ.get("CI") == "true":
        pytest.fail(f"took {seconds:.1f} s of CPU; expected {LIMIT} s at most; mark it slow")
    return result
