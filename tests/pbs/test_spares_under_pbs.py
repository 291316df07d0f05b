"""Each kind of fault on one of a real PBS job's three nodes, of which one is a spare."""

import base64
import json
import shlex
import subprocess

import pytest
from tests.conftest import load

chaos = load("faults.chaos")
SERVER = "pbs-0001"
OPTIONS = [*chaos.OPTIONS]
OPTIONS[OPTIONS.index("--spares") + 1] = "1"

ALL = "$(pgrep -u alice)"

# What is done on a host from outside, as root there; the other kinds are tried on four hosts.
DONE = {
    # A proxy's shells end with it, before they are killed themselves.
    "kill agent and proxy": "pkill -9 -f '[/]agent.py 1' && pkill -9 -f '[h]ydra_pmi_proxy'",
    "freeze": f"kill -STOP {ALL}",
    "link down": ":",  # by what is below the host
}


class Nodes(chaos.Place):
    """Three nodes of PBS; a job of its own for each case."""

    kinds = chaos.KINDS.keys()
    hosts = ("x1n0", "x1n1", "x1n2")

    def __init__(self, pbs):
        self.pbs = pbs

    def root(self, host, text):
        return self.pbs.run("on", host, "sh", "-c", text)

    def run(self, case, folder):
        """Return what is wrong after a case, and what its job has written."""
        pbs, (fault,) = self.pbs, case.faults
        there = f"{pbs.home}/{folder.name}"
        pbs.on(SERVER, f"mkdir -p {there}/tmp")
        program = pbs.write(f"{folder.name}/steps.py", chaos.PROGRAM.read_text())
        pbs.write(f"{folder.name}/plan.json", json.dumps(case.plan()))
        names = {"TMPDIR": f"{there}/tmp", "EZPZ_STATE_DIR": f"{there}/state"}
        names["EZPZ_NODE_TIMEOUT"] = chaos.NODE_TIMEOUT
        words = ["env", *(f"{name}={value}" for name, value in names.items()), "ezpz-launch"]
        words += [*OPTIONS, "python", program, there, str(chaos.STEPS)]
        job = pbs.sub(
            f"{shlex.join(words)}; echo over: $?",
            *("-l", "select=3:ncpus=2", "-W", "tolerate_node_failures=all"),
        )
        if fault["kind"] in DONE:
            acked = f'[ "$(tail -n 1 {there}/acked 2>&1)" -ge {case.step} ] 2>/dev/null'
            wait = f"until {acked}; do sleep 0.02; done"  # there: a training is soon over
            self.root(fault["host"], f"{wait}; {DONE[fault['kind']]}")
        if fault["kind"] == "link down":
            pbs.lose(fault["host"])
        said = pbs.writes(job, "over: ")
        if fault["kind"] == "link down":
            pbs.find(fault["host"])
        self.root(fault["host"], f"kill -CONT {ALL} 2>&1 || :")
        status = int(said.rpartition("over: ")[2].split()[0])
        packed = pbs.on(SERVER, f"tar c -C {there} --exclude steps.py . | base64")
        subprocess.run(["tar", "x", "-C", folder], input=base64.b64decode(packed), check=True)
        return [*case.wrong(status, folder), *self.left(there)], said

    def left(self, there):
        """Return what is left of a case on the nodes, once PBS has ended its job."""
        left = {}

        def is_nothing():
            left.update((host, self.root(host, "pgrep -u alice -af . || :")) for host in self.hosts)
            return not any(left.values())

        try:
            chaos.until(is_nothing, 60)
        except TimeoutError:
            return [f"left running: {left}"]
        return self.pbs.on(SERVER, f"ls -d {there}/tmp/ezpz-* 2>/dev/null || :").split()


@pytest.mark.usefixtures("ours_there")
@pytest.mark.parametrize("kind", [*DONE, "raises on a host", "all raise"])
def test_the_verdict_is_right_and_the_training_is_done_as_if_nothing_had_been(pbs, tmp_path, kind):
    nodes = Nodes(pbs)
    wrong, said = nodes.run(chaos.Case(1, nodes, kind), tmp_path)
    assert wrong == [], said
    is_blamed = "the fault of x1n1: " in said  # but where the training is done before it is known
    assert ("x1n2 takes the place of x1n1; attempt " in said) == is_blamed, said
    assert "tolerate_node_failures" not in said
