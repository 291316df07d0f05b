import subprocess
import sys

import pytest

from ezpz_launch._retry import Attempt, Retries, ends_with_import_error


@pytest.mark.parametrize(
    ("attempt", "why"),
    [
        (Attempt(0), "it succeeded"),
        (Attempt(2), "usage error"),
        (Attempt(75), "requeued"),
        (Attempt(126), "cannot be executed"),
        (Attempt(127), "not found"),
        (Attempt(130, told=True), "told to end"),
        (Attempt(143, told=True), "told to end"),
        (Attempt(1, told=True), "told to end"),
        (Attempt(1, import_error=True), "failed import"),
    ],
)
def test_what_another_attempt_does_not_mend(attempt, why):
    decision = Retries(5).decide(attempt)
    assert (decision.retry, decision.pause) == (False, 0.0)
    assert why in decision.why


@pytest.mark.parametrize("status", [1, 3, 124, 134, 137, 139, 143, 255])
def test_what_another_attempt_can_mend(status):
    decision = Retries(1).decide(Attempt(status))
    assert (decision.retry, decision.pause) == (True, 1.0)
    assert decision.why == f"exit status {status}: retry 1 of 1 in 1 s"


def test_the_pause_doubles_up_to_a_minute():
    retries = Retries(2000)
    pauses = [retries.decide(Attempt(1, progress=step)).pause for step in range(2000)]
    assert pauses[:8] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert set(pauses[8:]) == {60.0}


def test_no_more_than_allowed():
    retries = Retries(2)
    decisions = [retries.decide(Attempt(1, progress=step)) for step in range(3)]
    assert [decision.retry for decision in decisions] == [True, True, False]
    assert decisions[2].why == "all retries are used (2)"
    assert retries.done == 2
    none = Retries(0).decide(Attempt(1))
    assert (none.retry, none.why) == (False, "no --retries")
    with pytest.raises(ValueError, match="expected 0 or more"):
        Retries(-1)


@pytest.mark.parametrize(
    ("steps", "retried"),
    [
        ([None, None], [True, False]),
        ([0, 0, 0], [True, True, False]),
        ([10, 20, 30, 30, 30], [True, True, True, True, False]),
        ([10, 10, 20, 20, 30], [True] * 5),
        # a restart from an earlier check-point is no progress until it is past the highest
        ([10, 5, 7], [True, True, False]),
        ([10, 5, 11, 5, 12], [True] * 5),
        ([10, None, None], [True, True, False]),
        ([None, 10, None, None], [True, True, True, False]),
    ],
)
def test_two_attempts_in_a_row_without_progress_are_the_last(steps, retried):
    retries = Retries(100)
    decisions = [retries.decide(Attempt(1, progress=step)) for step in steps]
    assert [decision.retry for decision in decisions] == retried
    for decision in decisions:
        assert ("2 attempts in a row without progress" in decision.why) is not decision.retry


def test_why_names_the_highest_step():
    retries = Retries(9)
    for step in (40, 30):
        assert retries.decide(Attempt(1, progress=step)).retry
    assert "(step 40 is the highest)" in retries.decide(Attempt(1, progress=30)).why
    retries = Retries(9)
    assert retries.decide(Attempt(1)).retry
    assert "(none reported any)" in retries.decide(Attempt(1)).why


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import no_such_module_at_all", True),
        ("from os import no_such_name", True),
        ("raise ImportError('two\\n\\nlines: of it')", True),
        ("class MyImportError(Exception): pass\nraise MyImportError('x')", False),
        ("try:\n import no_such_module\nexcept ImportError:\n raise RuntimeError('x')", False),
        ("try:\n 1 / 0\nexcept ZeroDivisionError:\n import no_such_module", True),
        ("raise ValueError('ImportError: not really')", False),
        ("print('ModuleNotFoundError: said, not raised')", False),
        ("pass", False),
    ],
)
def test_python_that_cannot_import(code, expected):
    stderr = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, timeout=60
    ).stderr
    assert ends_with_import_error(stderr) is expected
    prefixed = b"".join(b"[3@nid001] " + line for line in stderr.splitlines(keepends=True))
    assert ends_with_import_error(prefixed) is expected
