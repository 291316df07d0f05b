import math
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ezpz_obs import Alarms


def watch(values, **options):
    """Return the steps at which there was an alarm."""
    alarms = Alarms("loss", **options)
    return [
        step
        for step, value in enumerate(values)
        if alarms.check({"step": step, "time": 0.0, "loss": value}) is not None
    ]


def descent(steps, seed, *, start=11.0, end=2.2, tau=300.0, noise=0.04, drift=0.0):
    """A loss as language models have it: a steep descent, a plateau, noise in proportion."""
    chance = random.Random(seed)
    for step in range(steps):
        level = end + (start - end) * math.exp(-step / tau) + drift * step
        yield level * chance.lognormvariate(0.0, noise)


@given(
    seed=st.integers(0, 2**31),
    noise=st.floats(0.0, 0.2),
    tau=st.floats(5.0, 3000.0),
    start=st.floats(2.5, 20.0),
    drift=st.floats(-1e-3, 1e-3),
)
@settings(max_examples=60, deadline=None)
def test_a_run_that_goes_well_raises_no_alarm(seed, noise, tau, start, drift):
    assert watch(descent(1500, seed, start=start, tau=tau, noise=noise, drift=drift)) == []


@given(seed=st.integers(0, 2**31), at=st.integers(400, 1000), length=st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_a_spike_is_one_alarm(seed, at, length):
    values = list(descent(1500, seed, tau=50.0))
    for offset in range(length):  # up at once, and slowly back
        values[at + offset] *= 1 + 3 * (1 - offset / length)
    assert watch(values) == [at]


@given(seed=st.integers(0, 2**31), levels=st.floats(-1e6, 1e6))
@settings(max_examples=30, deadline=None)
def test_a_constant_and_a_random_walk(seed, levels):
    assert watch([levels] * 500) == []
    chance, value, walk = random.Random(seed), 3.0, []
    for _ in range(1000):
        value = max(0.5, value + chance.gauss(0, 0.01))
        walk.append(value)
    assert watch(walk) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_an_alarm_at_once_and_once(value):
    assert watch([value]) == [0]
    assert watch([2.0, 2.1, value, value, 2.0, value, value]) == [2]
    assert watch([2.0] * 10 + [value] + [2.0] * 100 + [value]) == [10, 111]
    assert watch([2.0] * 10 + [value] + [2.0] * 99 + [value]) == [10]


def test_two_spikes_are_two_alarms():
    values = list(descent(1000, 1, tau=20.0))
    values[400] = values[800] = 9.0
    assert watch(values) == [400, 800]
    values[450] = 9.0  # too soon after the first
    assert watch(values) == [400, 800]


def test_a_new_level_is_one_alarm_and_then_how_things_are():
    chance = random.Random(0)
    low = [2.0 + chance.gauss(0, 0.02) for _ in range(300)]
    high = [4.0 + chance.gauss(0, 0.02) for _ in range(600)]
    assert watch([*low, *high, 9.0, *high]) == [300, 900]


def test_divergence_is_told_before_it_is_over():
    values = list(descent(600, 3, tau=50.0))
    values += [values[-1] * 1.05**step for step in range(100)]
    (step,) = watch(values)
    assert 600 < step < 620


def test_a_jump_needs_both_spread_and_rise():
    chance = random.Random(0)
    smooth = [2.0 + chance.gauss(0, 1e-6) for _ in range(300)]
    assert watch([*smooth, 2.1]) == []  # many deviations, and 5 %
    assert watch([*smooth, 2.1], rise=0.01) == [300]
    wild = [2.0 * chance.lognormvariate(0, 0.3) for _ in range(300)]
    assert watch([*wild, 3.0]) == []  # 50 %, and within what is usual
    assert watch([*wild, 50.0], deviations=math.inf) == []
    assert watch([*wild, math.nan], deviations=math.inf) == [300]


def test_around_zero_without_spread_there_is_no_scale():
    assert watch([0.0] * 300 + [1e-9] + [0.0] * 300) == []


def test_before_the_warm_up_only_what_is_not_finite():
    assert watch([2.0] * 60 + [50.0]) == []
    assert watch([2.0] * 64 + [50.0]) == [64]
    assert watch([2.0] * 8 + [50.0], warmup=8, window=16) == [8]


def test_the_message_says_what_and_where():
    alarms = Alarms("train/loss")
    for step in range(100):
        assert alarms.check({"step": step, "train/loss": 2.0}) is None
    assert alarms.check({"step": 100, "train/loss": 7.0}) == (
        "train/loss jumped to 7 at step 100; the median of the last 100 records is 2, and 2.2 the "
        "most expected"
    )
    assert Alarms().check({"loss": math.inf}) == "loss is inf at some step"


def test_other_numbers_count_as_well():
    numpy = pytest.importorskip("numpy")
    for kind in (int, numpy.float32, numpy.float64):
        values = [kind(2)] * 100 + [kind(50)] + [kind(2)] * 20
        assert watch(values) == [100]


def test_a_metric_that_never_comes_is_told_once():
    alarms = Alarms("loss")
    found = [alarms.check({"step": step, "time": 0.0, "lr": 0.1}) for step in range(500)]
    (message,) = filter(None, found)
    assert message == "no record of 64 has 'loss', so nothing is watched; the last has lr"
    # One that comes now and then is watched.
    rarely = Alarms("loss")
    for step in range(500):
        assert rarely.check({"loss": 2.0} if step % 50 == 0 else {"lr": 0.1}) is None
    assert rarely.check({"step": 9, "loss": math.nan})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deviations": 0}, "deviations=0"),
        ({"deviations": math.nan}, "deviations=nan"),
        ({"rise": -0.1}, "rise=-0.1"),
        ({"warmup": 7}, "warmup=7"),
        ({"warmup": 64, "window": 32}, "8 <= warmup <= window"),
        ({"cooldown": 0}, "cooldown=0"),
    ],
)
def test_arguments_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        Alarms(**options)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=300))
@settings(max_examples=50, deadline=None)
def test_any_numbers_at_all(bits):
    values = [struct.unpack("d", struct.pack("Q", one))[0] for one in bits]
    alarms = watch(values, warmup=8, window=16, cooldown=1)
    assert all(0 <= step < len(values) for step in alarms)
    bad = [step for step, value in enumerate(values) if not math.isfinite(value)]
    assert bad[:1] == [] or alarms[0] <= bad[0]
