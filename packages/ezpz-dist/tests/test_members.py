"""What ranks are told that are not all there, not the same, or call different things."""

import json
import random
import re
import socket
import sys
import time

import pytest

from ezpz_dist import _members
from ezpz_dist._members import fold_hosts, pack, unfold_hosts

HOST = socket.gethostname()
SET_UP = "import ezpz_dist\nezpz_dist.setup_torch(timeout=300)\n"
# However long each takes to import torch: those that come, come together.
COME = """
import os, time
from pathlib import Path
here = Path(os.environ["MEETING"])
(here / f"pid-{os.getpid()}").touch()
while len(list(here.glob("pid-*"))) < int(os.environ["SIZE"]):
    time.sleep(0.01)
"""
SMALL = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


def test_differences_are_told_on_every_rank_by_rank_and_host(programs):
    # All by one rank: they are told as soon as one is known, whoever is still to come.
    script = """
import os, torch, ezpz_dist
rank = int(os.environ["RANK"])
if rank == 1:
    torch.__version__ = "2.9.0"
    ezpz_dist.__version__ = "0.0.9"
ezpz_dist.setup_torch(seed=rank, tensor_parallel_size=1 + rank, timeout=60)
"""
    ends = programs(2, script)
    for rank, (status, _, errors) in enumerate(ends):
        assert status == 1
        assert f"SetupError: rank {rank} of 2 on {HOST}: the ranks differ: " in errors
        for difference in (
            rf"rank 1: torch 2\.9\.0 on {HOST}, rank 0 2\.13\S* on {HOST}",
            rf"rank 1: ezpz_dist 0\.0\.9 on {HOST}, rank 0 \S+ on",
            rf"rank 1: seed 1 on {HOST}, rank 0 0 on",
            rf"rank 1: tensor_parallel_size 2 on {HOST}, rank 0 1 on",
        ):
            assert re.search(difference, errors), errors


def test_another_script_is_refused_and_can_be_allowed(programs):
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


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_rank_that_never_comes_is_named_on_all_others(programs, tmp_path, nodes):
    script = f"""
import os, sys, ezpz_dist
from ezpz_dist import _members as agreement
agreement.FIRST_WORD = 1.0
if os.environ["RANK"] == "2":
    sys.exit(0)
{COME}
ezpz_dist.setup_torch(timeout=6)
"""
    ends = programs(4, script, env={"MEETING": str(tmp_path), "SIZE": "3"}, nodes=nodes)
    assert [status for status, _, _ in ends] == [1, 1, 0, 1]
    there = rf"\(there: 0-1, 3 on {HOST}\)"
    assert re.search(rf"^rank 2 of 4 did not come to setup_torch in [1-5] s {there}", ends[0][2])
    for rank in (0, 1, 3):
        told = rf"SetupError: rank {rank} of 4 .*: rank 2 of 4 did not come .* [67] s {there}"
        assert re.search(told, ends[rank][2])


@pytest.mark.parametrize(
    ("told", "each", "said"),
    [
        # rank 0 of a plain init_process_group reports success
        ([0, 1], {1: {"WORLD_SIZE": "3"}}, f"rank 1: world size 3 on {HOST}, rank 0 2 on {HOST}"),
        ([2], {0: SMALL, 1: SMALL}, "was started in a world of 3, rank 0 on {HOST} in one of 2"),
    ],
)
def test_worlds_of_different_size(programs, told, each, said, tmp_path):
    script = """
import os, time, ezpz_dist
try:
    ezpz_dist.setup_torch(timeout=300)
except ezpz_dist.SetupError:
    open(os.environ["TOLD"], "w").close()
    raise
while not os.path.exists(os.environ["TOLD"]):  # whose ranks agree stay until the other was told
    time.sleep(0.01)
"""
    ends = programs(max(told) + 1, script, each=each, env={"TOLD": str(tmp_path / "told")})
    for rank in told:
        assert ends[rank][0] == 1
        assert said.format(HOST=HOST) in ends[rank][2]


