"""What set-up says when the ranks are not all there, or not the same."""

import re
import socket
import sys
import time

import pytest

from ezpz_dist import _agreement

HOST = socket.gethostname()


def test_differences_are_told_on_every_rank_by_rank_and_host(programs):
    script = """
import os, torch, ezpz_dist
rank = int(os.environ["RANK"])
if rank == 1:
    torch.__version__ = "2.9.0"
    ezpz_dist.__version__ = "0.0.9"
ezpz_dist.setup_torch(seed=rank // 2, tensor_parallel_size=1 + rank // 2, timeout=60)
"""
    ends = programs(3, script)
    for rank, (status, _, errors) in enumerate(ends):
        assert status == 1
        assert f"SetupError: rank {rank} of 3 on {HOST}: the ranks differ: " in errors
        for difference in (
            rf"rank 1: torch 2\.9\.0 on {HOST}, rank 0 2\.13\S* on {HOST}",
            rf"rank 1: ezpz_dist 0\.0\.9 on {HOST}, rank 0 \S+ on",
            rf"rank 2: seed 1 on {HOST}, rank 0 0 on",
            rf"rank 2: tensor_parallel_size 2 on {HOST}, rank 0 1 on",
        ):
            assert re.search(difference, errors), errors


def test_another_script_is_refused_and_can_be_allowed(programs, tmp_path):
    script = """
import os, sys, ezpz_dist
if os.environ["RANK"] == "1":
    with open(sys.modules["__main__"].__file__, "a") as file:
        file.write("# edited since")
else:
    import time
    time.sleep(0.5)
    sys.modules["__main__"].__file__ = __file__ = "/dev/null"
ezpz_dist.setup_torch(timeout=300)
print("set up")
"""
    refused = programs(2, script)
    assert all(status == 1 for status, _, _ in refused)
    assert re.search(r"rank 1: script train\.py [0-9a-f]{8} on .* rank 0 null [0-9a-f]{8}",
                     refused[0][2])  # fmt: skip
    allowed = programs(2, script, env={"EZPZ_AGREEMENT": "warn"})
    assert [(status, output) for status, output, _ in allowed] == [(0, "set up\n")] * 2
    assert allowed[0][2].count("the ranks differ: rank 1: script train.py") == 1


def test_a_rank_that_never_comes_is_named_on_all_others(programs, tmp_path):
    # However long each takes to import torch: those that come, come together.
    script = """
import os, sys, time, ezpz_dist
from pathlib import Path
from ezpz_dist import _agreement as agreement
agreement.FIRST_WORD = 1.0
if os.environ["RANK"] == "2":
    sys.exit(0)
here = Path(os.environ["MEETING"])
(here / f"rank-{os.environ['RANK']}").touch()
while len(list(here.glob("rank-*"))) < 3:
    time.sleep(0.01)
ezpz_dist.setup_torch(timeout=3)
"""
    ends = programs(4, script, env={"MEETING": str(tmp_path)})
    assert [status for status, _, _ in ends] == [1, 1, 0, 1]
    there = rf"\(there: 0-1, 3 on {HOST}\)"
    assert re.search(rf"^rank 2 of 4 did not come to setup_torch in [12] s {there}", ends[0][2])
    for rank in (0, 1, 3):
        told = rf"SetupError: rank {rank} of 4 .*: rank 2 of 4 did not come .* 3 s {there}"
        assert re.search(told, ends[rank][2])


def test_rank_0_never_comes(programs):
    script = """
import os, sys, ezpz_dist
if os.environ["RANK"] == "0":
    sys.exit(0)
ezpz_dist.setup_torch(timeout=2)
"""
    ends = programs(2, script)
    assert [status for status, _, _ in ends] == [0, 1]
    assert "SetupError: rank 1 of 2" in ends[1][2]
    assert "rank 0" in ends[1][2]


def test_worlds_of_different_size(programs):
    # rank 0 of a plain init_process_group reports success
    script = "import ezpz_dist\nezpz_dist.setup_torch(timeout=120)\nezpz_dist.barrier()\n"
    ends = programs(2, script, each={1: {"WORLD_SIZE": "3"}})
    for status, _, errors in ends:
        assert status == 1
        assert f"rank 1: world size 3 on {HOST}, rank 0 2 on {HOST}" in errors


