import socket

import pytest

from ezpz_dist._watch import watch

HOST = socket.gethostname()

LOOP = """
import os, time, torch, ezpz_dist as ez
from ezpz_dist._watch import watch
rank = ez.setup_torch(timeout=60)
def load_batch():
    time.sleep(100)
def train():
    ez.barrier()
with watch(step_timeout=2, report=REPORT) as watching:
    for step in watching.over(range(4)):
        if step == 2 and rank == 1:
            load_batch()
        train()
""".lstrip()


def test_past_its_time_a_step_ends_the_job_with_everybodys_stack(programs, tmp_path):
    report = tmp_path / "report.txt"
    ends = programs(3, LOOP.replace("REPORT", repr(str(report))))
    assert [status for status, _, _ in ends] == [124, 124, 124]
    errors = "".join(errors for _, _, errors in ends)
    assert errors.count("no step for 2 s (steps done on this rank: 2); where every rank") == 1
    told = report.read_text()
    assert told in errors
    assert f"rank 1 on {HOST}: train.py:5 in load_batch\n" in told
    assert "train.py:11 in <module>: load_batch()\n" in told
    assert "train.py:5 in load_batch: time.sleep(100)\n" in told
    assert f"ranks 0, 2 on {HOST}: train.py:7 in train, in barrier()" in told
    assert "last collectives of rank 0: all" in told


def test_a_rank_that_comes_late_leaves_the_report_to_the_others(programs):
    """The one that holds the store is gone by then: it was heard to end the job."""
    late = """
import ezpz_dist._watch as module
if rank == 2:
    call_roll = module.call_roll
    def slow(*args, **kwargs):
        call = call_roll(*args, **kwargs)
        time.sleep(0.6)
        return call
    module.call_roll = slow
"""
    program = LOOP.replace("REPORT", "None").replace("def load_batch", f"{late}def load_batch")
    ends = programs(3, program)
    assert [status for status, _, _ in ends] == [124, 124, 124]
    errors = "".join(errors for _, _, errors in ends)
    assert errors.count("where every rank stands") == 1, errors


def test_on_one_rank(programs):
    alone = LOOP.replace("rank == 1", "rank == 0").replace("REPORT", "None")
    ((status, _, errors),) = programs(1, alone)
    assert status == 124
    assert "train.py:5 in load_batch: time.sleep(100)" in errors


def test_steps_in_time_are_left_alone(tmp_path):
    with watch(step_timeout=5, report=tmp_path / "report") as watching:
        assert list(watching.over("abc")) == ["a", "b", "c"]
        watching.step()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", [0, -1])
def test_no_time_at_all(bad):
    with pytest.raises(ValueError, match=f"step_timeout {bad}; expected seconds above 0"):
        watch(step_timeout=bad)
