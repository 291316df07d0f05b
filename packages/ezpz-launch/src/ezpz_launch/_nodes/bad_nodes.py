"""Nodes that fail: whose fault an end was, what takes their place, the memory of them.

And `ezpz-launch nodes`, which shows that.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import NamedTuple

from ezpz_launch._errors import LaunchError, UsageError, say
from ezpz_launch._plan.options import Request
from ezpz_launch._plan.plan import LaunchPlan
from ezpz_launch._run import agent
from ezpz_launch._run.launch import FailureEvidence, Outcome, describe_exit_status
from ezpz_launch._run.record import aligned, dump, iso_time, make_folder, records_folder, write
from ezpz_topo import Allocation, TopoError, ask, fold_nodelist, get_pbs_folder, same_host

# Whose fault the end of one attempt was: pure, from its facts and its last words.

NODE, PROGRAM, UNKNOWN = "node", "program", "unknown"
_CASCADE = "cascade"

Failure = tuple[int, str, int]  # rank, host and status of the first that failed


class Verdict(NamedTuple):
    whose: str  # NODE, PROGRAM or UNKNOWN: what is at fault
    hosts: tuple[str, ...]  # the nodes that are at fault, or suspected
    why: str  # as one phrase


class Pattern(NamedTuple):
    """A row of ``faults.toml``, which explains the fields."""

    match: re.Pattern[bytes]
    whose: str
    why: str
    source: str


@cache
def patterns() -> tuple[Pattern, ...]:
    with open(os.path.join(os.path.dirname(__file__), "faults.toml"), "rb") as file:
        rows = tomllib.load(file)["fault"]
    return tuple(Pattern(**{**row, "match": re.compile(row["match"].encode())}) for row in rows)


_KILLED, _BUS = 128 + signal.SIGKILL, 128 + signal.SIGBUS
_SENT = tuple(128 + number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
"""Statuses of ranks that somebody else told to end: they say nothing of who failed."""

_CRASHED = tuple(128 + number for number in (signal.SIGSEGV, signal.SIGILL, signal.SIGFPE))
_USAGE = 2
_NOT_THERE = (126, 127)  # the program cannot be executed, or was not found


def verdict(outcome: Outcome, words: bytes = b"", host_at: Callable[[str], str] = str) -> Verdict:
    """Return whose fault an end was, by its facts and the last words of who failed, or of all."""
    # host_at names the host at an address, as gloo and NCCL have them.
    facts = outcome.evidence or FailureEvidence((), 1, {})
    if lost := _lost(facts, outcome):
        return lost
    if outcome.failure is None:
        return Verdict(UNKNOWN, (), "no rank failed: the launcher did")
    host = outcome.failure[1]
    own = {
        each: ended for each, ended in facts.exit_statuses.items() if ended and ended not in _SENT
    }
    by_patterns = partial(_by_patterns, words, host, facts, host_at)
    return (
        by_patterns((NODE, PROGRAM))
        or _by_status(outcome.failure, own, facts)
        or _by_exceptions(outcome.failure, own, facts, words)
        or by_patterns((UNKNOWN,))
        or by_patterns((_CASCADE,))
        or Verdict(UNKNOWN, (host,), _said(outcome.failure))
    )


def _said(failure: Failure) -> str:
    rank, host, status = failure
    return f"rank {rank} on {host} {describe_exit_status(status)}"


def _by_status(failure: Failure, own: Mapping[int, int], facts: FailureEvidence) -> Verdict | None:
    """Return the verdict on statuses that a program does not choose by itself."""
    _, host, status = failure
    alike = {each // facts.ppn for each, ended in own.items() if ended == status}
    several, alone = len(alike) > 1, len(alike) <= 1 < len(facts.hosts)
    if status == _KILLED and several:
        return Verdict(PROGRAM, (), "SIGKILL ended ranks of several nodes: no memory, perhaps")
    if status in (_KILLED, _BUS):
        return Verdict(NODE, (host,), f"{_said(failure)}, not by ezpz-launch")
    if status in (*_CRASHED, *_SENT):
        is_sent = status in _SENT
        why = f"{_said(failure)}{', which somebody sent' * is_sent}"
        return Verdict(UNKNOWN, () if is_sent else (host,), why)
    if status in _NOT_THERE and alone:
        return Verdict(NODE, (host,), f"{_said(failure)}; on other nodes the program runs")
    if status in _NOT_THERE or (status == _USAGE and several):
        return Verdict(PROGRAM, (), _said(failure))
    return None


def _by_exceptions(
    failure: Failure, own: Mapping[int, int], facts: FailureEvidence, words: bytes
) -> Verdict | None:
    """Return the verdict on exceptions of Python: the program's where several nodes have them."""
    rank, _, _ = failure
    found = exceptions(words)
    if not found:
        return None
    name, ranks = max(found.items(), key=lambda each: len(each[1]))
    nodes = {each // facts.ppn for each in own}
    known = {each // facts.ppn for each in ranks if 0 <= each < facts.ppn * len(facts.hosts)}
    of_first = sum(each // facts.ppn == rank // facts.ppn for each in own)
    # Without torch's [rank3]: it is not known whose they are; more than one node's is enough.
    alike = len(known) > 1 or (not known and len(nodes) > 1 and len(ranks) > max(1, of_first))
    if alike or (len(facts.hosts) == 1 and len(ranks) > 1 and len(ranks) >= len(own)):
        return Verdict(PROGRAM, (), f"{len(ranks)} ranks raised {name}")
    if not known and any(row.match.search(words) for row in patterns() if row.whose == _CASCADE):
        # Who only followed may have been the quickest to end.
        return Verdict(UNKNOWN, (), f"a rank raised {name}, it is not told which")
    node = known.pop() if known else rank // facts.ppn
    return Verdict(UNKNOWN, (facts.hosts[node],), f"{_said(failure)}: {name}")


def _lost(facts: FailureEvidence, outcome: Outcome) -> Verdict | None:
    """Return the verdict on nodes that are lost, or hang, or did not begin, if any are."""
    last = len(facts.hosts) - 1
    unstarted = {rank // facts.ppn for rank in facts.unstarted_ranks}
    orphaned = {rank // facts.ppn for rank in facts.lost_ranks}
    for nodes, why in (
        (facts.unreachable_nodes, "it does not answer any more"),
        (facts.dead_agents, "its agent has ended"),
        (orphaned, "what started its ranks is gone"),
        (facts.unresponsive_nodes, "it hangs: its agent does not answer"),
        (unstarted if facts.hangs or not outcome.failure else (), "its ranks never started"),
    ):
        if not nodes:
            continue
        hosts = tuple(facts.hosts[node] for node in sorted(nodes))
        # Where most are gone it is rather what they have in common: the network, the launcher.
        if len(hosts) > max(1, len(facts.hosts) // 2) or (len(hosts) == 1 and not last):
            return Verdict(UNKNOWN, (), f"of {len(hosts)} of {last + 1} nodes: {why}")
        return Verdict(NODE, hosts, why)
    if facts.hangs:
        return Verdict(UNKNOWN, (), "it hangs, and every node answers")
    return None


def _by_patterns(
    words: bytes,
    host: str,
    facts: FailureEvidence,
    host_at: Callable[[str], str],
    whose: Sequence[str],
) -> Verdict | None:
    """Return the verdict of the first row that is found; of a cascade the peer is a suspect."""
    for row in patterns():
        if row.whose in whose and (match := row.match.search(words)):
            named = {name: value.decode() for name, value in match.groupdict().items() if value}
            if row.whose == _CASCADE:
                suspect = host_at(named["peer"]) if "peer" in named else ""
                return Verdict(UNKNOWN, (suspect,) if suspect in facts.hosts else (), row.why)
            hosts = () if row.whose == PROGRAM else (named.get("host", host),)
            return Verdict(row.whose, hosts, row.why)
    return None


_PREFIX = re.compile(r"^(?:\[(?:rank)?(\d+)(?:@[^\]\s]*)?\]:? ?)*")
"""Torch's ``[rank3]: ``, and ours of --prefix, ``[3@nid001] ``."""

_RAISED = re.compile(r"([A-Za-z_][\w.]*)(:.*)?$")


def tracebacks(words: bytes) -> Iterator[tuple[int, str, bytes]]:
    """Return of each traceback its rank, -1 where it is not told, and the line that ends it."""
    within: set[str] = set()  # prefixes of the lines of tracebacks that have begun
    for line in words.splitlines():
        text = line.decode(errors="replace")
        prefix = _PREFIX.match(text)
        start, rest = (prefix[0], text[prefix.end() :]) if prefix else ("", text)
        if rest.startswith("Traceback (most recent call last)"):
            within.add(start)
        elif start in within and (raised := _RAISED.match(rest)):
            within.discard(start)
            yield int(prefix[1]) if prefix and prefix[1] else -1, raised[0], line


def exceptions(words: bytes) -> dict[str, list[int]]:
    """Return which exceptions ended tracebacks there, of which ranks; not those of a cascade."""
    found: dict[str, list[int]] = {}
    following = [row.match for row in patterns() if row.whose == _CASCADE]
    for rank, raised, line in tracebacks(words):
        if not any(each.search(line) for each in following):
            # Ranks that fail alike differ in numbers at most.
            found.setdefault(re.sub(r"\d+", "N", raised)[:80], []).append(rank)
    return found


# Several attempts in a row.


class Suspects:
    """What attempts have shown so far: who fails again elsewhere is the program."""

    # A first failure that may be either's is tried once more there, then on another node.

    def __init__(self) -> None:
        self._failed: dict[int, list[str]] = {}  # of each rank, where it failed first
        self._suspected: set[tuple[str, ...]] = set()
        self.cleared: list[str] = []  # hosts that were blamed, and are innocent

    def judge(self, found: Verdict, failure: Failure | None) -> Verdict:
        """Return the verdict in the light of the attempts before; call it once for each."""
        rank, host = failure[:2] if failure else (-1, "")
        places = self._failed.setdefault(rank, [])
        if found.whose == PROGRAM or not found.hosts:
            return found
        if host in found.hosts:
            elsewhere = [each for each in places if each != host]
            places.append(host)
            if elsewhere:
                self.cleared += elsewhere
                why = f"rank {rank} failed on {elsewhere[-1]}, and again on {host}; {found.why}"
                return Verdict(PROGRAM, (), why)
        if found.whose == UNKNOWN and found.hosts in self._suspected:
            return Verdict(NODE, found.hosts, f"twice there alone: {found.why}")
        self._suspected.add(found.hosts)
        return found


def describe(found: Verdict) -> str:
    hosts = ", ".join(found.hosts)
    suspects = f"; {hosts} perhaps" if hosts else ""
    fault = {NODE: f"the fault of {hosts}", PROGRAM: "the program's fault"}
    return f"{fault.get(found.whose, f'whose fault is unknown{suspects}')}: {found.why}"


# The hosts of one launch, from attempt to attempt.

_SWEPT = 10  # seconds of silence after which a host where something is to be ended is given up

Replan = Callable[[Sequence[str], tuple[int, int]], LaunchPlan]
"""Plan the same launch on these hosts, with so many ranks, so many on a host."""


class Pool:
    """The hosts that a launch keeps aside."""

    def __init__(self, planned: LaunchPlan, replan: Replan | None) -> None:
        self._spares, self._replan = list(planned.spares), replan
        self._least = planned.request.min_nodes
        self.replaces = replan is not None and (bool(self._spares) or self._least is not None)
        """Whether it was asked to go on without a host that failed."""

    def without(self, bad: Sequence[str], planned: LaunchPlan) -> tuple[LaunchPlan | None, str]:
        """Return the plan without these hosts, None where too few are left; and what was done."""
        self._spares = [host for host in self._spares if host not in bad]
        hosts, done = list(planned.placement.hosts), list[str]()
        for index, host in enumerate(hosts):
            if host in bad and self._spares:
                # The others keep their places, and what they hold.
                hosts[index] = self._spares.pop(0)
                done.append(f"{hosts[index]} takes the place of {host}")
        left, ppn = [host for host in hosts if host not in bad], planned.placement.ppn
        if len(left) < len(hosts):
            if self._replan is None or len(left) < (self._least or len(hosts)) or not left:
                return None, "no spare host is left"
            done.append(f"it goes on with {len(left)} hosts (--min-nodes)")
        if self._replan is None or not done:
            return None, "it is not among the hosts of this launch"
        again = self._replan(left, (min(planned.nproc, ppn * len(left)), ppn))
        return again, ", ".join(done)


def one_a_node(
    hosts: Sequence[str], planned: LaunchPlan, env: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the first words of a launch of ours, one rank on each host, and its environment."""
    request = planned.request
    words = [sys.executable, "-m", "ezpz_launch", "--launcher", planned.launcher.kind]
    words += ["-n", str(len(hosts)), "--ppn", "1", "--include", fold_nodelist(hosts)]
    words += ["--grace", "1", *(["--hostfile", request.hostfile] if request.hostfile else [])]
    words += ["--machine", request.machine] if request.machine else []
    for pair in request.env:
        words += ["--env", pair]
    if request.launcher_args:
        words += ["--launcher-args", shlex.join(request.launcher_args)]
    # No record of it is kept, and nodes found bad are not left out.
    return words, {**env, "EZPZ_STATE_DIR": os.devnull}


def sweep(
    hosts: Sequence[str], launch_id: str, planned: LaunchPlan, env: Mapping[str, str]
) -> Callable[[], object]:
    """End what a launch left on hosts without its agent: start a small one; return its wait."""
    words, own = one_a_node(hosts, planned, env)
    words += ["--idle-timeout", str(_SWEPT)]
    words += ["--", sys.executable, "-I", "-S", agent.__file__, "--end", launch_id]
    null = subprocess.DEVNULL
    begun = subprocess.Popen(
        words, stdin=null, stdout=null, stderr=null, env=own, start_new_session=True
    )

    def wait() -> None:
        with suppress(subprocess.TimeoutExpired):
            begun.wait(_SWEPT)

    return wait


def warn_of_the_scheduler(job: Allocation, env: Mapping[str, str]) -> None:
    """Say that the scheduler would end the job with a node, where it tells so."""
    if job.scheduler == "slurm" and "SLURM_NO_KILL" not in env:
        # Of a running job Slurm 22.05 does not tell it.
        say(
            "--spares, --min-nodes: Slurm ends a job that loses a node, unless it was submitted "
            "with --no-kill; export SLURM_NO_KILL=set there, and this line goes"
        )
    if job.scheduler == "pbs" and job.job_id:
        words, place = ["qstat", "-f", job.job_id], get_pbs_folder(env)
        try:
            told = ask(words, env=env, attempts=1, time_limit=3, place=place).stdout
        except TopoError:
            return  # it is a hint, and no more
        found = re.search(r"tolerate_node_failures = (\w+)", told)
        if found is None or found[1] != "all":
            say(
                f"--spares, --min-nodes: job {job.job_id} has tolerate_node_failures="
                f"{found[1] if found else 'none'}; expected all, or PBS ends it with its first "
                "lost node; submit with -W tolerate_node_failures=all"
            )


# The memory: one small file a node, in the user's state folder.

_KEPT = 24 * 3600.0
"""Seconds for which a node is remembered: sites mend or reboot theirs within a day."""


class Bad(NamedTuple):
    """A node that was found bad; the fields of the file."""

    host: str
    why: str
    when: float  # seconds since 1970
    allocation: str  # the job's id, or the hostfile's path


def allocation_of(job: Allocation, request: Request, env: Mapping[str, str]) -> str:
    hostfile = request.hostfile or env.get("HOSTFILE", "")
    return job.job_id or (os.path.abspath(hostfile) if hostfile else "")


def _path(host: str, env: Mapping[str, str]) -> str:
    return os.path.join(records_folder(env, "nodes"), f"{host.replace('/', '_')}.json")


def remember(hosts: Sequence[str], why: str, allocation: str, env: Mapping[str, str]) -> None:
    try:
        make_folder(records_folder(env, "nodes"))
        for host in hosts:
            bad = Bad(host, why, time.time(), allocation)
            write(_path(host, env), dump(bad._asdict()))
    except (OSError, LaunchError) as error:
        say(f"{', '.join(hosts)} cannot be remembered as bad: {error}")


def forget(hosts: Sequence[str], env: Mapping[str, str]) -> None:
    for host in hosts:
        with suppress(FileNotFoundError, NotADirectoryError, LaunchError):  # it is not there
            os.unlink(_path(host, env))


def recall(env: Mapping[str, str]) -> list[Bad]:
    """Return the nodes that were found bad, the oldest first; those of yesterday are forgotten."""
    found = []
    try:
        names = os.listdir(folder := records_folder(env, "nodes"))
    except (OSError, LaunchError):
        return []
    for name in names:
        path = os.path.join(folder, name)
        with suppress(OSError, ValueError, TypeError):  # another's, or half of a file
            with open(path, encoding="utf-8") as file:
                bad = Bad(**json.load(file))
            if time.time() - bad.when > _KEPT:
                os.unlink(path)
            else:
                found.append(bad)
    return sorted(found, key=lambda each: each.when)


def avoid(
    hosts: Sequence[str], request: Request, allocation: str, env: Mapping[str, str]
) -> tuple[set[str], list[str]]:
    """Return which hosts a launch leaves out, found bad in this allocation; and what to say."""
    found = [(host, bad) for bad in recall(env) for host in hosts if same_host(host, bad.host)]
    if not found or request.include:
        return set(), []
    bad = {host for host, each in found if allocation and each.allocation == allocation}
    needed = request.nodes or 0
    if request.nproc and request.ppn:
        needed = max(needed, -(-request.nproc // request.ppn))
    if len(hosts) - len(bad) < max(1, needed):
        bad = set()  # there are no others
    notes = []
    for host, each in found:
        what = "is left out" if host in bad else "is used"
        ago = f"{(time.time() - each.when) / 3600:.1f} h ago"
        notes.append(
            f"{host} {what}: it was found bad {ago} ({each.why}); "
            f"to forget it: ezpz-launch nodes forget {host}"
        )
    return bad, notes


# `ezpz-launch nodes`.

USAGE = "ezpz-launch nodes [--json] | nodes forget HOST...|--all"

PAGE = f"""\
usage: {USAGE}

The nodes that launches of the last 24 hours found bad: later launches of the
same job leave them out, others say so.

examples:
  ezpz-launch nodes                 a table: host, when, job, why
  ezpz-launch nodes forget nid003   it is as good as any other again"""


def command(argv: Sequence[str], env: Mapping[str, str]) -> str:
    found = recall(env)
    match list(argv):
        case ["-h" | "--help"]:
            return PAGE
        case ["--json"]:
            return json.dumps([bad._asdict() for bad in found], indent=1)
        case ["forget", _, *_] as words:
            named = [bad for bad in found if words[1:] == ["--all"] or bad.host in words[1:]]
            unknown = set(words[1:]) - {"--all"} - {bad.host for bad in found}
            if unknown:
                known = ", ".join(bad.host for bad in found) or "none"
                raise UsageError(f"nodes forget {min(unknown)}: expected one of: {known}")
            forget([bad.host for bad in named], env)
            return f"forgotten: {', '.join(bad.host for bad in named) or 'none'}"
        case []:
            if not found:
                return "no node was found bad within the last 24 hours"
            rows = [(h, f"{iso_time(when)[:16]}Z", job or "-", why) for h, why, when, job in found]
            return "\n".join(aligned(rows))
    raise UsageError(f"nodes: {' '.join(argv)!r} is not known here; expected {USAGE}")
