"""One rank: it writes to files what happens to it, and does what a row of the table asks for.

usage: rank.py FOLDER BEHAVIOUR [ARGUMENT...]

In FOLDER: RANK.started (JSON, written when all is ready), RANK.signals (a name a line), RANK.done.
Nothing here lasts longer than a minute, so that a broken launcher leaves nothing for long.
"""

import ctypes
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

FOLDER = Path(sys.argv[1])
RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
FAILING = 1

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
heard = []


def hear(*numbers):
    """Note these signals instead of ending by them."""

    def note(number, _frame):
        with (FOLDER / f"{RANK}.signals").open("a", encoding="ascii") as file:
            file.write(f"{signal.Signals(number).name}\n")
        heard.append(number)

    for number in numbers:
        signal.signal(number, note)


def started(**more):
    facts = {
        "pid": os.getpid(),
        "host": os.environ.get("SLURMD_NODENAME", os.uname().nodename),
        "words": sys.argv[2:],
        "environment": dict(os.environ),
        **more,
    }
    # Written aside: who sees the file sees all of it.
    draft = FOLDER / f"{RANK}.draft"
    draft.write_text(json.dumps(facts), encoding="utf-8")
    draft.rename(FOLDER / f"{RANK}.started")


def done():
    (FOLDER / f"{RANK}.done").touch()


def all_started():
    return all((FOLDER / f"{rank}.started").exists() for rank in range(WORLD_SIZE))


def wait(until=lambda: False, seconds=600):
    end = time.monotonic() + seconds
    while not until() and time.monotonic() < end:
        time.sleep(0.02)


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def children_of(pid):
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except OSError:
        return []


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def rank_main_of(pid):
    """Return the process that runs a rank's command and reports its end."""
    while b"rank_main.py" not in command_of(pid):
        pid = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").split("PPid:")[1].split()[0]
    return pid


def others_wait():
    """Go on as the rank that fails, when all are there; the others stay."""
    started()
    wait(all_started)
    if RANK != FAILING:
        wait()
        sys.exit("rank.py: nobody ended this rank")


def exits(status):
    others_wait()
    sys.exit(int(status))


def dies(name):
    others_wait()
    os.kill(os.getpid(), signal.Signals[name])
    wait()


def segfaults():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    others_wait()
    ctypes.string_at(0)


def dies_with_workers():
    """As a rank with data loaders that is killed: they do not end by themselves."""
    workers = [
        subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL, start_new_session=apart).pid
        for apart in (False, True)
    ]
    started(workers=workers)
    wait(all_started)
    if RANK == FAILING:
        os.kill(os.getpid(), signal.SIGKILL)
    wait()


def leaves_a_helper(holds, number):
    """Rank 1 ends and leaves one that has a session of its own, and holds the output or not."""
    pids = []
    if RANK == FAILING:
        script = f"trap '' {number}; echo ready; exec sleep 60"
        helper = subprocess.Popen(
            ["sh", "-c", script if number else script.partition(";")[2]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if holds == "holds" else subprocess.DEVNULL,
            start_new_session=True,
        )
        helper.stdout.readline()
        pids.append(helper.pid)
    started(workers=pids)


def stays_deaf():
    """Rank 1 exits 3; the others hear SIGTERM and go on."""
    hear(signal.SIGTERM)
    exits("3")


def exits_beside_checkpoints(status, seconds):
    """Rank 1 exits; the others, told to end, work for so long and then end well."""
    if RANK == FAILING:
        exits(status)
    checkpoints(seconds)


def shouts():
    """Rank 1 exits 3 while the others fill standard error."""
    started()
    wait(all_started)
    if RANK == FAILING:
        time.sleep(0.3)
        sys.exit(3)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        # 10 MB/s: Open MPI queues all that it is given, and what fails comes after it.
        time.sleep(0.001)
        # Of any length: whatever a launcher cuts, it cuts it anywhere.
        for length in (7, 333, 1021, 5003):
            os.write(2, bytes([97 + RANK]) * length + b"\n")


def unread(pid):
    """Return how many bytes of a process's standard error, where it is a pipe, are not read yet."""
    path = Path(f"/proc/{pid}/fd/2")
    if not path.is_fifo():
        return 0
    with path.open("rb", buffering=0) as pipe:
        return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def all_exit(status):
    """Every rank fails by itself, the others as soon as rank 1 is known to have failed."""
    started(rank_main=rank_main_of(os.getpid()))
    wait(all_started)
    if RANK != FAILING:
        text = (FOLDER / f"{FAILING}.started").read_text(encoding="utf-8")
        rank_main = json.loads(text)["rank_main"]
        # The end is reported once its process waits to be released, and known once that is read.
        wait(lambda: not children_of(rank_main) and state_of(rank_main) == "S")
        wait(lambda: not unread(rank_main))
    done()
    sys.exit(int(status) if RANK == FAILING else 9)


def checkpoints(seconds):
    """At a signal to end, work for so long, and then end well."""
    hear(*ENDING)
    started()
    wait(lambda: bool(heard))
    # Whatever comes meanwhile is noted, and does not hurry it.
    wait(seconds=float(seconds))
    done()


def goes_on():
    """Note every signal until the file "go" is there."""
    hear(*ENDING, signal.SIGUSR1, signal.SIGUSR2)
    started()
    wait((FOLDER / "go").exists)
    done()


def waits():
    started()
    wait()


def hangs():
    """Rank 0 ends; the others say that they began, and then nothing."""
    started()
    print("began", flush=True)
    if RANK:
        stuck_here()


def stuck_here():
    time.sleep(600)  # the line that hangs


def writes(count):
    """So many bytes of its letter on stdout, a tenth on stderr, then all 256 and odd separators."""
    odd = bytes(range(256)) + b"\x1e\x1e\x1f\n\x1eezpz \x1f\x1e"
    started()
    for descriptor, left in ((1, int(count)), (2, int(count) // 10)):
        line = bytes([97 + RANK]) * 996 + b"\xff\x00\r\n"
        text = memoryview(line * (left // len(line)) + b"-" * (left % len(line)) + odd)
        while text:
            text = text[os.write(descriptor, text) :]
    done()


def says():
    """Also what is on the standard input of what it starts, and of itself."""
    started(read=subprocess.check_output(["cat"], text=True) + sys.stdin.read())


globals()[sys.argv[2]](*(() if sys.argv[2] == "says" else sys.argv[3:]))
