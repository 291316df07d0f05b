"""What the other ranks say, and how they end, when one fails or hangs: rank, host and line."""

import re
import signal
import socket

import pytest

from ezpz_dist._watch import watch

HOST = socket.gethostname()
START = """
import os, sys, time, torch, torch.distributed as dist, ezpz_dist as ez
from datetime import timedelta
rank = ez.setup_torch(timeout=60)
ez.barrier()
store = dist.distributed_c10d._get_default_store()
def be_impatient():  # only now: a busy machine may need more to set up
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3))
""".lstrip()


# What sounds like a collective's error is none.
DATABASE = "RuntimeError('Connection to the database timed out')"
SAID = "RuntimeError: Connection to the database timed out"


@pytest.mark.parametrize(
    ("guilty", "error", "status", "why"),
    [
        (1, DATABASE, 1, SAID),
        (0, "KeyboardInterrupt", 130, "KeyboardInterrupt"),
        (3, DATABASE, 1, SAID),  # of two nodes
    ],
)
def test_an_uncaught_exception_ends_all_ranks(programs, guilty, error, status, why):
    # The others compute, and wait for no other rank: only the responder can end them.
    body = f"if rank == {guilty}:\n    raise {error}\ntime.sleep(50)\n"
    n, nodes = (4, 2) if guilty == 3 else (3, 1)
    ends = programs(n, f"{START}\n{body}", timeout=30, nodes=nodes)
    assert why in ends[guilty][2]
    told, *others = (ends[rank] for rank in range(n) if rank != guilty)
    assert ends[guilty][0] == 1
    assert {one[0] for one in (told, *others)} == {status}
    said = f"ezpz: rank {guilty} on {HOST} failed at train.py:10 in <module>: {why}"
    assert f"{said}; the other ranks end too" in told[2]
    assert not any("Traceback" in other[2] for other in others)


# On two nodes of two, ranks 2 and 3 have one call to rank 0, which the first of them made.
PLACES = [(0, 3, 1), (1, 3, 1), (2, 4, 2), (3, 4, 2)]


@pytest.mark.parametrize(("guilty", "n", "nodes"), PLACES)
def test_a_rank_that_is_killed_is_named(programs, guilty, n, nodes):
    body = f"""
def train():
    if rank == {guilty}:
        os.kill(os.getpid(), 9)
    ez.barrier()
train()
"""
    ends = programs(n, START + body, nodes=nodes)
    assert ends[guilty][0] == -signal.SIGKILL
    for rank in {*range(n)} - {guilty}:
        status, _, errors = ends[rank]
        assert status == 1
        told = rf"barrier\(\) at train.py:12 on rank {rank} \({HOST}\) failed after [\d.]+ s: "
        assert re.search(rf"LostRankError: {told}rank {guilty} on {HOST} has ended", errors), errors


@pytest.mark.parametrize(("guilty", "n", "nodes"), PLACES)
def test_a_rank_that_is_stopped_is_named(programs, guilty, n, nodes):
    body = f"""
import signal
pids = ez.all_gather_object(os.getpid())
if rank == {guilty}:
    if os.fork() == 0:  # comes back for it when the others have ended, as the test does not
        pids.pop({guilty})
        while any(os.path.exists(f"/proc/{{pid}}") for pid in pids):
            time.sleep(0.05)
        os.kill(os.getppid(), 9)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
while open(f"/proc/{{pids[{guilty}]}}/stat").read().rpartition(")")[2].split()[0] != "T":
    time.sleep(0.01)
be_impatient()
ez.barrier()
"""
    ends = programs(n, START + body, nodes=nodes)
    for rank in {*range(n)} - {guilty}:
        status, _, errors = ends[rank]
        assert status == 1
        assert re.search(rf"LostRankError: .* rank {guilty} on {HOST} is stopped \(pid", errors)


def test_a_rank_that_sleeps_in_its_data_loader_is_named_with_its_line(programs):
    body = """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        if i == 2 and rank != 1:
            store.get("sleeps")
        elif i == 2:
            store.set("sleeps", "")
            time.sleep(100)
        return torch.ones(3)
model = ez.wrap_model(torch.nn.Linear(3, 3))
be_impatient()
for batch in torch.utils.data.DataLoader(Data()):
    model(batch).sum().backward()
"""
    ends = programs(3, START + body)
    assert [status for status, _, _ in ends] == [1, 1, 1]
    told = f"in a collective, because rank 1 on {HOST} stands at train.py:17 in __getitem__"
    # Whichever of the two times out first ends the other, which may have no time left to say it.
    assert any(
        f"ezpz: rank {rank} on {HOST} failed at train.py:22 in <module>: {told}" in ends[rank][2]
        for rank in (0, 2)
    ), ends


def test_ranks_that_took_other_branches_in_torchs_own_collectives(programs):
    body = """
be_impatient()
if rank == 1:
    work = dist.broadcast(torch.ones(4), 0, async_op=True)
else:
    work = dist.all_reduce(torch.ones(3, 2), async_op=True)
store.set(f"{rank} is there", "")
store.get(f"{1 - rank} is there")
work.wait()
dist.barrier()
"""
    ends = programs(2, START + body)
    assert [status for status, _, _ in ends] == [1, 1]
    errors = "".join(errors for _, _, errors in ends)
    # Whoever asks first: its own and the other's.
    calls = [r"all_reduce \d+ of default_pg, \[3, 2\]", r"broadcast \d+ of default_pg, \[4\]"]
    told = [
        rf"rank {1 - rank} on {HOST} stands at train.py:\d+ in <module>.*"
        rf"\(its last collective: {calls[1 - rank]}; here: {calls[rank]}\)"
        for rank in (0, 1)
    ]
    assert any(re.search(one, errors) for one in told), errors