@pytest.mark.parametrize(
    ("n", "nodes", "late"), [(3, 1, None), (3, 3, None), (4, 2, None), (4, 1, 1), (4, 2, 1)]
)
def test_a_rank_that_is_there_twice(programs, tmp_path, n, nodes, late):
    began = time.monotonic()
    env, twice = {"MEETING": str(tmp_path), "SIZE": str(n)}, n - 2
    script = f"""{COME}
import ezpz_dist
while os.environ["RANK"] == "{late}" and not (here / "told").exists():
    time.sleep(0.01)
try:
    ezpz_dist.setup_torch(timeout=300)
finally:
    (here / "told").touch()
"""
    ends = programs(n, script, env=env, each={n - 1: {"RANK": str(twice)}}, nodes=nodes)
    assert time.monotonic() - began < 120, "told at once, though the last rank is missing"
    twice = rf"rank {twice} of {n} is duplicate: process \d+ on {HOST}, and process \d+ on {HOST};"
    assert all(status == 1 and re.search(twice, errors) for status, _, errors in ends), ends


@pytest.mark.parametrize(("guilty", "n", "nodes"), [(0, 3, 1), (1, 3, 1), (3, 4, 2)])
def test_a_rank_that_cannot_take_part_tells_the_others(programs, tmp_path, guilty, n, nodes):
    script = f"""{COME}
import ezpz_dist
rank = int(os.environ["RANK"])
time.sleep(0.5 * (rank == {guilty}))
ezpz_dist.setup_torch(timeout=300, backend="smoke" if rank == {guilty} else None)
"""
    began = time.monotonic()
    ends = programs(n, script, env={"MEETING": str(tmp_path), "SIZE": str(n)}, nodes=nodes)
    assert time.monotonic() - began < 120
    why = "SetupError: backend 'smoke' is not in this torch"
    for rank, (status, _, errors) in enumerate(ends):
        assert status == 1
        told = f"rank {rank} of {n} on {HOST}: rank {guilty} on {HOST} cannot take part: {why}"
        assert (why if rank == guilty else told) in errors


# Ranks of several nodes: one of each speaks for the others.

CALLS = """
import ezpz_dist as ez
port = int(os.environ["MASTER_PORT"])
rank = ez.setup_torch(timeout=300)
lines = [line.split() for kind in ("tcp", "tcp6") for line in open(f"/proc/net/{kind}")]
calls = [words for words in lines if words[1].endswith(f":{port:04X}") and words[3] == "01"]
if rank == 0:
    print(len(calls))
assert ez.all_reduce(1) == 8
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="each rank calls rank 0 itself")
def test_rank_0_is_called_once_by_each_node(programs):
    ends = programs(8, f"import os\n{CALLS}", nodes=4)
    assert [one.status for one in ends] == [0] * 8, ends
    assert ends[0].out == "4\n"


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no rank speaks for another")
def test_a_speaker_that_dies_is_missing_and_another_one_speaks(programs, tmp_path):
    script = """
import os, time, ezpz_dist
from pathlib import Path
from ezpz_dist import _addresses
here, rank = Path(os.environ["MEETING"]), int(os.environ["RANK"])
def until(rank):
    while not (here / rank).exists():
        time.sleep(0.01)
def end(*_):
    (here / "2").touch()  # it speaks for its node
    until("3")
    time.sleep(0.2)
    os.kill(os.getpid(), 9)
if rank == 3:
    until("2")
    (here / "3").touch()
elif rank == 2:
    _addresses._Leader._converse = end
