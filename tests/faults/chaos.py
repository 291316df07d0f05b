"""Chaos, seeded: random faults against a small training with spares; after each the invariants.

usage: hatch run test:chaos [--seed=1] [--faults=10] [--jobs=2] [--on=hydra|srun] [--kind=KIND]

Case N of seed S is the same wherever it runs: `--seed=S+N --faults=1` replays it alone. Hosts are
namespaces of this machine (tests/hosts), or the nodes of a private Slurm (tests/slurm): as root.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fire

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "harness")]
from tests.conftest import load  # noqa: E402  # it is found by the path above

launches = load("faults.launches")
words_of, parent_of = launches.words_of, launches.parent_of
STEPS, PPN, NODES, SPARES = 40, 2, 2, 2
PROGRAM = Path(__file__).resolve().parent / "programs" / "steps.py"
NODE, UNKNOWN, PROGRAMS = "node", "unknown", "program"
PATIENCE = 150.0  # seconds for a whole case, on a machine that does other things

KINDS = {
    "kill a rank": [NODE],
    "segfault of a rank": [UNKNOWN],
    "kill a proxy": [NODE],
    "kill an agent": [NODE],
    "kill agent and proxy": [NODE],
    "link down": [NODE],
    "freeze": [NODE],
    "a rank raises": [UNKNOWN],
    "raises on a host": [UNKNOWN, NODE],
    "no module on a host": [UNKNOWN, NODE],
    "full disk on a host": [UNKNOWN, NODE],
    "all raise": [PROGRAMS],
}
"""What can go wrong, and the verdicts in their order."""

OTHER_HOST = {"kill a proxy", "kill an agent", "kill agent and proxy", "link down", "freeze"}
"""Those of a whole node: never of that where ezpz-launch itself is."""

ON_SRUN = KINDS.keys() - {"link down", "freeze", "kill a proxy"}
"""Slurm's nodes here are one host: they have no links, and what runs there is told by variables."""


class Case:
    """One run with one or two faults, from its seed."""

    def __init__(self, seed, place, kind=""):
        self.place, dice = place, random.Random(seed)
        kinds = sorted(KINDS.keys() & place.kinds)
        self.step = dice.randrange(3, STEPS - 5)
        # Two at once are of ranks or nodes that do not share a cause.
        hosts = dice.sample(place.hosts[:NODES], 2 if dice.random() < 0.25 else 1)
        if kind:
            hosts, kinds = place.hosts[1:2], [kind]
        self.faults = []
        for host in hosts:
            kind = dice.choice([k for k in kinds if host != place.hosts[0] or k not in OTHER_HOST])
            node = place.hosts.index(host)
            rank = node * PPN + dice.randrange(PPN)
            self.faults.append({"kind": kind, "host": host, "rank": rank})

    def __str__(self):
        named = [f"{each['kind']} ({each['host']}, rank {each['rank']})" for each in self.faults]
        return f"{' and '.join(named)} at step {self.step}"

    def plan(self):
        rows = []
        for each in self.faults:
            where = {"step": self.step, "host": each["host"]}
            rows += {
                "a rank raises": [
                    {"kind": "raise", **where, "rank": each["rank"], "attempts": [0]}
                ],
                "raises on a host": [{"kind": "raise", **where}],
                "no module on a host": [{"kind": "import", **where}],
                "full disk on a host": [{"kind": "disk", **where}],
                "all raise": [{"kind": "raise", "step": self.step, "attempts": [0]}],
            }.get(each["kind"], [])
        return rows

    def run(self, folder):
        """Return what is wrong after it, empty where nothing is."""
        (folder / "plan.json").write_text(json.dumps(self.plan()))
        (folder / "tmp").mkdir()
        with (folder / "err").open("wb") as err:
            launch = subprocess.Popen(
                self.place.words([sys.executable, str(PROGRAM), str(folder), str(STEPS)]),
                env={**self.place.environment, "TMPDIR": str(folder / "tmp"),
                     "EZPZ_STATE_DIR": str(folder / "state"), "EZPZ_CHAOS": str(folder),
                     "EZPZ_NODE_TIMEOUT": NODE_TIMEOUT},
                cwd=folder, stdin=subprocess.DEVNULL, stdout=err, stderr=err,
                start_new_session=True,
            )  # fmt: skip
        try:
            until(lambda: self.acked(folder) >= self.step or launch.poll() is not None)
            for each in self.faults:
                self.place.do(each, folder)
            status = launch.wait(PATIENCE)
        except (TimeoutError, subprocess.TimeoutExpired):
            return ["no end"]
        finally:
            self.place.mend(self.faults)
            launch.kill()
        return [*self.wrong(status, folder), *self.place.left(folder)]

    @staticmethod
    def acked(folder):
        with contextlib.suppress(OSError, IndexError):
            return int((folder / "acked").read_text().split()[-1])
        return -1

    def wrong(self, status, folder):
        # The same on all nodes in use is the program's fault; and no retry mends it.
        lasting = [each for each in self.faults if "on a host" in each["kind"]]
        hopeless = len(lasting) == NODES
        found = [] if status == 0 or hopeless else [f"exit status {status}"]
        end = (folder / "end").read_text() if status == 0 else undisturbed()
        if end != undisturbed():
            found.append(f"ends with {end}, undisturbed with {undisturbed()}")
        (record,) = (json.loads(each.read_text()) for each in folder.glob("state/launches/*.json"))
        attempts = record["attempts"]
        verdicts = [(each["whose"], each["bad"]) for each in attempts]
        guilty = {each["host"] for each in self.faults}
        found += [
            f"an innocent: {bad}" for whose, bad in verdicts if whose == NODE and set(bad) - guilty
        ]
        if len(self.faults) == 1:
            (fault,) = self.faults
            whose = KINDS[fault["kind"]]
            # A training may be done before it is known that an agent is.
            late = not verdicts and "agent" in fault["kind"]
            if [each for each, _ in verdicts] != whose and not late:
                found.append(f"verdicts {verdicts}, expected {whose}")
        if self.acked(folder) < 0:
            return found if hopeless else [*found, "no step was done"]
        lines = (folder / "metrics" / "metrics.jsonl").read_text().splitlines()
        kept = {json.loads(line).get("step") for line in lines}
        acked = {int(step) for step in (folder / "acked").read_text().split()}
        if lost := acked - kept:
            found.append(f"acknowledged metrics are lost: {sorted(lost)}")
        return found