def test_a_rank_that_leaves_early_is_said_to_have_left(programs):
    body = """
if rank == 1:
    ez.cleanup()
    sys.exit(3)
ez.barrier()
"""
    ends = programs(2, START + body)
    assert [status for status, _, _ in ends] == [1, 3]
    assert f"rank 1 on {HOST} has left: cleanup() at train.py:10" in ends[0][2]


def test_sigterm_unwinds_the_script_and_is_named(programs):
    body = """
try:
    while True:
        ez.all_reduce(1)
        if rank == 1:
            os.kill(os.getpid(), 15)
finally:
    if rank == 1:
        os.kill(os.getpid(), 15)  # launchers repeat it
    print("unwound", dist.is_initialized())
"""
    ends = programs(2, START + body)
    assert [status for status, _, _ in ends] == [1, 143]
    assert ends[1][1] == "unwound True\n"
    assert f"rank 1 on {HOST} has left: SIGTERM at train.py:" in ends[0][2]


@pytest.mark.slow
def test_sigterm_at_exit_prints_no_traceback(programs, tmp_path):
    inner = tmp_path / "inner.py"
    inner.write_text(START + "import atexit; atexit.register(os.kill, os.getpid(), 15)\n")
    # an interpreter of its own, for an exit as scripts have it
    outer = f"""
    import subprocess, sys
    sys.exit(subprocess.run([sys.executable, {str(inner)!r}], check=False).returncode)
    """
    ends = programs(2, outer)
    assert [(status, errors) for status, _, errors in ends] == [(0, "")] * 2


def test_a_forked_child_has_no_part_in_it(programs):
    body = """
import multiprocessing, signal
def child(kind):
    try:
        ez.all_reduce(1)
    except ez.CollectiveError as error:
        print(error, flush=True)
    if kind == "waits":
        is_there.set()
        time.sleep(50)
    try:
        ez.setup_torch(timeout=60)
    except ez.SetupError as error:
        print(error, flush=True)
    ez.cleanup()
    sys.excepthook(ValueError, ValueError("in the child"), None)
fork = multiprocessing.get_context("fork")
is_there = fork.Event()
ended = fork.Process(target=child, args=("ends",))
waits = fork.Process(target=child, args=("waits",))
if rank == 1:
    ended.start(); waits.start()
    ended.join()
    is_there.wait()
    waits.terminate()
    waits.join()
    print(ended.exitcode, waits.exitcode)
    time.sleep(1.5)  # so long a rank lives that was told to end
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return i * ez.data_share()[0]
loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork")
print(sum(int(each) for each in loader), ez.all_reduce(rank))
"""
    ends = programs(2, START + body)
    assert [status for status, _, _ in ends] == [0, 0], ends
    assert ends[0][1] == "0 1\n"
    said = ends[1][1].splitlines()
    forked = "in a process that rank 1 has forked, such as a worker"
    assert sum(forked in line for line in said) == 2
    assert sum("setup_torch in a process that a rank has forked" in line for line in said) == 1
    assert said[-2:] == ["0 -15", "6 1"]
    assert "ValueError: in the child" in ends[1][2]


def test_after_clean_up_nothing_of_ours_is_left_and_a_users_handler_stays(programs):
    before = """
import os, signal, threading
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, lambda *_: ...)
handler = signal.getsignal(signal.SIGTERM)
"""
    body = """
assert (signal.getsignal(signal.SIGTERM) is handler) == (rank == 1)
ez.cleanup()
assert signal.getsignal(signal.SIGTERM) is handler and sys.excepthook is sys.__excepthook__
assert [t.name for t in threading.enumerate() if t.name.startswith("ezpz")] == []
if rank == 1:
    raise ValueError("later")
time.sleep(1)
print("went on")
"""
    ends = programs(2, before + START + body)
    assert [status for status, _, _ in ends] == [0, 1], ends
    assert ends[0][1] == "went on\n"
    assert "[c10d]" not in ends[0][2] + ends[1][2], "no connection broke under a watcher"


# A step that takes too long.

LOOP = """
import os, time, torch, ezpz_dist as ez
from ezpz_dist._watch import watch
rank = ez.setup_torch(timeout=60)
def load_batch():
    time.sleep(100)
def train():
    ez.barrier()
with watch(step_timeout=4, report=REPORT) as watching:
    for step in watching.over(range(4)):
        if step == 2 and rank == 1:
            load_batch()
        train()
""".lstrip()


# The rank that holds the store is gone by then: it was heard to end the job.
LATE = """
import ezpz_dist._diagnosis as module
if rank == 2:
    call_roll = module.call_roll
    def slow(*args, **kwargs):
        call = call_roll(*args, **kwargs)
        time.sleep(0.6)
        return call
    module.call_roll = slow
"""


@pytest.mark.slow
def test_past_its_time_a_step_ends_the_job_with_everybodys_stack(programs, tmp_path):
    """A rank that comes late leaves the report to the others."""
    report = tmp_path / "report.txt"
    ends = programs(3, LOOP.replace("with", f"{LATE}with").replace("REPORT", repr(str(report))))
    assert [status for status, _, _ in ends] == [124, 124, 124]
    errors = "".join(errors for _, _, errors in ends)
    assert errors.count("no step for 4 s (steps done on this rank: 2); where every rank") == 1
    told = report.read_text()
    assert told in errors
    assert f"rank 1 on {HOST}: train.py:5 in load_batch\n" in told
    assert re.search(r"train.py:\d+ in <module>: load_batch\(\)\n", told)
    assert "train.py:5 in load_batch: time.sleep(100)\n" in told
    assert f"ranks 0, 2 on {HOST}: train.py:7 in train, in barrier()" in told
    assert "last collectives of rank 0: all" in told


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
