"""A spare node of a real PBS job takes the place of one that fails."""

import os
import re
import shlex

import pytest

SLEEP = f"sleep {300 + os.getpid() % 1000}"  # no other test's

# The first attempt waits for what happens to it; the second is done at once.
SAYS = f'echo "here $EZPZ_ATTEMPT $RANK $(hostname)"; [ "$EZPZ_ATTEMPT" = 1 ] || exec {SLEEP}'
AGENT = "$(pgrep -f '[_]agent.py 1')"

# What happens on the second node, and what is said of it.
KINDS = {
    "rank": (f"kill -9 $(pgrep -xf '{SLEEP}')", "SIGKILL"),
    "agent and proxy": (f"kill -9 {AGENT} $(pgrep -f '[h]ydra_pmi_proxy')", "its agent has ended"),
    "link": ("", "it does not answer any more"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_is_replaced(pbs, kind):
    words = "ezpz-launch -N 2 --ppn 1 --spares 1 --grace 2 sh -c"
    options = ["-l", "select=3:ncpus=1", "-W", "tolerate_node_failures=all"]
    job = pbs.sub(f"{words} {shlex.quote(SAYS)}; echo exit $?", *options)
    (second,) = re.findall(r"here 0 1 (\w+)", pbs.writes(job, "here 0 1"))
    pbs.on(second, f"until ls -l /proc/{AGENT}/fd 2>&1 | grep -q socket: ; do sleep 0.2; done")
    done, why = KINDS[kind]
    if done:
        pbs.on(second, done)
    else:
        pbs.lose(second)
    said = pbs.writes(job, "exit 0")
    (third,) = re.findall(r"here 1 1 (\w+)", said)
    assert f"the fault of {second}: " in said
    assert why in said
    assert f"{third} takes the place of {second}; attempt 2 begins" in said
    assert "tolerate_node_failures" not in said
    if done:
        assert pbs.on(second, f"sleep 1; pgrep -cxf '{SLEEP}' || true").strip() == "0"