def undisturbed(world_size=NODES * PPN):
    """Return the end of a run without faults: the program's arithmetic, in one process."""
    import math

    x = 0.5
    for step in range(STEPS):
        total = math.sin(x + step)
        for rank in range(1, world_size):
            total += math.sin(x * (rank + 1) + step)
        x = math.cos(x + total)
    return x.hex()


def until(is_so, patience=PATIENCE):
    end = time.monotonic() + patience
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.02)


def variables_of(pid):
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/environ").read_text(errors="replace")
        return dict(each.partition("=")[::2] for each in text.split("\0"))
    return {}


def send(pids, number):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Place:
    """Four hosts on which cases run, one after the other."""

    def words(self, command):
        return [sys.executable, "-m", "ezpz_launch", *self.where, *OPTIONS, *command]

    def mend(self, faults):
        pass

    def left(self, folder):
        """Return what is left of a case, which is ended."""
        try:
            until(lambda: not self.running(folder), 40)
        except TimeoutError:
            left = self.running(folder)
            named = [words_of(pid)[:6] for pid in left]
            send(left, signal.SIGKILL)
            return [f"left running: {named}"]
        return [f"left: {file}" for file in (folder / "tmp").glob("ezpz-*")]


class Hydra(Place):
    """Four hosts in namespaces of their own; ezpz-launch is on the first."""

    kinds = KINDS.keys()

    def __init__(self, stack):
        self.sandbox = stack.enter_context(load("hosts.sandbox").FourHosts())
        self.hosts = list(self.sandbox.names)
        path = f"{Path(sys.executable).parent}:{self.sandbox.environment['PATH']}"
        self.environment = {**self.sandbox.environment, "PATH": path}
        self.hostfile = self.sandbox.directory / "hostfile"
        self.hostfile.write_text("\n".join(self.hosts))
        self.where = ["--launcher", "hydra", "--hostfile", str(self.hostfile)]

    def words(self, command):
        return [str(self.sandbox.directory / "enter"), self.hosts[0], *super().words(command)]

    def pids(self, host):
        name = f"{self.sandbox.directory.name}-{host}"
        done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, check=False)
        return [int(pid) for pid in done.stdout.split()]

    def do(self, fault, folder):
        pids, kind = self.pids(fault["host"]), fault["kind"]
        if kind == "link down":
            self.sandbox.set_link(fault["host"], "down")
        elif kind == "freeze":
            send(pids, signal.SIGSTOP)
        else:
            proxies = [pid for pid in pids if "hydra_pmi_proxy" in "".join(words_of(pid)[:1])]
            do_to(fault, pids, proxies)

    def mend(self, faults):
        for each in faults:
            self.sandbox.set_link(each["host"], "up")
            send(self.pids(each["host"]), signal.SIGCONT)

    def running(self, folder):
        return [pid for host in self.hosts for pid in self.pids(host)]