ezpz_dist.setup_torch(timeout=8)
"""
    ends = programs(4, script, env={"MEETING": str(tmp_path)}, nodes=2)
    assert [status for status, _, _ in ends] == [1, 1, -9, 1], ends
    for rank in (0, 1, 3):
        told = rf"rank {rank} of 4 .*: rank 2 of 4 did not come .* \(there: 0-1, 3 on {HOST}\)"
        assert re.search(told, ends[rank].err)


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_rank_that_fails_in_torchs_own_set_up_ends_the_others(programs, guilty):
    # They wait in torch for its address, and would until their time is over.
    began = time.monotonic()
    ends = programs(2, SET_UP, each={guilty: {"GLOO_SOCKET_IFNAME": "none0"}})
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
    assert _members._script() == "no file", "a notebook's kernel has a file of its own"
    monkeypatch.setattr(sys, "argv", ["-c", "--rank", "1"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-I", "-c", "pass", "--rank", "1"])
    first = _members._script()
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", "pass", "--rank", "2"])
    assert _members._script() == first, "its arguments are each rank's own"
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", "exit()", "--rank", "2"])
    assert _members._script() != first


def differences(facts):
    texts = [json.dumps(each) for each in facts]
    said = {rank: ((f"n{rank}", 1, 1), text) for rank, text in enumerate(texts)}
    return _members._describe_differences("n0", texts[0], said)


def test_what_only_some_ranks_have_imported_is_no_difference():
    first, other, last = {"numpy": "2"}, {}, {"numpy": "2", "mpi4py": "4"}
    assert not differences([{"packages": packages} for packages in (first, other, last)])
    told = differences([{"packages": packages} for packages in (first, other, {"numpy": "1"})])
    assert "rank 2: numpy 1 on n2, rank 0 2 on n0" in told


@pytest.mark.parametrize("size", [10, 5000])
def test_only_a_few_differences_are_written_out(size):
    told = differences([{"a": rank} for rank in range(size)])
    assert len(told) < 4000
    assert ("differences more" in told) == (size > 16)


# The hosts of all ranks, as rank 0 tells them.


def aurora(nodes):
    """Return names by cabinet, chassis, slot and node, as a job has them: with gaps."""
    every = [
        f"x{4000 + n // 72}c{n // 12 % 6}s{n // 2 % 6}b0n{n % 2}" for n in range(nodes * 10 // 9)
    ]
    return [every[n] for n in sorted(random.Random(0).sample(range(len(every)), nodes))]


@pytest.mark.parametrize(
    "hosts",
    [
        [],
        ["a", "a", "b", "a"],
        ["n9", "n10", "n11", "n010", "n09", "n9", "n-1", "n٣", "10.0.0.10", "", "7n7"],
        [host for host in aurora(100) for _ in range(12)],
    ],
)
def test_what_is_folded_comes_back(hosts):
    assert unfold_hosts(json.loads(json.dumps(fold_hosts(hosts)))) == tuple(hosts)
    chance = random.Random(len(hosts))
    for _ in range(50):
        names = ["".join(chance.choices("a019-", k=chance.randrange(6))) for _ in range(20)]
        assert unfold_hosts(fold_hosts(names)) == tuple(names)


def test_the_hosts_of_a_whole_machine_are_short():
    for names in (aurora(10_080), [f"nid{n:06}" for n in range(10_080)]):
        for hosts in ([name for name in names for _ in range(12)], names * 12):
            assert len(pack({"hosts": fold_hosts(hosts)})) < 4000


# Ranks that call different things: all are told the same, at once, and can go on.

CAUGHT = """
import time
rank, n = setup_torch(timeout=60), dist.get_world_size()

def caught(kind, *calls):
    "What this rank's call raises; the last call is that of all further ranks."
    barrier()
    start = time.monotonic()
    try:
        result = calls[min(rank, len(calls) - 1)]()
    except kind as error:
        assert time.monotonic() - start < 60
        assert type(error) is kind, error
        # the group still works, and every rank has raised the same
        assert len(set(all_gather_object((str(error), error.ranks)))) == 1
        return error.ranks, str(error)
    raise AssertionError(f"nothing raised: {result}")
"""


def test_what_differs_is_named_on_every_rank(ranks):
    script = """
def vector(size, dtype=torch.float32):
    return torch.ones(size, dtype=dtype)

