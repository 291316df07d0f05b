"""A plugin: keeps tests that take long marked as slow, so that the quick ones stay quick.

It adds the CPU time of each test to its report (``--junitxml``), that of processes which it has
waited for included. In CI an unmarked test that takes too long fails.
"""

import os
import resource

import pytest

LIMIT = 5.0
"""Seconds of CPU that a test may take which is not marked slow; people mark it from 3 s."""


def cpu_seconds():
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    before = cpu_seconds()
    result = yield
    seconds = cpu_seconds() - before
    item.user_properties.append(("cpu", round(seconds, 2)))
    is_marked = any(item.get_closest_marker(mark) for mark in ("slow", "end_to_end"))
    if seconds > LIMIT and not is_marked and os.environ.get("CI") == "true":
        pytest.fail(f"took {seconds:.1f} s of CPU; expected {LIMIT} s at most; mark it slow")
    return result
