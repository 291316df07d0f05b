"""A rank that fails, or dies, in a save: all ranks know, and the checkpoint before it loads."""

import os
import re
import shutil
import subprocess
import sys

import pytest

START = """
import os
import torch, torch.distributed as dist
from ezpz_dist import *
import re, resource, signal, subprocess, time
from torch import nn
from torch.distributed.fsdp import fully_shard

where = {where!r}
rank = setup_torch(timeout=120)
# A shard of 2 MB a rank: more than any buffer holds back.
model = nn.Linear(1024, 1024, bias=False)
with torch.no_grad():
    model.weight.copy_(torch.arange(1024.0).repeat(1024, 1))
if dist.get_world_size() > 1:
    fully_shard(model)  # each rank writes a half

def entries():
    dist.barrier()
    return sorted(set(os.listdir(where)) - {"owner.json"})

def refused(pattern, path=where, **given):
    start = time.monotonic()
    error = raises(CheckpointError, "", save_checkpoint, path, model=model, **given)
    assert re.search(pattern, str(error)), error
    assert time.monotonic() - start < 60
    assert entries() == ["step-00000001"], entries()

class Limit:
    "No file of this rank may grow beyond this: as on a full disk, but here the kernel says so."
    def __init__(self, size): self.size = size
    def __enter__(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, resource.RLIM_INFINITY))
    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
"""

ERRORS = """
save_checkpoint(where, model=model, step=1)
from ezpz_topo import get_hostname
host = get_hostname()
refused("cannot be saved to .*: rank 1 on .*step=3.*; rank 0 has .*step=2", step=2 + rank)
refused(f"cannot be saved to .*: rank 1 on {host}: .*data.'f'., of type builtins.*",
    step=2, data={"f": print if rank else 1})
with Limit(300_000 if rank == 1 else 1 << 40):
    refused(f"rank 1 on {host}: .*File too large.*{where}/.step-00000002.tmp-.*/00001.bin",
        step=2)
    saving = save_checkpoint(where, model=model, step=2, asynchronous=True)
    saving._done.wait(120)
    refused("rank 1 on .*File too large", step=3)
finish_saving()  # it was told already
with Limit(100 if rank == 0 else 1 << 40):
    refused("rank 0 on .*File too large", step=2)

disk = {disk!r}
if disk:
    refused(r"No space left on device.*0000\\d.bin", step=1, path=disk)
    assert os.listdir(disk) == ["owner.json"], os.listdir(disk)
    dist.barrier()
    if rank == 0:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    dist.barrier()
    refused("rank 0 on .*Read-only file system", step=1, path=disk)
open(where + "-file", "a").close()
refused("rank 0 on .*NotADirectoryError", step=1, path=where + "-file/below")
# An asynchronous one returns at once; one goes on at a time.
first = save_checkpoint(where, model=model, step=2, asynchronous=True)
second = save_checkpoint(where, model=model, step=3, asynchronous=True)
assert first.done
second.wait()
# All ranks fall back together, whoever sees the damage.
if rank == 0:
    with open(f"{where}/step-00000003/00001.bin", "r+b") as file:
        file.seek(900_000)
        byte = file.read(1)
        file.seek(900_000)
        file.write(bytes([byte[0] ^ 1]))
dist.barrier()
loaded = load_checkpoint(where, model=model)
assert loaded.step == 2, loaded
assert "00001.bin has crc32" in loaded.skipped[0] and f"on {host}" in loaded.skipped[0]
given = {"path": where, "model": model}
error = raises(CheckpointError, "no checkpoint of step 3 in", load_checkpoint, step=3, **given)
assert "00001.bin" in str(error)
raises(CheckpointError, "load_checkpoint: rank 1 on", load_checkpoint, step=2 + rank, **given)
# cleanup() waits for the save that goes on, and says what became of it.
with Limit(300_000 if rank == 1 else 1 << 40):
    save_checkpoint(where, model=model, step=6, asynchronous=True)
    raises(CheckpointError, "rank 1 on", cleanup)
assert not dist.is_initialized()
setup_torch(timeout=120)
# The process ends, and the save it began with it: whole.
save_checkpoint(where, model=model, step=7, asynchronous=True)
"""


@pytest.fixture
def disk(tmp_path):
    """A disk of 1 MB; empty where this user may not mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = shutil.which("mount")
    command = [mount or "false", "-t", "tmpfs", "-o", "size=1m", "none", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        yield ""
        return
    yield str(path)
    subprocess.run(["umount", str(path)], check=True)


def script(body, **told):
    text = START + body
    for name, value in told.items():
        text = text.replace(f"{{{name}!r}}", repr(value))
    return text


def test_what_fails_on_one_rank_fails_on_all_and_leaves_nothing(ranks, tmp_path, disk):
    where = str(tmp_path / "checkpoints")
    program = tmp_path / "program.py"  # which ends as programs do
    program.write_text(script(ERRORS, where=where, disk=disk))
    ranks(2, "", program=program)
    after = "print(load_checkpoint(where, model=model).step)"
    assert [out.split() for out in ranks(1, script(after, where=where))] == [["7"]]


DIES = """
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if {first!r}:
    save_checkpoint(where, model=model, step=1)
else:
    assert load_checkpoint(where, model=model).step == 1
if rank == {dying!r}:
    # The kernel ends the process within its write(), as kill -9 would: no handler, no clean-up.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
start = time.monotonic()
try:
    save_checkpoint(where, model=model, step=2, asynchronous={background!r}).wait()
