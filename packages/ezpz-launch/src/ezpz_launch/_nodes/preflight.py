"""`ezpz preflight`: look at every node of a job at once, and name those that differ.

``python -m ezpz_launch._nodes.preflight`` is what looks at one node, started as a rank, one a node.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import IO, Any, NamedTuple

from ezpz_launch._errors import LaunchError, UsageError, say
from ezpz_launch._nodes.bad_nodes import NODE, allocation_of, one_a_node, patterns, remember
from ezpz_launch._plan.options import Request, build_request, split
from ezpz_launch._plan.plan import LaunchPlan
from ezpz_launch._run.record import aligned, why_not_written
from ezpz_topo import Allocation

# What is wrong with a node: pure, from what all of them report.

Reports = Mapping[str, Mapping[str, Any]]  # by host, what its program printed

_SLOW = 0.6
"""A device that does less than so much of its siblings' median, each time that it is tried."""

_SLOW_LINK = 0.25  # the same of a link, whose rate varies more
_THROTTLED = 0.2  # of the time that a node wants to run, its cgroup's bound may keep it waiting
_CLOCK = 2.0  # seconds between a node's clock and the median of all
_DISK = 100 << 20  # bytes that a node's temporary folder should have free
_MEMORY = 0.5  # of the median: less is free where something else runs, or a module is lost
_TORCH_TIME = 45  # seconds for torch's import and its devices, within `_TIME`
_LATE = f"torch and its devices do not answer in {_TORCH_TIME} s"
_STARVED = f"{_LATE}, others use the processor"
PACKAGES = ("torch", "ezpz-suite", "ezpz-topo", "ezpz-device", "ezpz-tp", "ezpz-dist",
            "ezpz-launch", "ezpz-obs", "mpi4py", "numpy")  # fmt: skip


def judge(reports: Reports, hosts: Sequence[str]) -> dict[str, list[str]]:
    """Return what is wrong with which hosts, as phrases; those like the others are left out."""
    bad: dict[str, list[str]] = {host: ["no answer"] for host in hosts if host not in reports}
    for host, why in [*_alone(reports), *_beside_others(reports), *_rates(reports)]:
        bad.setdefault(host, []).append(why)
    return bad


def guilty(bad: Mapping[str, list[str]], reports: Reports) -> dict[str, list[str]]:
    """Return the bad hosts without those that, as most, did not meet the first one."""
    apart = _all(reports, "link_error")
    if len(apart) <= max(1, len(reports) / 2):
        return dict(bad)
    whys = {host: [why for why in its if why != apart.get(host)] for host, its in bad.items()}
    return {host: its for host, its in whys.items() if its}


def unjudged(reports: Reports) -> dict[str, str]:
    """Return of which hosts something was not judged, and why: no fault of theirs."""
    return {host: f"devices not judged ({why})" for host, why in _late(reports).items()} | {
        host: f"processor and links not judged (others used {1 - device['share']:.0%} of it)"
        for host, each in reports.items()
        for device in each.get("devices", ())
        if not device["rates"] and each["throttled"] <= _THROTTLED
    }


def _late(reports: Reports) -> dict[str, str]:
    """Return the hosts whose torch is late for no fault of theirs, and why."""
    errors = {host: each.get("torch_error") for host, each in reports.items()}
    late = [host for host, error in errors.items() if error == _LATE]
    found = {host: _STARVED for host, error in errors.items() if error == _STARVED}
    if len(late) > max(2, len(reports) / 2):  # all read one copy
        found |= dict.fromkeys(late, f"{_LATE}, as on most nodes: its file system is slow")
    return found


def _alone(reports: Reports) -> Iterator[tuple[str, str]]:
    """Return what is wrong with a node whatever the others are like."""
    unjudged = _late(reports)
    for host, each in reports.items():
        keys = () if host in unjudged else ("torch_error",)
        yield from ((host, each[key]) for key in (*keys, "disk_error", "link_error") if key in each)
        yield from ((host, f"its kernel says: {line}") for line in each.get("kernel", ()))
        if each.get("disk", _DISK) < _DISK:
            yield host, f"{each['disk'] / 1e6:.0f} MB of disk are free"
        if each.get("throttled", 0.0) > _THROTTLED:
            yield host, f"its processors are throttled for {each['throttled']:.0%} of the time"
        for index, device in enumerate(each.get("devices", ())):
            if not device["right"]:
                yield host, f"device {index} computes wrong numbers"


