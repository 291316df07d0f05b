"""Bandwidths: their arithmetic, all-reduces of real ranks, and the rounds of pairs of nodes."""

import json
from itertools import combinations

import pytest

from ezpz._test.measure import Bandwidth, Pairs, default_sizes, rounds

MEASURE = """
import json, torch, ezpz_dist
from ezpz._test.measure import measure
rank = ezpz_dist.setup_torch()
{before}
found = [measure(size, torch.device("cpu")) for size in (4, 4096, 1 << 20)]
print(json.dumps([one.facts() for one in found]))
ezpz_dist.cleanup()
"""


def test_the_bus_carries_what_the_formula_says_and_sizes_go_from_latency_to_bandwidth():
    one = Bandwidth(size=1_000_000, ranks=4, seconds=0.001, repeats=5, is_right=True)
    assert one.algorithm == pytest.approx(1e9)
    assert one.bus == pytest.approx(1.5e9)  # 2 (n - 1) / n
    assert (default_sizes("cpu")[0], default_sizes("cpu")[-1]) == (1024, 16 << 20)
    assert default_sizes("cuda")[-1] == 256 << 20


def test_a_rank_that_dawdles_is_what_is_measured_and_wrong_sums_are_seen_by_all(ranks):
    spoil = """
import time
def dawdle(of=ezpz_dist.synchronize):
    time.sleep(0.01 if rank == 1 else 0)
    of()
def all_reduce(tensor, op=torch.distributed.ReduceOp.SUM, group=None, of=torch.distributed.all_reduce):
    of(tensor, op, group)
    if rank == 1 and len(tensor) == 1024 and op == torch.distributed.ReduceOp.SUM:
        tensor[7] += 1
ezpz_dist.synchronize, torch.distributed.all_reduce = dawdle, all_reduce
"""  # noqa: E501
    first, second = ranks(2, MEASURE.format(before=spoil))
    assert [first.status, second.status] == [0, 0], first.err + second.err
    assert first.out == second.out
    found = json.loads(first.out)
    assert [(one["bytes"], one["ranks"]) for one in found] == [(4, 2), (4096, 2), (1 << 20, 2)]
    assert all(one["seconds"] > 0.01 for one in found)
    assert [one["is_right"] for one in found] == [True, False, True]


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 16, 33])
def test_every_pair_once_and_no_node_twice_in_a_round(nodes):
    found = rounds(nodes)
    assert sorted(pair for pairs in found for pair in pairs) == list(combinations(range(nodes), 2))
    for pairs in found:
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs)
        assert len(pairs) == nodes // 2
    assert len(found) == (nodes if nodes % 2 else nodes - 1)


def test_the_slowest_pair_and_node_are_found():
    rates = {(0, 1): 10e9, (0, 2): 3e9, (1, 2): 2e9, (0, 3): 10e9, (1, 3): 11e9, (2, 3): 4e9}
    found = {pair: Bandwidth(1 << 20, 2, (1 << 20) / rate, 5, True) for pair, rate in rates.items()}
    pairs = Pairs(("a", "b", "c", "d"), found)
    assert pairs.slowest() == (1, 2)
    assert pairs.median() == pytest.approx(7e9)
    assert min(range(4), key=pairs.of_node) == 2
    assert pairs.of_node(2) == pytest.approx(3e9)
    facts = pairs.facts()
    assert facts["slowest"] == [1, 2]
    assert [each["hosts"] for each in facts["pairs"]][:2] == [["a", "b"], ["a", "c"]]