except DistError as error:
    print(f"{time.monotonic() - start:.3f}", type(error).__name__, error, flush=True)
os._exit(3)
"""

AGAIN = """
assert [one.step for one in list_checkpoints(where)] == [1]
loaded = load_checkpoint(where, model=model)
assert loaded.step == 1 and loaded.skipped == ()
assert model.weight.full_tensor()[5, 1023] == 1023
save_checkpoint(where, model=model, step=2)
assert entries() == ["step-00000001", "step-00000002"], entries()
"""


def test_killed_in_the_middle_of_a_write(ranks, tmp_path):
    where = str(tmp_path / "checkpoints")
    for dying, background, kind in ((1, False, "LostRankError"), (0, True, "CheckpointError")):
        told = {"first": not background, "dying": dying, "background": background}
        told = ranks(2, script(DIES, where=where, **told), check=False)
        assert told[dying][0] < 0, told
        status, said, _ = told[1 - dying]
        assert status == 3, told
        assert float(said.split()[0]) < 15
        assert said.split()[1] == kind
        assert re.search(rf"rank {dying} on \S+ has ended", said), said
    half = [name for name in os.listdir(where) if name.startswith(".step-00000002.tmp-")]
    assert half  # and it is only the next save that removes it
    ranks(2, script(AGAIN, where=where))


UNHEARD = """
import atexit, resource, sys
import torch, ezpz_dist

def train(path):
    {setup}
    sys.dont_write_bytecode = True  # what is imported now would be kept, cut off
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, resource.RLIM_INFINITY))
    ezpz_dist.save_checkpoint(path, model=torch.nn.Linear(99, 99), step=1, asynchronous=True)

if __name__ == "__main__":
    atexit.register(print, "flushed")
    kept = open(sys.argv[2], "w")
    kept.write("flushed")
    train(sys.argv[1])
"""


def last_words(err):
    """What is said of the last save."""
    assert "File too large" in err
    return re.findall(r"^the last asynchronous save failed.*", err, re.MULTILINE)


@pytest.mark.parametrize("n", [1, 2])
def test_a_failed_save_in_the_background_is_the_exit_status(clean_env, tmp_path, n):
    """Of a script that ends without cleanup(), and whose other hooks are called still."""
    program, kept = tmp_path / "train.py", tmp_path / "kept"
    setup = "pass" if n == 1 else "ezpz_dist.setup_torch(timeout=60)"
    program.write_text(UNHEARD.replace("{setup}", setup))
    start = ["mpiexec", "-n", "2"] if n == 2 else []
    command = [*start, sys.executable, str(program), str(tmp_path / "checkpoints"), str(kept)]
    done = subprocess.run(command, env=clean_env, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert len(last_words(done.stderr)) == n, done.stderr
    assert done.stdout.count("flushed") == n
    assert kept.read_text() == "flushed"


def test_a_failed_save_in_the_background_is_the_exit_status_of_a_function(ranks, tmp_path):
    """Of multiprocessing, which ends without what Python calls at an interpreter's end."""
    text = UNHEARD.partition("if __name__")[0].replace("{setup}", "ezpz_dist.setup_torch()")
    ((status, _, err),) = ranks(1, f"{text}\ntrain({str(tmp_path / 'there')!r})", check=False)
    assert (status, len(last_words(err))) == (1, 1), err


FORKS = """
import os, sys, threading
from ezpz_dist import Saving

going = threading.Event()
Saving(1, "there").start(going.wait)
if child := os.fork():
    _, status = os.waitpid(child, 0)
    going.set()
    sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_child_that_is_forked_while_a_save_goes_on_does_not_wait_for_it(programs):
    ((status, _, err),) = programs(1, FORKS)
    assert status == 0, err


JOBS = """
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
    del os.environ[name]  # each is a job of its own
os.environ["PBS_JOBID"] = f"{10 + job}.pbs"
model, here = torch.nn.Linear(2, 2), "{where}"

def saves(step):
    save_checkpoint(here, model=model, step=step)

def come(number):
    open(f"{here}.{job}.{number}", "w").close()
    until = time.monotonic() + 60
    while not os.path.exists(f"{here}.{1 - job}.{number}"):
        assert time.monotonic() < until
        time.sleep(0.05)

if job == 0:
    saves(15)
    come(1)
    come(2)
    raises(CheckpointError, "11.pbs", saves, 20)  # whose turn it is now
    come(3)
else:
    come(1)
    error = str(raises(CheckpointError, "10.pbs, process", saves, 15))
    assert "which runs; expected one job" in error and "load_checkpoint() from there" in error
    assert load_checkpoint(here, model=model).step == 15
    saves(16)
    come(2)
    come(3)
    saves(17)
"""

ENDED = """
assert not (ending and os.path.exists("{where}/owner.json"))
save_checkpoint("{where}", model=torch.nn.Linear(2, 2), step=18)
if not ending:
    os._exit(0)
"""


def test_the_second_job_in_a_folder_is_told(programs, tmp_path):
    where = str(tmp_path / "checkpoints")
    start = "import os, time, torch\nfrom ezpz_dist import *\n"
    text = start + "job = int(os.environ['RANK'])\n" + JOBS.replace("{where}", where)
    for status, _, errors in programs(2, text):
        assert status == 0, errors
    for ending in (True, False, False):  # a job that is killed leaves its claim, and is dead
        text = f"{start}ending = {ending}\n{ENDED.replace('{where}', where)}"
        ((status, _, errors),) = programs(1, text)
        assert status == 0, errors