def _beside_others(reports: Reports) -> Iterator[tuple[str, str]]:
    """Return what should be alike on all nodes, and is not."""
    yield from differing(reports)
    devices = {host: len(its) for host, its in _all(reports, "devices").items()}
    clocks, memories = _all(reports, "clock"), _all(reports, "memory")
    for host, count in devices.items():
        if count != _usual(devices):
            yield host, f"{count} devices, others have {_usual(devices)}"
    for host, clock in clocks.items():
        # Which of two is right is unknown: the first, where ezpz-launch mostly is, is believed.
        middle = median(clocks.values()) if len(clocks) > 2 else 0.0
        if abs(clock - middle) > _CLOCK:
            yield host, f"its clock is {clock - middle:+.1f} s off"
    for host, memory in memories.items():
        if memory < _MEMORY * (usual := _usual(memories)):
            yield host, f"{memory / 1e9:.1f} GB of memory are free, others have {usual / 1e9:.1f}"


def differing(reports: Reports) -> Iterator[tuple[str, str]]:
    """Return which hosts have another version of something than most."""
    for name in ("python", *PACKAGES, "driver"):
        versions = _all(reports, name)
        ((most, _),) = Counter(versions.values()).most_common(1) or [("", 0)]
        for host, version_there in versions.items():
            if version_there != most:
                yield host, f"{name} {version_there}, most have {most}"


def _rates(reports: Reports) -> Iterator[tuple[str, str]]:
    """Return what is slow beside its siblings, at its best: what is busy for a moment is not."""
    best = {
        (host, index): max(device["rates"])
        for host, devices in _all(reports, "devices").items()
        for index, device in enumerate(devices)
        if device["rates"]
    }
    # Who waits for a processor is as slow on a link.
    busy = unjudged(reports)
    links = {
        host: max(its) for host, its in _all(reports, "links").items() if its and host not in busy
    }
    for (host, index), rate in best.items():
        if rate < _SLOW * (usual := _usual(best)):
            yield host, f"device {index} does {rate:.3g} GFLOP/s, its siblings {usual:.3g}"
    for host, rate in links.items():
        if rate < _SLOW_LINK * (usual := _usual(links)):
            yield host, f"its links do {rate:.3g} MB/s, others' {usual:.3g}"


def _all(reports: Reports, key: str) -> dict[str, Any]:
    """Return this of each host that reports it."""
    return {host: each[key] for host, each in reports.items() if key in each}


