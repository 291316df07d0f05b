"""The arithmetic of the scale simulation: fits, verdicts, what is parsed."""

import sys

import pytest
from scaling.fresh import whole
from scaling.growth import NODES, Curve, fit
from scaling.strace import Call, kind_of, kinds, looked_at


def curve(goal, cost):
    return Curve("groups", "making them", "ms", "nodes", "measured", cost, goal)


def power(exponent, wobble=0.0):
    """Return three samples a size, of which two wobble to either side."""
    return {
        size: [3 * size**exponent * factor for factor in (1 - wobble, 1, 1 + wobble)]
        for size in NODES
    }


def test_the_exponent_of_a_power_is_found_and_the_interval_is_that_of_least_squares():
    for exponent in (0.0, 0.5, 1.0, 2.0):
        found = fit([(size, some[1]) for size, some in power(exponent).items()])
        assert found.exponent == pytest.approx(exponent)
        assert found.low == pytest.approx(found.high)
    # The reference is scipy's linregress of the logarithms, and its t.ppf(0.975, 2).
    found = fit([(1, 1.0), (10, 12.0), (100, 80.0), (1000, 1100.0)])
    assert found.exponent == pytest.approx(0.994809, abs=1e-6)
    assert (found.low, found.high) == pytest.approx((0.816886, 1.172732), abs=1e-3)

    for points in ([(5.0, 1.0)], [(5.0, 1.0), (5.0, 2.0)], [(1, 1), (2, 0)]):
        with pytest.raises(ValueError, match="at least two sizes"):
            fit(points)


def test_verdicts():
    for goal, exponent, wobble, verdict in (
        (1, 1.0, 0.02, "met"), (1, 0.3, 0.02, "met"), (1, 1.3, 0.02, "MISSED"),
        (0, 0.0, 0.02, "met"), (0, 1.0, 0.02, "MISSED"), (1, 1.1, 0.6, "unclear"),
        (None, 2.0, 0.0, ""),
    ):  # fmt: skip
        assert curve(goal, power(exponent, wobble)).verdict == verdict
    # A fixed cost does not hide growth: the verdict is that of the largest sizes.
    cost = {size: [1 + 1e-5 * size**2] for size in NODES}
    assert curve(1, cost).fitted().exponent < 1
    assert curve(1, cost).verdict == "MISSED"
    # A limit of the system holds for the largest size, too.
    for longest, verdict in ((131_071.0, "met"), (131_072.0, "MISSED")):
        cost = {size: [400.0] for size in NODES} | {NODES[-1]: [longest]}
        counted = Curve("planning", "word", "bytes", "nodes", "counted", cost, most=131_071)
        assert counted.verdict == verdict
    # What has no fit has no verdict.
    assert curve(0, {size: [0.0] for size in NODES}).verdict == "unclear"


def test_calls_that_name_a_file_are_found():
    lines = [
        '77 openat(AT_FDCWD</home>, "/opt/a.py", O_RDONLY|O_CLOEXEC) = 3</opt/a.py>',
        '77 newfstatat(AT_FDCWD</home>, "/opt/../opt/b", 0x7f, 0) = -1 ENOENT (No such file)',
        '[pid 9] access("/etc/ld.so.preload", R_OK) = -1 ENOENT (No such file or directory)',
        '77 newfstatat(3</opt/a.py>, "", {st_mode=S_IFREG|0644, ...}, AT_EMPTY_PATH) = 0',
        '77 stat("c.py", 0x7f) = 0',
        '77 openat(4</opt>, "d", O_RDONLY) = 5</opt/d>',
        # What another thread cuts in two.
        '77  openat(AT_FDCWD</>, "/opt/e", O_RDONLY <unfinished ...>',
        "77  <... openat resumed>) = 3</opt/e>",
        "77 +++ exited with 0 +++",
    ]
    assert looked_at(list(whole(lines)), "/home") == [
        Call("openat", "/opt/a.py", True, True),
        Call("newfstatat", "/opt/b", False, True),
        Call("access", "/etc/ld.so.preload", False, True),
        Call("newfstatat", "/opt/a.py", True, False),
        Call("stat", "/home/c.py", True, True),
        Call("openat", "/opt/d", True, True),
        Call("openat", "/opt/e", True, True),
    ]


def test_a_folder_is_not_what_begins_like_it():
    folders = kinds("/tmp/job")
    assert kind_of(sys.prefix + "/lib/x.py", folders) == "environment"
    assert kind_of("/tmp/job", folders) == kind_of("/tmp/job/train.py", folders) == "job"
    assert kind_of("/tmp/job2/train.py", folders) == "node"
    assert kind_of("/etc/ld.so.preload", folders) == "node"
