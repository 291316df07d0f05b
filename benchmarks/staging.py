"""Staging through a tree of nodes on loopback, and what it means at scale: ``bench:staging``.

What is real: the program that runs on each node, its connections, checksums, files. What is not:
64 nodes share this machine's cores and its disk, so a node's disk is modelled: each file's bytes go
to memory, and take the time that a disk of ``--disk`` MB/s takes. The model of a large machine is
arithmetic with assumptions, which are printed.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import fire
from scaling.fresh import STRACE, environment, traced
from scaling.strace import looked_at

from ezpz_launch._nodes import stage_node
from ezpz_launch._nodes.archive import Python, Root, Source, What
from ezpz_launch._nodes.tree import Tree

_MEMORY = next((each for each in ("/dev/shm",) if os.path.isdir(each)), None)  # noqa: S108 - a disk

# A node whose disk takes its time, with the program as it is.
NODE = """
import sys, time
sys.path.insert(0, sys.argv[1])
import stage_node as node
write, rate = node.Node._write, float(sys.argv.pop(2))
def slow(self, file, offset, data):
    write(self, file, offset, data)
    time.sleep(len(data) / rate)
node.Node._write = slow
node.os.cpu_count = lambda: 1
del sys.argv[1]
node.main()
"""


def source(files: int, size: float, folder: Path) -> Source:
    """Make so many files of so many MB in all."""
    data = folder / "data"
    for number in range(files):
        path = data / str(number % 50) / f"{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(int(size * 1e6 / files)))
    time.sleep(0.1)  # what is younger than the clock's grain is taken for changed at the next look
    python = Python(str(data), str(data), "", "", "", "", [])
    return Source(What([Root(str(data), "benchmark")], {}, [], python), str(folder))


def staged(what: Source, nodes: int, folder: Path, rate: float) -> Tree:
    """Stage to so many nodes, each with a folder of its own."""
    tree = Tree(["localhost"] * nodes, here=True)
    tree.order("stage", what.name, 0.5, source=what)
    tree.start()
    program = Path(stage_node.__file__)
    processes = []
    for node in range(nodes):
        place = folder / str(node)
        place.mkdir(exist_ok=True)
        env = {"EZPZ_STAGE": f"{tree.where} {tree.secret}", "RANK": str(node)}
        words = [sys.executable, "-I", "-S", "-c", NODE, str(program.parent), str(rate), str(place)]
        processes.append(subprocess.Popen(words, env=env))
    done = tree.join(600)
    tree.stop()
    for process in processes:
        process.wait(60)
    if not done or tree.bad:
        sys.exit(f"staging: {tree.failed() or 'not within 600 s'}")
    return tree


def model(
    size: float, nodes: int, *, read: float, link: float, unpack: float, start: float
) -> float:
    """Return the seconds for so many GB; each argument is told where it is printed."""
    fan_out = 2 if nodes <= 64 else 4
    depth = math.ceil(math.log(nodes * (fan_out - 1) + 1, fan_out))
    slowest = max(size / read, size * fan_out / link, size / unpack)
    chunk = stage_node.CHUNK / 1e9
    return start + slowest + depth * chunk * (1 / link * fan_out + 1 / unpack)


def calls(folder: Path) -> int:
    """Stage this environment; return how many calls of a rank of `minimal` name files elsewhere."""
    disk, job = folder / "disk", folder / "job"
    disk.mkdir(), job.mkdir()
    env = environment(HOME=os.path.expanduser("~"), TMPDIR=str(disk))
    launch = [sys.executable, "-m", "ezpz_launch", "--launcher", "spawn", "-n", "1", "--stage"]
    command = ["-m", "ezpz.examples.minimal", "--epochs", "1"]
    subprocess.run([*launch, *command], env=env, cwd=job, check=True)  # and compiled
    words = [*launch, "--dry-run", "--json", *command]
    told = subprocess.run(words, env=env, cwd=job, check=True, capture_output=True)
    plan = json.loads(told.stdout)
    tree = plan["environment"]["EZPZ_STAGED"]
    start = next(at for at, word in enumerate(plan["argv"]) if word.endswith("rank_shim.sh"))
    # The launch has the shim from the tree, too.
    argv = ["sh", f"{tree}{os.path.realpath(plan['argv'][start])}", *plan["argv"][start + 1 :]]
    env |= {**plan["environment"], "EZPZ_SPAWN_RANK": "0", "EZPZ_SPAWN_SIZE": "1"}
    found = looked_at(traced(argv, "%file", env, str(job)), str(job))
    # The system's own files are of the node's image, and above the tree is the way to it.
    node = (str(disk), "/proc", "/sys", "/dev/null", "/dev/fd", "/usr", "/lib", "/etc", "/bin")
    above = set(map(str, disk.parents))
    named = [os.path.realpath(call.path) for call in found if call.by_name]
    elsewhere = [path for path in named if path not in above]
    return sum(not f"{path}/".startswith(tuple(f"{each}/" for each in node)) for path in elsewhere)


def main(*, files: int = 400, size: float = 24, disk: float = 4, read: float = 1.0,
         link: float = 2.0, unpack: float = 0.2, start: float = 15.0,
         whole: bool = False) -> None:  # fmt: skip
    """Print times, bytes read and the model; the status is 1 where a goal is missed.

    Args:
        files: Files that are staged.
        size: MB of them.
        disk: MB/s of a node's disk, modelled.
        read: GB/s that one process reads from the shared file system, assumed.
        link: GB/s that a node sends in all, by TCP, assumed.
        unpack: GB/s that a node unpacks, assumed.
        start: Seconds until a process runs on each node, assumed.
        whole: Also stage this environment, and count the files that a rank names elsewhere.
    """
    missed, one = False, 0.0
    for nodes in (1, 4, 16, 64):
        folder = Path(tempfile.mkdtemp(dir=_MEMORY))
        try:
            what = source(files, size, folder)
            tree = staged(what, nodes, folder, disk * 1e6)
            one = one or tree.seconds
            ratio = what.bytes_read / what.size
            began = time.perf_counter()
            looked_again = Source(what.what, os.path.dirname(what.home))
            again = staged(looked_again, nodes, folder, disk * 1e6)
            second = time.perf_counter() - began
            times = f"{tree.seconds:6.2f} s ({tree.seconds / one:.2f} x one)"
            had = f"again {second:.2f} s, {len(again.had)} had it"
            print(f"{nodes:>3} nodes: {times}, {ratio:.3f} x the archive read; {had}")
            missed |= tree.seconds > 4 * one or ratio > 1.02 or len(again.had) < nodes
        finally:
            shutil.rmtree(folder)
    print(f"model: {read:g} GB/s read, {link:g} GB/s sent by a node, {unpack:g} GB/s unpacked, "
          f"{start:g} s until all run; all assumed")  # fmt: skip
    for nodes in (64, 512, 4096, 10080):
        seconds = model(8, nodes, read=read, link=link, unpack=unpack, start=start)
        print(f"  8 GB on {nodes:>6,} nodes: {seconds:.0f} s")
        missed |= seconds > 120
    if whole and STRACE:
        with tempfile.TemporaryDirectory(prefix="ezpz-staging-", dir=_MEMORY) as place:
            number = calls(Path(place))
        print(f"a rank of minimal, staged: {number} calls name a file that is not on the node")
        missed |= number > 300
    sys.exit(missed)


if __name__ == "__main__":
    fire.Fire(main)
