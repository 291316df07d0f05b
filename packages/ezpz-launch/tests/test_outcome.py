import signal

import pytest

from ezpz_launch._launch import Control, Launch, Status, describe, exit_status_of, how

LAUNCH = Launch(
    argv=("mpiexec",),
    nproc=4,
    hosts=("alpha", "beta"),
    ppn=2,
    on_this_host=False,
    environment={},
    control=Control("ID.0", 5),
)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (1, "exited with status 1"),
        (75, "exited with status 75"),
        (128, "exited with status 128"),
        (137, "was killed by SIGKILL (exit status 137)"),
        (139, "was killed by SIGSEGV (exit status 139)"),
        (255, "exited with status 255"),
    ],
)
def test_what_an_exit_status_means(status, text):
    assert how(status) == text


def test_rank_and_host_are_named():
    assert describe(LAUNCH, 3, 7) == "rank 3 on beta exited with status 7, first of all ranks"


def outcome(ends, returncode=0, *, told=None, hang=False, starts=range(4)):
    status, said = Status(4), []
    for rank in starts:
        status.take(("start", rank, 100 + rank))
    for rank, value in ends:
        status.take(("end", rank, value))
    number = exit_status_of(LAUNCH, status, returncode, told=told, hang=hang, say=said.append)
    return number, said


ALL = [(0, 0), (1, 0), (2, 0), (3, 0)]


@pytest.mark.parametrize(
    ("ends", "returncode", "more", "expected"),
    [
        (ALL, 0, {}, 0),
        ([(2, 6), (0, 1), (1, 1), (3, 1)], 7, {}, 6),
        ([(0, 0), (2, 137), (1, 143), (3, 143)], 9, {}, 137),
        ([(0, 75), (1, 75), (2, 75), (3, 75)], 75, {}, 75),
        ([(0, 143)], -15, {"told": signal.SIGTERM}, 143),
        ([(0, 1)], 1, {"told": signal.SIGINT}, 130),
        ([(0, 75), (1, 75)], 75, {"told": signal.SIGTERM}, 75),
        ([(0, 0), (1, 1), (2, 75)], 75, {"told": signal.SIGTERM}, 143),
        ([], 0, {"told": signal.SIGPIPE}, 141),
        ([(0, 134)], 134, {"hang": True}, 124),
        ([(0, 134)], 134, {"hang": True, "told": signal.SIGTERM}, 143),
    ],
)
def test_the_exit_status(ends, returncode, more, expected):
    assert outcome(ends, returncode, **more)[0] == expected


def test_what_hydra_adds_is_not_passed_on():
    assert outcome(ALL, 141) == (
        0,
        ["every rank ended with 0; the launcher with 141, which is not passed on"],
    )


@pytest.mark.parametrize(("returncode", "expected"), [(0, 1), (1, 1), (5, 5), (-9, 137)])
def test_silent_ranks_are_no_success(returncode, expected):
    number, (said,) = outcome([(0, 0), (2, 0)], returncode)
    assert number == expected
    assert said.endswith("ranks that did not report their end: 1 on alpha, 3 on beta")
    assert how(expected if returncode else 0) in said


def test_none_had_started():
    number, (said,) = outcome([], 2, starts=())
    assert number == 2
    assert "0 on alpha, 1 on alpha, 2 on beta, 3 on beta; none had started" in said