# another operation
who, text = caught(MismatchError, lambda: barrier(), lambda: all_reduce(1.0), lambda: barrier())
assert who == (1,), text
assert "ranks 0, 2 call barrier() at <string>:" in text and "; rank 1 (" in text
assert ") calls all_reduce of number (sum) at <string>:" in text

# another combination; the one of two that is alone is the higher rank
who, text = caught(MismatchError, lambda: all_reduce(1, "min"), lambda: all_reduce(1, "max"))
assert who == (0,) and "ranks 1-2 call all_reduce of number (max)" in text, text
assert ") calls all_reduce of number (min)" in text

# shapes and dtypes, small and large
for k in (1, 100000):
    who, text = caught(MismatchError, lambda: all_reduce(vector(2 * k)),
                       lambda: all_reduce(vector(2 * k)), lambda: all_reduce(vector(3 * k)))
    expected = f") has float32 [{3 * k}] instead of float32 [{2 * k}] at <string>:"
    assert who == (2,) and expected in text, text
who, text = caught(MismatchError, lambda: all_reduce(vector(2)),
                   lambda: all_reduce(vector(2, torch.float64)), lambda: all_reduce(vector(2)))
assert who == (1,) and "has float64 [2] instead of float32 [2]" in text, text
who, text = caught(MismatchError, lambda: all_reduce(vector(())), lambda: all_reduce(1.0))
assert who == (0,) and "has float32 [] instead of number" in text, text

# keys: the very one
full = {"loss": 1.0, "acc": vector(3), "deep": {"a": 1, "b": 2}}
less = {"loss": 1.0, "deep": {"a": 1, "b": 2}}
who, text = caught(MismatchError, lambda: all_reduce(full), lambda: all_reduce(full),
                   lambda: all_reduce(less))
assert who == (2,) and ") has no key 'acc' at <string>:" in text, text
assert ("all_reduce of {'acc': float32 [3], 'deep' > 'a': number, 'deep' > 'b': number, "
        "'loss': number} (sum)") in text
who, text = caught(MismatchError, lambda: all_reduce(full), lambda: all_reduce(less))
assert who == (0,) and "has a key 'acc' that the others have not" in text, text
who, text = caught(MismatchError, lambda: all_reduce({"a": vector(3)}),
                   lambda: all_reduce({"a": vector(4)}), lambda: all_reduce({"b": vector(3)}))
assert who == (1, 2) and "has float32 [4] at key 'a' instead of float32 [3]" in text, text
assert "has no key 'a', has a key 'b' that the others have not" in text
who, text = caught(MismatchError, lambda: all_reduce({"a": 1}), lambda: all_reduce(1))
assert who == (0,) and "calls all_reduce of {'a': number} (sum)" in text, text
many = {f"{i:04}": 1 for i in range(3000)}
who, text = caught(MismatchError, lambda: all_reduce(many | {"x": 1}), lambda: all_reduce(many))
assert who == (0,) and "has a key 'x' that" in text and len(text) < 600, text
who, text = caught(MismatchError, lambda: all_reduce({f"k{i}": 1 for i in range(9)}),
                   lambda: all_reduce({}))
assert "'k0' that the others have not, has a key 'k1'" in text and "and 6 more differences" in text
# their order is none of these
assert all_reduce({"a": 1, "b": 10} if rank else {"b": 10, "a": 1}) == {"a": 3, "b": 30}

# another root
who, text = caught(MismatchError, lambda: broadcast(1, root=1), lambda: broadcast(1))
assert who == (0,) and ") calls broadcast(root=1) at" in text, text
assert "ranks 1-2 call broadcast(root=0) at" in text, text

# all different
who, text = caught(MismatchError, lambda: barrier(), lambda: broadcast(1), lambda: all_reduce(1))
assert who == (1, 2) and text.startswith("rank 0 ("), text
assert text.endswith("expected every rank to call the same, with the same keys, shapes and dtypes")

