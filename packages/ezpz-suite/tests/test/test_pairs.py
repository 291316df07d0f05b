"""The rounds in which pairs of nodes are measured."""

from itertools import combinations

import pytest

from ezpz._test.measure import Bandwidth, Pairs, rounds


@pytest.mark.parametrize("nodes", range(2, 34))
def test_every_pair_once_and_no_node_twice_in_a_round(nodes):
    found = rounds(nodes)
    assert sorted(pair for pairs in found for pair in pairs) == list(combinations(range(nodes), 2))
    for pairs in found:
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs)
        assert len(pairs) == nodes // 2
    assert len(found) == (nodes if nodes % 2 else nodes - 1)


def test_the_slowest_pair_and_node_are_found():
    rates = {(0, 1): 10e9, (0, 2): 3e9, (1, 2): 2e9, (0, 3): 10e9, (1, 3): 11e9, (2, 3): 4e9}
    found = {
        pair: Bandwidth(1 << 20, 2, (1 << 20) / rate, 5, is_right=True)
        for pair, rate in rates.items()
    }
    pairs = Pairs(("a", "b", "c", "d"), found)
    assert pairs.slowest() == (1, 2)
    assert pairs.median() == pytest.approx(7e9)
    assert min(range(4), key=pairs.of_node) == 2
    assert pairs.of_node(2) == pytest.approx(3e9)
    facts = pairs.facts()
    assert facts["slowest"] == [1, 2]
    assert [each["hosts"] for each in facts["pairs"]][:2] == [["a", "b"], ["a", "c"]]
