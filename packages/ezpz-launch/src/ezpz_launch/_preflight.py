"""`ezpz preflight`: look at every node of a job at once, and name those that differ."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from . import _preflight_node
from ._errors import LaunchError, UsageError, say
from ._nodes import allocation_of, remember
from ._options import request_of, split

if TYPE_CHECKING:
    from ezpz_topo import Allocation

    from ._options import Request

# What is wrong with a node: pure, from what all of them report.

Reports = Mapping[str, Mapping[str, Any]]
"""By host, what its program printed."""

_SLOW = 0.6
"""A device that does less than so much of its siblings' median, each time that it is tried."""

_SLOW_LINK = 0.25  # the same of a link, whose rate varies more
_THROTTLED = 0.2  # of the time in which a bound on its cgroup keeps a node from working
_CLOCK = 2.0  # seconds between a node's clock and the median of all
_DISK = 100 << 20  # bytes that a node's temporary folder should have free
_MEMORY = 0.5  # of the median: less is free where something else runs, or a module is lost
_VERSIONS = ("python", "torch", "ezpz-launch", "ezpz-suite", "driver")


def judge(reports: Reports, hosts: Sequence[str]) -> dict[str, list[str]]:
    """Return what is wrong with which hosts, as phrases; those like the others are left out.

    Two nodes have no median that would tell: the slower one is held against the faster.
    """
    bad: dict[str, list[str]] = {host: ["no answer"] for host in hosts if host not in reports}
    for host, why in [*_alone(reports), *_beside_others(reports), *_rates(reports)]:
        bad.setdefault(host, []).append(why)
    return bad


def _alone(reports: Reports) -> Iterator[tuple[str, str]]:
    """Return what is wrong with a node whatever the others are like."""
    for host, each in reports.items():
        errors = [each[key] for key in ("torch_error", "disk_error", "link_error") if key in each]
        yield from ((host, error) for error in errors)
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
    for name in _VERSIONS:
        known = Counter(each[name] for each in reports.values() if name in each)
        for host, each in reports.items():
            if (
                len(known) > 1
                and name in each
                and each[name] != (most := known.most_common()[0][0])
            ):
                yield host, f"{name} {each[name]}, most have {most}"
    devices = {host: len(each["devices"]) for host, each in reports.items() if "devices" in each}
    clocks = {host: each["clock"] for host, each in reports.items() if "clock" in each}
    memories = {host: each["memory"] for host, each in reports.items() if "memory" in each}
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


def _rates(reports: Reports) -> Iterator[tuple[str, str]]:
    """Return what is slow beside its siblings, at its best: what is busy for a moment is not."""
    best = {
        (host, index): max(device["rates"])
        for host, each in reports.items()
        for index, device in enumerate(each.get("devices", ()))
        if device["rates"]
    }
    links = {host: max(each["links"]) for host, each in reports.items() if each.get("links")}
    for (host, index), rate in best.items():
        if rate < _SLOW * (usual := _usual(best)):
            yield host, f"device {index} does {rate:.3g} GFLOP/s, its siblings {usual:.3g}"
    for host, rate in links.items():
        if rate < _SLOW_LINK * (usual := _usual(links)):
            yield host, f"its links do {rate:.3g} MB/s, others' {usual:.3g}"


def _usual(figures: Mapping[Any, float]) -> float:
    """Return the median; of two the larger."""
    values = sorted(figures.values())
    return values[len(values) // 2] if values else 0.0


# The launch of its programs, one a node.

_TIME = 60.0
"""Seconds for all of it; about 5 on idle nodes, of which most is importing torch."""


def look(request: Request, env: Mapping[str, str]) -> tuple[Reports, list[str], str]:
    """Return what each host of a launch reports, its hosts, and what the launch said."""
    words = ["--launcher", request.launcher, "--ppn", "1", "--grace", "1"]
    for name in ("hostfile", "include", "exclude", "machine"):
        if value := getattr(request, name):
            words += [f"--{name}", value]
    if request.nodes:
        words += ["-N", str(request.nodes + request.spares)]
    if request.launcher_args:
        words += ["--launcher-args", shlex.join(request.launcher_args)]
    for pair in request.env:
        words += ["--env", pair]
    start = [sys.executable, "-m", "ezpz_launch", *words]
    # It is no launch of the user's: no record is kept, and nodes found bad are looked at, too.
    own = {**env, "EZPZ_STATE_DIR": os.devnull}
    planned = _run([*start, "--dry-run", "--json", "true"], own)
    if planned.returncode:
        raise LaunchError(planned.stderr.strip().removeprefix("ezpz-launch: "))
    hosts = json.loads(planned.stdout)["hosts"]
    done = _run([*start, "--", sys.executable, _preflight_node.__file__], own)
    reports = {}
    for line in done.stdout.splitlines():
        if line.startswith("preflight {"):
            found = json.loads(line.removeprefix("preflight "))
            reports[hosts[found["node"]]] = found
    return reports, hosts, done.stderr


def _run(words: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    process = subprocess.Popen(
        words, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, errors="replace",
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=_TIME)
    except subprocess.TimeoutExpired:
        # It ends its ranks, and has a moment for it.
        process.terminate()
        out, err = process.communicate()
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def leave_out(request: Request, job: Allocation, env: Mapping[str, str]) -> bool:
    """Look at the hosts of a launch, and remember the bad; return whether there are any."""
    reports, hosts, said = look(request, env)
    if not reports:
        raise LaunchError(f"--preflight: no host answers: {said.strip() or 'it took too long'}")
    bad = judge(reports, hosts)
    say("\n".join(["preflight", *(f"  {line}" for line in table(bad, hosts))]))
    for host, whys in bad.items():
        remember([host], "; ".join(whys), allocation_of(job, request, env), env)
    return bool(bad)


# `ezpz-launch preflight`.

USAGE = "ezpz-launch preflight [--json] [OPTION...], such as -N 4, --hostfile FILE, --exclude LIST"

PAGE = f"""\
usage: {USAGE}

Look at every node of this job at once: devices and what they compute, memory, disk, clock,
versions, links, errors of the kernel. Nodes that differ from the others are listed.

examples:
  ezpz-launch preflight             a table of the bad nodes, and a line for the good ones
  ezpz-launch preflight --json      all that was measured, for programs

exit status: 0 all are alike; 1 some are not; 2 usage"""


def command(argv: Sequence[str], env: Mapping[str, str]) -> str | int:
    as_json, words = "--json" in argv, [word for word in argv if word != "--json"]
    if words[:1] in (["-h"], ["--help"]):
        return PAGE
    options, rest = split(words)
    if rest:
        raise UsageError(f"preflight: {' '.join(rest)!r}; expected no command: {USAGE}")
    reports, hosts, said = look(request_of(options, ("true",)), env)
    bad = judge(reports, hosts)
    if as_json:
        print(json.dumps({"hosts": hosts, "bad": bad, "reports": reports}, indent=1), flush=True)
    else:
        if not reports:
            print(said, file=sys.stderr, end="")
        print("\n".join(table(bad, hosts)), flush=True)
    return 1 if bad else 0


def table(bad: Mapping[str, Sequence[str]], hosts: Sequence[str]) -> list[str]:
    width = max(map(len, hosts))
    lines = [f"{host:<{width}}  {'; '.join(whys)}" for host, whys in bad.items()]
    good = len(hosts) - len(bad)
    return [*lines, f"{good} of {len(hosts)} nodes are alike, and well"]
