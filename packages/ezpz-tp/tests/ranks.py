"""Tests whose whole body runs on several ranks."""

from functools import partial, wraps

from ezpz_tp.testing import run_ranks


def on_ranks(ranks, **how):
    """Call a test on every one of so many ranks, as `run_ranks` does; each asserts what it sees."""

    def decorate(body):
        @wraps(body)
        def test(**given):
            run_ranks(partial(call_body, test, given), ranks, **how)

        return test

    return decorate


def call_body(test, given):
    """Call what `on_ranks` wraps: a process finds the wrapper under the test's name."""
    return test.__wrapped__(**given)