cleanup()
"""
    ranks(3, CAUGHT + script)


def test_a_rank_that_cannot_take_part_does_not_leave_the_others_waiting(ranks):
    script = """
import threading
lock = threading.Lock()
good = lambda: all_reduce(1.0)

who, text = caught(CollectiveError, good, lambda: all_reduce("x"), good)
assert who == (1,) and "cannot take part in all_reduce() at <string>:" in text, text
assert ": TypeError: all_reduce of str; expected" in text and "expected every rank to take" in text
who, text = caught(CollectiveError, lambda: all_reduce(1, implementation="x"), good)
assert who == (0,) and "ValueError: implementation 'x'" in text, text
who, text = caught(CollectiveError, lambda: barrier(timeout=-1), lambda: barrier(timeout=90))
assert who == (0,) and "ValueError: timeout -1" in text, text
who, text = caught(CollectiveError, lambda: broadcast(1, root=3), lambda: broadcast(1))
assert who == (0,) and "root 3; expected a rank from 0 to 2" in text, text

# the root's object, or one of all, cannot be pickled
who, text = caught(CollectiveError, lambda: broadcast(lock))
assert who == (0,) and "lock cannot be pickled (TypeError" in text, text
who, text = caught(CollectiveError, lambda: all_gather_object(1), lambda: all_gather_object(lock),
                   lambda: all_gather_object(1))
assert who == (1,) and "lock cannot be pickled" in text, text
assert broadcast(lock if rank else 7) == 7, "only the root's matters"

# where all refuse, each has its own error
for call, kind in ((lambda: all_reduce(None), TypeError), (lambda: broadcast(1, 9), ValueError),
                   (lambda: all_gather_object(lock), CollectiveError)):
    error = raises(kind, "", call)
    assert "cannot take part" not in str(error)

# what cannot be made here is this rank's trouble; the others have their object
import sys, types
if rank == 0:
    sys.modules["only_here"] = here = types.ModuleType("only_here")
    here.Thing = type("Thing", (), {"__module__": "only_here"})
try:
    broadcast(here.Thing() if rank == 0 else None)
except CollectiveError as error:
    assert rank > 0 and error.ranks == (0,)
    assert "what rank 0 sent cannot be unpickled here (ModuleNotFoundError" in str(error)
else:
    assert rank == 0
assert all_reduce(1) == 3

# nor what it cannot hold, for want of memory or of the dtype: the others have theirs, and this
# rank keeps step
sent = torch.zeros(5 << 20, dtype=torch.complex32)
if rank == 2:
    del torch.complex32
try:
    got = broadcast(sent)
except CollectiveError as error:
    assert rank == 2 and error.ranks == (2,), error
    assert "rank 2 cannot take the 20,971,520 bytes from rank 0 (AttributeError" in str(error)
else:
    assert rank < 2 and got.shape == sent.shape
assert all_reduce(1) == 3
cleanup()
"""
    ranks(3, CAUGHT + script)


def test_groups(ranks):
    script = """
import ezpz_tp
pair, alone = dist.new_group([0, 2]), dist.new_group([1])
mine = alone if rank == 1 else pair
assert all_reduce(rank, group=mine) == (1 if rank == 1 else 2)
assert all_reduce(torch.full((9000,), rank), group=mine).tolist() == [1 if rank == 1 else 2] * 9000
root = 1 if rank == 1 else 2
for size in (1, 9000):
    assert broadcast([rank] * size, root=root, group=mine) == [root] * size
    assert broadcast(torch.full((size,), rank), root, mine).tolist() == [root] * size
assert all_gather_object(rank, group=mine) == ([1] if rank == 1 else [0, 2])
barrier(group=mine), barrier(mine, timeout=20)

# the members' ranks are those in the world, here too
if rank != 1:
    error = raises(MismatchError, "rank 2 (", all_reduce, 1 if rank else torch.ones(1), group=pair)
    assert error.ranks == (2,), error
    assert all_reduce(1, group=pair) == 2