class Srun(Place):
    """A job of four nodes of a private Slurm, whose nodes are all this host."""

    kinds = ON_SRUN
    hosts = ("nid001", "nid002", "nid003", "nid004")
    where = ("--launcher", "srun", "--env", "MASTER_ADDR=127.0.0.1")

    def __init__(self, stack):
        slurm = stack.enter_context(load("slurm.sandbox").SlurmSandbox())
        job = launches.allocation(slurm, slurm.directory, "--no-kill", "-N", "4", "-n", "8")
        self.environment = {**stack.enter_context(job), "SLURM_NO_KILL": "set"}

    def do(self, fault, folder):
        pids = [
            pid
            for pid in self.running(folder)
            if variables_of(pid).get("SLURMD_NODENAME") == fault["host"]
        ]
        mains = [pid for pid in pids if "rank_main.py" in "".join(words_of(pid)[3:4])]
        do_to(fault, pids, {parent_of(pid) for pid in mains} - set(pids))

    def running(self, folder):
        return load("slurm.sandbox").processes_with(f"EZPZ_CHAOS={folder}")


def do_to(fault, pids, proxies):
    """Do what is done to processes of a node from outside."""
    kind = fault["kind"]
    ranks = [pid for pid in pids if str(PROGRAM) in words_of(pid)[1:2]]
    mine = [pid for pid in ranks if variables_of(pid).get("EZPZ_RANK") == str(fault["rank"])]
    agents = [pid for pid in pids if any(word.endswith("agent.py") for word in words_of(pid))]
    if kind == "kill a rank":
        send(mine, signal.SIGKILL)
    elif kind == "segfault of a rank":
        send(mine, signal.SIGSEGV)
    if kind in ("kill an agent", "kill agent and proxy"):
        send(agents, signal.SIGKILL)
    if kind in ("kill a proxy", "kill agent and proxy"):
        send(proxies, signal.SIGKILL)


# No fault needs the time without output: it says where a case hangs that does. On a busy machine a
# rank may be silent for long, and a node that answers late is not lost.
OPTIONS = [
    "-N", str(NODES), "--ppn", str(PPN), "--spares", str(SPARES), "--retries", "5",
    "--grace", "2", "--idle-timeout", "25",
]  # fmt: skip
NODE_TIMEOUT = "10"


def main(seed=1, faults=10, jobs=2, on="hydra", *, kind=""):
    """Run so many cases; exit 1 where an invariant does not hold."""
    failed, ended, began = 0, threading.Event(), time.monotonic()
    place = {"hydra": Hydra, "srun": Srun}[on]
    load("hosts.sandbox" if on == "hydra" else "slurm.sandbox")  # before there are threads
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def work(numbers):
        nonlocal failed
        with contextlib.ExitStack() as stack:
            here = place(stack)
            for number in numbers:
                if ended.is_set():
                    return
                case, folder = Case(number, here, kind), Path(tempfile.mkdtemp(prefix="chaos-"))
                start = time.monotonic()
                wrong = case.run(folder)
                said = "; ".join(wrong) or "ok"
                print(f"{number} {time.monotonic() - start:5.1f} s  {case}: {said}", flush=True)
                if wrong:
                    failed += 1
                    print(f"  replay: --seed={number} --faults=1 --on={on}; {folder}", flush=True)
                else:
                    shutil.rmtree(folder)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            list(pool.map(work, [range(seed + job, seed + faults, jobs) for job in range(jobs)]))
        finally:
            ended.set()  # Ctrl-C: each job ends its case, and takes its hosts down
    print(f"{faults} cases in {time.monotonic() - began:.0f} s, {failed} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    fire.Fire(main)
