"""Whose fault the end of an attempt was: a node's, the program's, or unknown; with the reason."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from ._launch import Facts, Outcome, how

# One attempt by itself: pure, from its facts and its last words.

NODE, PROGRAM, UNKNOWN = "node", "program", "unknown"
_CASCADE = "cascade"


Failure = tuple[int, str, int]
"""Rank, host and status of the first that failed."""


class Verdict(NamedTuple):
    """Whose fault it was.

    Attributes:
        whose: ``"node"``, ``"program"`` or ``"unknown"``.
        hosts: The nodes whose fault it was; of an unknown one those that are suspected, or none.
        why: The reason, as one phrase.
    """

    whose: str
    hosts: tuple[str, ...]
    why: str


class Pattern(NamedTuple):
    """A row of ``faults.toml``, which explains the fields."""

    match: re.Pattern[bytes]
    whose: str
    why: str
    source: str


@cache
def patterns() -> tuple[Pattern, ...]:
    import tomllib  # noqa: PLC0415 - only a failure needs it

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
    """Return whose fault it was that an attempt failed.

    Args:
        outcome: Its end, with its facts.
        words: The last words of the rank that failed first, or of all.
        host_at: What names the host at an address, as gloo and NCCL have them; else the address.
    """
    facts = outcome.facts or Facts((), 1)
    if lost := _lost(facts, outcome):
        return lost
    if outcome.failure is None:
        return Verdict(UNKNOWN, (), "no rank failed: the launcher did")
    host = outcome.failure[1]
    own = {each: ended for each, ended in facts.own.items() if ended and ended not in _SENT}
    return (
        _by_patterns(words, host, (NODE, PROGRAM))
        or _by_status(outcome.failure, own, facts)
        or _by_exceptions(outcome.failure, own, facts, words)
        or _by_patterns(words, host, (UNKNOWN,))
        or _of_a_cascade(words, facts.hosts, host_at)
        or Verdict(UNKNOWN, (host,), _said(outcome.failure))
    )


def _said(failure: Failure) -> str:
    rank, host, status = failure
    return f"rank {rank} on {host} {how(status)}"


def _by_status(failure: Failure, own: Mapping[int, int], facts: Facts) -> Verdict | None:
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
    failure: Failure, own: Mapping[int, int], facts: Facts, words: bytes
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


def _lost(facts: Facts, outcome: Outcome) -> Verdict | None:
    """Return the verdict on nodes that are lost, or hang, or did not begin, if any are."""
    last = len(facts.hosts) - 1
    unstarted = {rank // facts.ppn for rank in facts.unstarted}
    orphaned = {rank // facts.ppn for rank in facts.orphans}
    for nodes, why in (
        (facts.silent, "it does not answer any more"),
        (facts.gone, "its agent has ended"),
        (orphaned, "what started its ranks is gone"),
        (facts.deaf, "it hangs: its agent does not answer"),
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


def _by_patterns(words: bytes, host: str, whose: Sequence[str]) -> Verdict | None:
    for row in patterns():
        if row.whose in whose and (match := row.match.search(words)):
            named = match.groupdict().get("host")
            hosts = () if row.whose == PROGRAM else (named.decode() if named else host,)
            return Verdict(row.whose, hosts, row.why)
    return None


def _of_a_cascade(
    words: bytes, hosts: Sequence[str], host_at: Callable[[str], str]
) -> Verdict | None:
    """Return the verdict where all that is known is who lost whom."""
    for row in patterns():
        if row.whose == _CASCADE and (match := row.match.search(words)):
            peer = (match.groupdict().get("peer") or b"").decode()
            suspect = host_at(peer) if peer else ""
            return Verdict(UNKNOWN, (suspect,) if suspect in hosts else (), row.why)
    return None


_PREFIX = re.compile(r"^(?:\[(?:rank)?(\d+)(?:@[^\]\s]*)?\]:? ?)*")
"""Torch's ``[rank3]: ``, and ours of --prefix, ``[3@nid001] ``."""

_RAISED = re.compile(r"([A-Za-z_][\w.]*)(:.*)?$")


def exceptions(words: bytes) -> dict[str, list[int]]:
    """Return which exceptions ended tracebacks there, and of which ranks: -1 where it is not told.

    Those are left out that only followed, because another rank had gone.
    """
    found: dict[str, list[int]] = {}
    following = [row.match for row in patterns() if row.whose == _CASCADE]
    within: set[str] = set()  # prefixes of the lines of tracebacks that have begun
    for line in words.splitlines():
        text = line.decode(errors="replace")
        prefix = _PREFIX.match(text)
        start, rest = (prefix[0], text[prefix.end() :]) if prefix else ("", text)
        if rest.startswith("Traceback (most recent call last)"):
            within.add(start)
        elif start in within and (raised := _RAISED.match(rest)):
            within.discard(start)
            if not any(each.search(line) for each in following):
                rank = int(prefix[1]) if prefix and prefix[1] else -1
                # Ranks that fail alike differ in numbers at most.
                found.setdefault(re.sub(r"\d+", "N", raised[0])[:80], []).append(rank)
    return found


# Several attempts in a row.


class Suspects:
    """What attempts have shown so far: where both may be, who fails again elsewhere is the program.

    A first failure that may be either's is tried once more there, then on another node.
    """

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
    """Return it as the line that people read."""
    match found:
        case (whose, hosts, why) if whose == NODE:
            return f"the fault of {', '.join(hosts)}: {why}"
        case (whose, _, why) if whose == PROGRAM:
            return f"the program's fault: {why}"
    suspects = f"; {', '.join(found.hosts)} perhaps" if found.hosts else ""
    return f"whose fault is unknown{suspects}: {found.why}"