if rank == 1:
    raises(ValueError, "barrier() on rank 1 with a group of which it is no member",
           lambda: barrier(pair))
    raises(ValueError, "root 0; expected one of the group's ranks, [1]",
           lambda: broadcast(1, 0, alone))
raises(TypeError, "expected a torch.distributed.ProcessGroup", lambda: barrier([0, 1]))
raises(ValueError, "expected group=None, because MPI knows nothing of torch's groups",
       lambda: barrier(mine, implementation="mpi"))
ezpz_tp.initialize_tensor_parallel(3)
assert all_reduce(1, group=ezpz_tp.get_tensor_parallel_group()) == 3
assert all_reduce(rank, group=ezpz_tp.get_data_parallel_group()) == rank, "a group of one"
gone = dist.new_group()
dist.destroy_process_group(gone)
raises(ValueError, "with a group that torch does not know", lambda: all_reduce(1, group=gone))
assert all_reduce(1) == 3

# of different groups: each rank waits in the same call, at the same line
groups = [dist.new_group(), dist.new_group()]
barrier()
error = raises(HangError, "", barrier, groups[rank % 2], timeout=0.5 if rank == 1 else 2)
assert error.ranks == (0, 2) if rank == 1 else 1 in error.ranks, error
assert rank != 1 or f", in barrier() in group {groups[0].group_name}" in str(error), error
barrier()  # whoever ends is gone for those who still ask
"""
    ranks(3, CAUGHT + script)


@pytest.mark.parametrize("n", [1, 2])
def test_mpi_that_knows_nothing_of_this_job(ranks, n):
    pytest.importorskip("mpi4py")
    script = """
        rank, n = setup_torch(timeout=60), dist.get_world_size()

        def refused(text):
            try:
                barrier(implementation="mpi")
            except CollectiveError as error:
                assert n > 1 and (text in str(error) or "cannot load an MPI" in str(error)), error
            else:
                assert n == 1

        # The next call of MPI's would end the process.
        import mpi4py
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        refused("implementation='mpi' where MPI is not initialized; expected the script to leave")
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError):
            pass
        else:
            MPI.Init()
        for call in (barrier, lambda **mpi: all_reduce(1, **mpi)):
            try:
                call(implementation="mpi")
            except CollectiveError as error:
                assert n > 1
                expected = (f"mpi4py sees rank 0 of 1 (", f"), set-up {rank} of {n} (torchrun)",
                            "mpi4py cannot load an MPI (")
                assert any(text in str(error) for text in expected), error
                assert "start the ranks with mpiexec" in str(error)
            else:
                assert n == 1
            # only one rank asks for MPI, and has not been let into it
            if n > 1:
                options = {"implementation": "mpi"} if rank else {}
                error = raises(MismatchError, "for the first time", call, **options)
                assert error.ranks == (1,), error
        if "mpi4py.MPI" in sys.modules:
            MPI.Finalize()
        refused("implementation='mpi' where MPI was finalized; expected the script to leave that")
        cleanup()
        """
    ranks(n, script)


def test_a_barrier_that_one_rank_does_not_come_to(ranks):
    script = """
        import time
        rank = setup_torch(timeout=60)
        barrier(timeout=30)
        store, start = dist.distributed_c10d._get_default_store(), time.monotonic()
        if rank == 1:
            store.wait(["told/0", "told/2"])
            barrier()
        else:
            error = raises((HangError, LostRankError), "", barrier, timeout=1)
            assert 1 in error.ranks and "rank 1" in str(error), error
            assert "barrier()" in str(error), error
            assert time.monotonic() - start < 60
            store.set(f"told/{rank}", "")
            store.wait(["told/0", "told/2"])
        assert all_reduce(1) == 3, "it has come after all: the group can be used further"

        # more time than the group's own
        from datetime import timedelta
        impatient = dist.new_group(timeout=timedelta(seconds=3))
        if rank == 1:
            time.sleep(3.5)
        barrier(impatient, timeout=60)
        """
    ranks(3, script)