def _usual(figures: Mapping[Any, float]) -> float:
    """Return the median; of two the larger."""
    values = sorted(figures.values())
    return values[len(values) // 2] if values else 0.0


# The launch of its programs, one a node.

_TIME = 60.0  # seconds for all of it; about 5 on idle nodes, of which most is importing torch
_MARK = "preflight "  # begins the line that a node's program prints


def look(planned: LaunchPlan, env: Mapping[str, str]) -> tuple[Reports, tuple[str, ...], str]:
    """Return what each host of a launch reports, its hosts, and what was said meanwhile."""
    hosts = (*planned.placement.hosts, *planned.spares)
    words, own = one_a_node(hosts, planned, env)
    # To end its ranks it has a moment.
    ended = run([*words, "--", sys.executable, "-P", "-m", __name__], own, _TIME, grace=5.0)
    return reports_in(ended.stdout, hosts), hosts, ended.stderr


def reports_in(text: str, hosts: Sequence[str]) -> Reports:
    """Return what the programs have printed, one a node of these hosts."""
    lines = [line for line in text.splitlines() if line.startswith(f"{_MARK}{{")]
    told = [json.loads(line.removeprefix(_MARK)) for line in lines]
    return {hosts[each["node"]]: each for each in told}


def leave_out(planned: LaunchPlan, job: Allocation, env: Mapping[str, str]) -> bool:
    """Look at the hosts of a launch, and remember the bad; return whether there are any."""
    reports, hosts, said = look(planned, env)
    if 2 * len(reports) < len(hosts):  # not the fault of so many
        answer = f"{len(reports)} of {len(hosts)} hosts" if reports else "no host"
        why = said.strip() or f"the others took more than {_TIME:.0f} s"
        raise LaunchError(f"--preflight: {answer} answered: {why}")
    bad = judge(reports, hosts)
    lines = table(bad, unjudged(reports), hosts)
    left_out = guilty(bad, reports)
    if left_out != bad:
        lines.append("most nodes did not meet the first, which may be at fault: all stay for that")
    say("\n".join(["preflight", *(f"  {line}" for line in lines)]))
    for host, whys in left_out.items():
        remember([host], "; ".join(whys), allocation_of(job, planned.request, env), env)
    return bool(left_out)


# Run a command to its end: no input, a time limit, and nothing left of it afterwards.


class Ended(NamedTuple):
    """How a command ended; ``status`` is None where its time was over."""

    status: int | None
    stdout: str
    stderr: str

    @property
    def last_words(self) -> str:
        """The last line with a letter in it of what it said, for people."""
        said = self.stderr.strip() or self.stdout.strip()
        lines = [line for line in said.splitlines() if any(map(str.isalpha, line))]
        return lines[-1].strip()[:160] if lines else "nothing"


def run(
    argv: Sequence[str], env: Mapping[str, str], seconds: float, *, grace: float = 0.0
) -> Ended:
    """Run a command for so many seconds; it has ``grace`` from SIGTERM to SIGKILL."""
    # In our process group: what it leaves behind ends with that.
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    said: tuple[bytes | None, bytes | None]
    with subprocess.Popen(argv, env=env, stdin=null, stdout=pipe, stderr=pipe) as process:
        ends = [(seconds, process.terminate), (grace, process.kill), (0.2, process.kill)]
        try:
            for number, (patience, end) in enumerate(ends):
                try:
                    said = process.communicate(timeout=patience)
                    status = None if number else process.returncode
                    break
                except subprocess.TimeoutExpired as late:
                    # What it started may hold the pipes for ever.
                    status, said = None, (late.stdout, late.stderr)
                    end()
        finally:
            process.kill()  # nothing, where it has ended
    out, err = ((part or b"").decode(errors="replace") for part in said)
    return Ended(status, out, err)


# `ezpz-launch preflight`.

USAGE = "ezpz-launch preflight [--json] [OPTION...], such as -N 4, --hostfile FILE"

PAGE = f"""\
usage: {USAGE}

Look at every node of this job at once: devices and what they compute, memory,
disk, clock, versions, links, errors of the kernel. Nodes that differ from the
others are listed.

Where others use the processor meanwhile, it and the links are not judged, and a
line says so.

examples:
  ezpz-launch preflight          a table of the bad nodes, a line for the good
  ezpz-launch preflight --json   all that was measured, for programs

exit status: 0 all are alike; 1 some are not; 2 usage"""


def command(
    argv: Sequence[str], plan_of: Callable[[Request], tuple[LaunchPlan, Mapping[str, str]]]
) -> str | int:
    as_json, words = "--json" in argv, [word for word in argv if word != "--json"]
    if words[:1] in (["-h"], ["--help"]):
        return PAGE
    options, rest = split(words)
    if rest:
        raise UsageError(f"preflight: {' '.join(rest)!r}; expected no command: {USAGE}")
    reports, hosts, said = look(*plan_of(build_request(options, ("true",))))
    bad, notes = judge(reports, hosts), unjudged(reports)
    if as_json:
        found = {"hosts": hosts, "bad": bad, "notes": notes, "reports": reports}
        print(json.dumps(found, indent=1), flush=True)
    else:
        if not reports:
            print(said, file=sys.stderr, end="")
        print("\n".join(table(bad, notes, hosts)), flush=True)
    return 1 if bad else 0


def table(
    bad: Mapping[str, Sequence[str]], notes: Mapping[str, str], hosts: Sequence[str]
) -> list[str]:
    rows = [*((host, "; ".join(whys)) for host, whys in bad.items()), *notes.items()]
    good = f"{len(hosts) - len(bad)} of {len(hosts)} nodes are alike, and well"
    return [*(aligned(rows) if rows else []), good]


# What is looked at on one node, by a process there, which prints it as one line.
#
# Node 0 is where all meet: it compares clocks, and tells each where the others listen. Then nodes
# exchange data in pairs, log2(n) times.

_PATIENCE = 10.0  # seconds in which the others must have come
_PAYLOAD = 8 << 20  # bytes of one exchange
_ROUNDS = 4  # partners at most: what is slow shows with the first
_EXCHANGES = 5  # with each, of which the best counts
_WORK = 0.3  # seconds of matrix products, thrice
_WORKED = 0.8  # less of that time is no measure: who had the rest had the caches, too

_TORCH = f"""
import json, time, torch
has = lambda kind: hasattr(torch, kind) and getattr(torch, kind).is_available()
kind = next(filter(has, ("cuda", "xpu")), "cpu")
module, found = getattr(torch, kind), []
# Of several threads, who waits for a slow one would count as work.
torch.set_num_threads(1)
for index in range(module.device_count() if kind != "cpu" else 1):
    device = torch.device(kind, index) if kind != "cpu" else torch.device("cpu")
    n = 4096 if kind != "cpu" else 256
    x, rates, shares = torch.ones(n, n, device=device), [], []
    # A processor by its own seconds: what else runs there takes none of them.
    clock = time.process_time if kind == "cpu" else time.monotonic
    x @ x
    for _ in range(3):
        begin, start, count = clock(), time.monotonic(), 0
        while time.monotonic() < start + {_WORK}:
            y = x @ x
            module.synchronize(*[device] * (kind != "cpu"))
            count += 1
        worked = clock() - begin
        shares.append(worked / (time.monotonic() - start))
        if shares[-1] > {_WORKED}:
            rates.append(2e-9 * n**3 * count / worked)
    free = torch.cuda.mem_get_info(index)[0] if kind == "cuda" else 0
    right = float(y[0, 0]) == n
    found.append(dict(rates=rates, right=right, free=free, share=max(shares)))
print(json.dumps(dict(kind=kind, devices=found)))
"""


def _look_at_torch() -> dict[str, object]:
    """Return what torch's devices do, by a process of its own: a broken driver may hang it."""
    words, pipe = [sys.executable, "-c", _TORCH], subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            told, errors = process.communicate(timeout=_TORCH_TIME)
        except subprocess.TimeoutExpired:
            starved = _waited(process.pid) > _TORCH_TIME / 2
            process.kill()
            return {"torch_error": _STARVED if starved else _LATE}
    if process.returncode == 0:
        return dict(json.loads(told.splitlines()[-1]))
    said = (errors.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
    return {} if "No module named 'torch'" in said else {"torch_error": said[:200]}


def _waited(pid: int) -> float:
    """Return the seconds for which a process was ready and had no processor; 0 if unknown."""
    with suppress(OSError), open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
        return 1e-9 * int(file.read().split()[1])
    return 0.0


def _look_at_system() -> dict[str, object]:
    found: dict[str, object] = {"kernel": _kernel_errors()}
    with suppress(OSError), open("/proc/driver/nvidia/version", encoding="utf-8") as file:
        found["driver"] = " ".join(file.readline().split())
    with suppress(OSError, IndexError), open("/proc/meminfo", encoding="utf-8") as file:
        found["memory"] = 1024 * int(re.findall(r"MemAvailable: +(\d+)", file.read())[0])
    folder = os.environ.get("TMPDIR") or "/tmp"
    if why := why_not_written(folder):
        found["disk_error"] = f"{folder}: {why}"
    with suppress(OSError):
        disk = os.statvfs(folder)
        found["disk"] = disk.f_bavail * disk.f_frsize
    return found


def _throttled() -> float:
    """Return the seconds for which a bound on this cgroup has kept us from running; 0 if none."""
    with suppress(OSError, ValueError):
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            groups = [line.strip().split(":", 2) for line in file]
        # Version 2 has one group, of number 0; version 1 one for each controller.
        folders = [f"/sys/fs/cgroup{path}" for number, _, path in groups if number == "0"]
        of_cpu = [path for _, its, path in groups if "cpu" in its.split(",")]
        folders += [f"/sys/fs/cgroup/cpu{path}" for path in of_cpu]
        for folder in folders:
            with suppress(FileNotFoundError), open(f"{folder}/cpu.stat", encoding="utf-8") as file:
                stat = dict(line.split() for line in file)
                micro, nano = stat.get("throttled_usec", 0), stat.get("throttled_time", 0)
                return 1e-6 * int(micro) + 1e-9 * int(nano)
    return 0.0


def _kernel_errors() -> list[str]:
    """Return lines of the last hour that speak of broken hardware, where users may read them."""
    try:
        told = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=5, check=False)
        with open("/proc/uptime", encoding="ascii") as file:
            since = float(file.read().split()[0]) - 3600
    except (OSError, subprocess.TimeoutExpired):
        return []
    own = re.compile(rb"Machine check events logged|I/O error, dev")
    bad = [own, *(row.match for row in patterns() if row.whose == NODE)]
    lines = re.findall(r"^\[ *([\d.]+)\] (.*)$", told.stdout, re.MULTILINE)
    recent = [line for when, line in lines if float(when) > since]
    return [line[:200] for line in recent if any(e.search(line.encode()) for e in bad)][-3:]


def _put(connection: socket.socket, value: object) -> None:
    connection.sendall(json.dumps(value).encode() + b"\n")


def _get(said: IO[bytes]) -> Any:
    if not (line := said.readline(1 << 24)):
        raise ConnectionError("another node has closed its connection")
    return json.loads(line)


def _meet(node: int, count: int, mine: int) -> tuple[dict[int, tuple[str, int]], float]:
    """Return where the nodes listen that have come, and by how much our clock differs from 0's."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    until = time.monotonic() + _PATIENCE
    if node:
        while True:
            try:
                hub = socket.create_connection(place, 1)
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
        hub.settimeout(2 * _PATIENCE)
        said = hub.makefile("rb")
        _put(hub, [os.environ["EZPZ_LAUNCH_ID"], node, mine])
        _get(said)
        _put(hub, time.time())
        table, offset = _get(said)
        return {int(key): tuple(value) for key, value in table.items()}, offset
    table = {0: (place[0], mine)}
    came: list[tuple[socket.socket, float]] = []
    with socket.create_server(("", place[1]), backlog=1024) as server:
        while len(came) < count - 1 and (left := until - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                other, address = server.accept()
                other.settimeout(2)
                said = other.makefile("rb")
                launch, number, port = _get(said)
                if launch != os.environ["EZPZ_LAUNCH_ID"]:
                    continue
                begin = time.time()
                _put(other, "clock")
                clock, end = _get(said), time.time()
            except (OSError, ValueError, TypeError):
                continue
            table[number] = (address[0], port)
            came.append((other, clock - (begin + end) / 2))
    for other, offset in came:
        _put(other, [table, offset])
    return table, 0.0


def _exchange(node: int, table: dict[int, tuple[str, int]], server: socket.socket) -> list[float]:
    """Return the rates, in MB/s, of exchanges with one partner after another."""
    rates, order = [], sorted(table)
    place = order.index(node)
    for round_number in range(min(_ROUNDS, (len(order) - 1).bit_length())):
        other = place ^ (1 << round_number)
        if other >= len(order):
            continue
        try:
            if place > other:
                link = socket.create_connection(table[order[other]], _PATIENCE)
            else:
                server.settimeout(_PATIENCE)
                link, _ = server.accept()
            with link, link.makefile("rb") as arriving:
                link.settimeout(_PATIENCE)
                for _ in range(_EXCHANGES):
                    begin = time.monotonic()
                    sender = threading.Thread(target=link.sendall, args=(bytes(_PAYLOAD),))
                    sender.start()
                    is_whole = len(arriving.read(_PAYLOAD)) == _PAYLOAD
                    sender.join()
                    rates.append(is_whole * 2e-6 * _PAYLOAD / (time.monotonic() - begin))
        except OSError:
            rates.append(0.0)
    return rates


def _main() -> None:
    node, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found: dict[str, object] = {"node": node, "python": platform.python_version()}
    for name in PACKAGES:
        found[name] = "not installed"
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    found |= _look(node, count)
    print(f"\n{_MARK}{json.dumps(found)}", flush=True)


def _look(node: int, count: int) -> dict[str, object]:
    found = _look_at_system()
    with socket.create_server(("", 0)) as server:
        try:
            table, found["clock"] = _meet(node, count, server.getsockname()[1])
            found["links"] = _exchange(node, table, server)
        except OSError as error:
            found["link_error"] = str(error)
    # Last: then no node waits for a slow one.
    before, begin = _throttled(), sum(os.times()[:4])
    found |= _look_at_torch()
    kept, worked = _throttled() - before, sum(os.times()[:4]) - begin
    found["throttled"] = kept / (kept + worked or 1.0)  # time in which it waits for files is none
    return found


if __name__ == "__main__":
    _main()