def test_a_rank_beyond_rank_0s_world_is_told(programs):
    script = "import ezpz_dist\nezpz_dist.setup_torch(timeout=120)\nezpz_dist.barrier()\n"
    small = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ends = programs(3, script, each={0: small, 1: small})
    assert ends[2][0] == 1
    assert (
        f"rank 2 on {HOST} was started in a world of 3, rank 0 on {HOST} in one of 2"
        in (ends[2][2])
    )


def test_a_rank_that_is_there_twice(programs):
    script = "import ezpz_dist\nezpz_dist.setup_torch(timeout=300)\n"
    began = time.monotonic()
    ends = programs(3, script, each={2: {"RANK": "1"}})
    assert time.monotonic() - began < 120, "told at once, though rank 2 is missing"
    twice = rf"rank 1 of 3 is there twice: process \d+ on {HOST}, and process \d+ on {HOST};"
    assert all(status == 1 and re.search(twice, errors) for status, _, errors in ends), ends


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_rank_that_cannot_take_part_tells_the_others(programs, guilty):
    script = f"""
import os, time, ezpz_dist
rank = int(os.environ["RANK"])
time.sleep(0.5 * (rank == {guilty}))
ezpz_dist.setup_torch(timeout=300, backend="smoke" if rank == {guilty} else None)
"""
    began = time.monotonic()
    ends = programs(3, script)
    assert time.monotonic() - began < 120
    why = "SetupError: backend 'smoke' is not in this torch"
    for rank, (status, _, errors) in enumerate(ends):
        assert status == 1
        told = f"rank {rank} of 3 on {HOST}: rank {guilty} on {HOST} cannot take part: {why}"
        assert (why if rank == guilty else told) in errors


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_rank_that_fails_in_torchs_own_set_up_ends_the_others(programs, guilty):
    # They wait in torch for its address, and would until their time is over.
    script = "import ezpz_dist\nezpz_dist.setup_torch(timeout=300)\n"
    began = time.monotonic()
    ends = programs(2, script, each={guilty: {"GLOO_SOCKET_IFNAME": "none0"}})
    assert time.monotonic() - began < 120
    assert [status for status, _, _ in ends] == [1, 1]
    assert f"SetupError: rank {guilty} of 2 could not meet the others" in ends[guilty][2]
    told = (
        rf"rank {guilty} on {HOST} failed in setup_torch: \w+: .*none0.*; the other ranks end too"
    )
    assert re.search(told, ends[1 - guilty][2]), ends


def test_the_script_that_is_compared(monkeypatch):
    main = sys.modules["__main__"]
    monkeypatch.delattr(main, "__file__", raising=False)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-f", "kernel-1.json"])
    monkeypatch.setattr(sys, "argv", ["ipykernel", "-f", "kernel-1.json"])
    assert _agreement._script() == "no file", "a notebook's kernel has a file of its own"
    monkeypatch.setattr(sys, "argv", ["-c", "--rank", "1"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-I", "-c", "pass", "--rank", "1"])
    first = _agreement._script()
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", "pass", "--rank", "2"])
    assert _agreement._script() == first, "its arguments are each rank's own"
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", "exit()", "--rank", "2"])
    assert _agreement._script() != first


def test_what_only_some_ranks_have_imported_is_no_difference():
    said = {
        rank: [f"n{rank}", 1, 1, {"packages": packages}]
        for rank, packages in enumerate([{"numpy": "2"}, {}, {"numpy": "2", "mpi4py": "4"}])
    }
    assert not _agreement._difference(said[0], said)
    said[2][3]["packages"]["numpy"] = "1"
    assert "rank 2: numpy 1 on n2, rank 0 2 on n0" in _agreement._difference(said[0], said)


@pytest.mark.parametrize("size", [10, 5000])
def test_only_a_few_differences_are_written_out(size):
    said = {rank: [f"n{rank}", 1, 1, {"a": rank}] for rank in range(size)}
    told = _agreement._difference(said[0], said)
    assert len(told) < 4000
    assert ("differences more" in told) == (size > 16)
