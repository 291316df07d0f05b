"""The time of functions, blocks and steps."""

import asyncio
import logging
import math
import re
import time

import pytest

from ezpz_dist import Timer, timed, timeitlogit
from ezpz_dist._timers import format_seconds


def test_a_timer_adds_up_and_nests():
    timer = Timer("sleep")
    assert timer.timing.count == 0
    assert math.isnan(timer.timing.mean)
    assert str(timer.timing) == "not used"
    for seconds in (0.01, 0.03):
        with timer:
            time.sleep(seconds)
    timing = timer.timing
    assert timing.count == 2
    assert 0.04 <= timing.total < 1
    assert timing.mean == timing.total / 2
    assert timing.min >= 0.01
    assert timing.min + timing.max == timing.total
    assert timing.last >= 0.03
    assert timing.last in {timing.min, timing.max}, "the second, also where the first took longer"
    assert re.fullmatch(r"2 x \S+ ms \(\S+ ms to \S+ ms\), \S+ ms in all", str(timing))
    with timer:
        time.sleep(0.01)
        with timer:
            pass
        assert timer.timing.count == 3
        inner = timer.timing.last
    assert timer.timing.last >= inner + 0.01
    timer.reset()
    assert timer.timing.count == 0
    with pytest.raises(KeyError, match="mine"), timer:
        raise KeyError("mine")
    assert timer.timing.count == 1, "what ends in an exception counts"


def test_a_timer_that_is_off_costs_little():
    def cost(timer):
        start = time.perf_counter()
        for _ in range(1000):
            with timer:
                pass
        return (time.perf_counter() - start) / 1000

    assert min(cost(Timer(enabled=False)) for _ in range(5)) < 20e-6
    assert min(cost(Timer()) for _ in range(5)) < 100e-6


def test_times_format_seconds():
    assert [format_seconds(seconds) for seconds in (0.0, 2e-6, 9.996e-4, 0.25, 0.9996, 999.7)] == [
        "0 us", "2 us", "1 ms", "250 ms", "1 s", "1,000 s",
    ]  # fmt: skip


@timeitlogit()
def add(a: int, b: int = 2) -> int:
    """Add."""
    return a + b


def test_timeitlogit_keeps_the_function_and_logs(caplog):
    caplog.set_level(logging.INFO)
    assert add(1) == 3
    assert (add.__name__, add.__doc__) == ("add", "Add.")
    (record,) = caplog.records
    assert re.fullmatch(r"add took \S+ [um]s on rank 0", record.getMessage())
    assert record.name == __name__

    @timeitlogit(rank=0, level=logging.WARNING)
    def fail():
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fail()
    assert re.search(r"fail took \S+ [um]s on rank 0 and raised OSError$", caplog.messages[-1])
    assert caplog.records[-1].levelname == "WARNING"

    @timeitlogit()
    async def later():
        await asyncio.sleep(0.02)
        return 5

    assert asyncio.run(later()) == 5
    assert re.search(r"later took (([2-9]|\d\d)\d[.\d]* ms|[.\d]+ s)", caplog.messages[-1])

    caplog.clear()
    with timed("block") as timer:
        time.sleep(0.01)
    assert timer.timing.last >= 0.01
    with timed("silent", rank=1) as timer:
        pass
    assert timer.timing.count == 0
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("block took ")


def test_what_cannot_be_timed_is_refused():
    def numbers():
        yield 1

    async def letters():
        yield "a"

    for generator in (numbers, letters):
        with pytest.raises(TypeError, match=f"timeitlogit of the generator .*{generator.__name__}"):
            timeitlogit()(generator)
    with pytest.raises(TypeError, match=r"@timeitlogit on .*; expected @timeitlogit\(\)"):
        timeitlogit(numbers)


def test_each_rank_logs_for_itself_or_one_for_all(ranks):
    script = """
        import logging, io
        log = io.StringIO()
        logging.basicConfig(stream=log, level=logging.INFO, format="%(message)s")
        import ezpz_topo

        @timeitlogit(rank=ezpz_topo.get_rank())
        def setup():
            return setup_torch(timeout=30)

        @timeitlogit(rank=1)
        def one(): pass

        @timeitlogit()
        def first(): pass

        setup(); one(); first()
        print(*[line for line in log.getvalue().splitlines() if " took " in line], sep="\\n")
        cleanup()
        """
    outs = ranks(2, script)
    said = [[line.split(" took ")[0] for line in out.splitlines()] for out in outs]
    assert said == [["setup", "first"], ["setup", "one"]]
    assert outs[1].count("on rank 1") == 2
