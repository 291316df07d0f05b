"""ezpz-launch in a job of a real PBS, by MPICH: ranks on other nodes, and a node that is lost."""

import re
import shlex
import time

SAYS = 'echo "here $RANK $(hostname) $MASTER_ADDR $EZPZ_NUM_NODES $1"'


def launched(pbs, *words):
    """Submit a job of two nodes that launches these words, two ranks a node; return its id."""
    launch = shlex.join(["ezpz-launch", "-n", "4", "--ppn", "2", *words])
    return pbs.sub(f"{launch}; echo exit $?", "-l", "select=2:ncpus=2")


def test_ranks_on_other_nodes(pbs):
    said = pbs.ended(launched(pbs, "sh", "-c", SAYS, "-", "$HOME 'it' \"is\""))
    assert "exit 0" in said
    found = sorted(re.findall(r"here (\d) (\w+) (\w+) 2 \$HOME 'it' \"is\"$", said, re.MULTILINE))
    ranks, hosts, first = zip(*found, strict=True)
    assert ranks == ("0", "1", "2", "3"), said
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
    assert set(first) == {hosts[0]}


def test_a_rank_on_another_node_fails(pbs):
    said = pbs.ended(launched(pbs, "sh", "-c", '[ "$RANK" != 2 ] || exit 3; sleep 300'))
    assert re.search(r"rank 2 on \w+ exited with status 3, first of all ranks", said), said
    assert "exit 3" in said.splitlines()


def test_what_reaches_the_other_nodes_is_told(pbs):
    said = pbs.ended(launched(pbs, "--dry-run", "true"))
    assert re.search(r"launcher +hydra.*other nodes by /.*/pbs_tmrsh", said), said


def test_a_lost_node_is_named(pbs):
    job = launched(pbs, "--grace", "2", "sh", "-c", f"{SAYS}; sleep 300")
    (second,) = re.findall(r"here 2 (\w+)", pbs.writes(job, "here 2"))
    # Nobody hears of a node before its agent is connected.
    until, agent = time.monotonic() + 60, "/proc/$(pgrep -f '[/]agent.py 1')/fd"
    while "socket:" not in (said := pbs.on(second, f"ls -l {agent} 2>&1 || true")):
        assert time.monotonic() < until, said
        time.sleep(0.2)
    pbs.lose(second)
    began = time.monotonic()
    pbs.writes(job, f"{second} is lost: no answer within 15 s")
    # 15 s are promised; the rest is for a busy machine.
    assert time.monotonic() - began < 25
    said = pbs.writes(job, "exit 137")
    assert f"rank 2 on {second} is lost with its node; ending the other ranks" in said
