"""The hosts of all ranks, as rank 0 tells them."""

from __future__ import annotations

import json
import random

import pytest

from ezpz_dist._address import fold_hosts, unfold_hosts
from ezpz_dist._agreement import _pack


def aurora(nodes: int) -> list[str]:
    """Return names by cabinet, chassis, slot and node, as a job has them: with gaps."""
    every = [
        f"x{4000 + n // 72}c{n // 12 % 6}s{n // 2 % 6}b0n{n % 2}" for n in range(nodes * 10 // 9)
    ]
    return [every[n] for n in sorted(random.Random(0).sample(range(len(every)), nodes))]


def told(hosts: list[str]) -> bytes:
    return bytes(_pack({"hosts": fold_hosts(hosts)}))


@pytest.mark.parametrize(
    "hosts",
    [
        [],
        ["one"],
        ["a", "a", "b", "a"],
        ["n9", "n10", "n11", "n010", "n09", "n9"],
        ["n099", "n100", "n1000", "n999", "n001"],
        ["10.0.0.9", "10.0.0.10", "10.0.1.1"],
        ["n-1", "n1", "n0", "n٣", "n4"],
        ["", "7", "n7m", "n7", "7n7"],
        ["n999999999999999", "n1000000000000000", "n12345678901234567890", "n12345678901234567891"],
        [f"node{n % 5}.site" for n in range(23)],
        [host for host in aurora(100) for _ in range(12)],
    ],
)
def test_what_is_folded_comes_back(hosts: list[str]) -> None:
    assert unfold_hosts(json.loads(json.dumps(fold_hosts(hosts)))) == tuple(hosts)


def test_any_names_come_back() -> None:
    chance = random.Random(0)
    for _ in range(500):
        names = ["".join(chance.choices("a019-", k=chance.randrange(6))) for _ in range(20)]
        assert unfold_hosts(fold_hosts(names)) == tuple(names)


def test_the_hosts_of_a_whole_machine_are_short() -> None:
    block = [host for host in aurora(10_080) for _ in range(12)]
    assert len(told(block)) < 4000
    assert len(told(aurora(10_080) * 12)) < 4000, "ranks dealt out in turn"
    assert len(told([f"nid{n:06}" for n in range(10_080) for _ in range(12)])) < 1000
