"""Each kind of fault on one of four hosts, of which two are spares: the chaos, without chance."""

import contextlib

import pytest
from tests.conftest import lacking, load

chaos = load("faults.chaos")


@pytest.fixture(scope="module")
def place(sandbox, tool):
    tool("mpiexec")
    if reason := sandbox.missing():
        lacking(reason)
    with contextlib.ExitStack() as stack:
        yield chaos.Hydra(stack)


@pytest.mark.parametrize("kind", chaos.KINDS)
def test_the_verdict_is_right_and_the_training_is_done_as_if_nothing_had_been(
    place, tmp_path, kind
):
    assert chaos.Case(1, place, kind).run(tmp_path) == [], (tmp_path / "err").read_text()
