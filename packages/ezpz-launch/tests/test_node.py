"""The orders that a node's agent obeys; test_agents and test_nodes start it as a program."""

import signal

from ezpz_launch._agent import NodeRanks, obey


def test_orders(process):
    ranks = NodeRanks("orders-test")
    child = process("sleep", "60")
    assert obey(ranks, ["start", "3", str(child.pid)]) == b""
    assert ranks.pid(3) == child.pid
    assert obey(ranks, ["stacks"]) == b"stacks 0\n"
    assert obey(ranks, ["stacks", "4"]) == b"stacks 0\n"
    assert obey(ranks, ["signal", "0"]) == b""
    assert child.poll() is None
    assert obey(ranks, ["signal", "15"]) == b""
    assert child.wait(120) == -signal.SIGTERM
    assert obey(ranks, ["end", "3"]) == b""
    assert ranks.pid(3) is None
    assert obey(ranks, ["left"]) == b"stacks 0\n"
    assert obey(ranks, ["end-left"]) == obey(ranks, ["end-all-left"]) == b""
    assert obey(ranks, ["farewell"]) is None
    assert obey(ranks, ["an order of tomorrow"]) == b""
