"""Slurm's nodelists, of 10,080 nodes: ``hatch run bench:nodelists [--runs=41] [--json=FILE]``.

Expanded and folded by us, by python-hostlist and by ClusterShell, each in a process of its own
environment, in turn.
"""

import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import fire
from callee import begin
from paired import Row, against, alone, interleaved, seconds, times
from peers import present
from table import finish

import ezpz_topo

RANGE = "nid[000001-010080]"
TWO_BRACKETS = "x[1000-1139]c0s[0-71]"
HOSTILE = ["n[1-100000000]", "n[1-1000]m[1-1000]o[1-1000]", "n[" * 100_000, "n[1-2]" * 10_000]

# Read from files: an argument has at most 128 KiB.
EXPAND = """
nodelist = open(words[0]).read()
def call(): return expand(nodelist)
found = sorted(call())
assert found == open(words[1]).read().split(","), found[:2]
"""
FOLD = """
hosts = open(words[0]).read().split(",")
def call(): return fold(hosts)
assert sorted(expand(call())) == sorted(hosts), call()[:80]
"""
OURS = "from ezpz_topo import expand_nodelist as expand, fold_nodelist as fold\n"
PEERS = {
    "python-hostlist": "from hostlist import expand_hostlist as expand, collect_hostlist as fold\n",
    "ClusterShell": "from ClusterShell.NodeSet import NodeSet, expand\n"
    "def fold(hosts): return str(NodeSet.fromlist(hosts))\n",
}


def refused(nodelist: str) -> None:
    """Expand a nodelist that must be refused."""
    try:
        ezpz_topo.expand_nodelist(nodelist)
    except ezpz_topo.NodelistError:
        return
    raise AssertionError(nodelist[:40])


def ten_thousand(runs: int) -> list[Row]:
    """Return rows of each way to write 10,080 nodes, and of folding them."""
    there, missing = present(list(PEERS))
    titles = {name: each.name for name, each in there.items()}
    plain = ",".join(ezpz_topo.expand_nodelist(RANGE))
    cases = {
        "expand-range": ("one range expanded", EXPAND, RANGE),
        "expand-two-brackets": ("two brackets expanded", EXPAND, TWO_BRACKETS),
        "expand-plain": ("plain names expanded", EXPAND, plain),
        "fold": ("folded", FOLD, plain),
    }
    rows = []
    for name, (what, program, nodelist) in cases.items():
        gone = dict(missing)
        with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
            given, expected = Path(folder, "given"), Path(folder, "expected")
            given.write_text(nodelist, encoding="utf-8")
            # All are to say the same.
            names = ",".join(sorted(ezpz_topo.expand_nodelist(nodelist)))
            expected.write_text(names, encoding="utf-8")
            start = {"ours": (sys.executable, OURS + program)}
            start |= {each: (there[each].python, PEERS[each] + program) for each in there}
            words = str(given), str(expected)
            callees = begin(start, *words, running=running, failed=gone)
            ways = {each: partial(callee.typical, 1) for each, callee in callees.items()}
            samples = interleaved(ways, runs, failed=gone)
            in_ms = {each: times(1e3, found) for each, found in samples.items()}
            rows += against(
                f"nodelists/{name}", f"10,080 nodes: {what}", "ms", in_ms, titles, missing=gone
            )
            if name == "expand-range":
                peaks = {each: [callees[each].peak()] for each in samples}
                said = "memory of a process that expands"
                memory = against("nodelists/memory", said, "MB", peaks, titles, missing=gone)
    return [*rows, *memory]


def measure(runs: int) -> list[Row]:
    """Return all rows of this section."""
    worst = [
        max(seconds(partial(refused, nodelist)) for nodelist in HOSTILE) * 1e3
        for _ in range(min(runs, 9))
    ]
    return [
        *ten_thousand(runs),
        alone("nodelists/refuse-hostile", "the worst hostile list refused", "ms", worst),
    ]


def main(runs: int = 41, json: str = "") -> None:
    """Print the figures, and write them to a file if one is named.

    Args:
        runs: How often each pair is run.
        json: A file to write the figures to.
    """
    finish(measure(runs), json)


if __name__ == "__main__":
    fire.Fire(main)
