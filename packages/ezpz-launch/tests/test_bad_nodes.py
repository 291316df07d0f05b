"""What takes the place of a node that failed, and what is remembered of it."""

import json
import os
import time
from functools import partial
from pathlib import Path

import pytest

from ezpz_launch import Request, main
from ezpz_launch._errors import StageError
from ezpz_launch._nodes.attempts import Attempts
from ezpz_launch._nodes.bad_nodes import Pool, avoid, recall, remember
from ezpz_launch._plan.context import build_context, make_plan, replan
from ezpz_launch._run.launch import Outcome
from ezpz_topo import imagine

HOSTS = ("node0001", "node0002", "node0003", "node0004")


@pytest.fixture
def env(tmp_path):
    return {"EZPZ_STATE_DIR": str(tmp_path / "state")}


def pool(hosts=4, **options):
    """The plan of a launch on four nodes of a Slurm, and what is behind it."""
    topology = imagine("generic-slurm", hosts, {})
    request = Request(("true",), ppn=2, launcher="srun", **options)
    # As on such a machine: srun is not looked for.
    planned = make_plan(build_context(topology, request, {}, is_imagined=True), request)
    return Pool(planned, lambda hosts, size: (tuple(hosts), size)), planned


def test_a_spare_takes_the_place_and_the_others_keep_theirs():
    hosts, planned = pool(spares=2)
    assert (planned.placement.hosts, planned.spares) == (HOSTS[:2], HOSTS[2:])
    again, done = hosts.without(["node0001"], planned)
    assert (again, done) == (
        (("node0003", "node0002"), (4, 2)),
        "node0003 takes the place of node0001",
    )
    # A spare that fails is none any more.
    again, done = hosts.without(["node0002", "node0004"], planned)
    assert (again, done) == (None, "no spare host is left")


def test_fewer_hosts_where_that_is_allowed():
    hosts, planned = pool(min_nodes=3)
    again, done = hosts.without(["node0003"], planned)
    assert again == (("node0001", "node0002", "node0004"), (6, 2))
    assert done == "it goes on with 3 hosts (--min-nodes)"
    assert hosts.without(["node0001", "node0002"], planned)[0] is None
    assert not pool()[0].replaces


class Preparing:
    """Fails on so many hosts, each with its reason, and then no more."""

    def __init__(self, planned, failing):
        self.planned, self._failing = planned, failing

    def bring(self, _):
        if self._failing:
            hosts = self.planned.placement.hosts
            raise StageError(dict(zip(hosts, self._failing.pop(), strict=False)), len(hosts))
        return 0

    def end(self):
        pass


@pytest.mark.parametrize(("hosts", "failing", "remembered"), [
    (10, [["no such folder"]], 1),
    (10, [["no such folder"] * 10], None),
    (10, [[f"{number} MB free" for number in range(6)] + ["File too large"]], None),
    (10, [[f"{number} MB free" for number in range(5)] + ["File too large"]], 6),
    (1, [["no such folder"]], 1),  # the spare has it
    (1, [["no such folder"], ["no such folder"]], None),
])  # fmt: skip
def test_what_most_hosts_have_in_common_is_not_theirs(hosts, failing, remembered, env):
    _, planned = pool(hosts + 1, spares=1, min_nodes=1)
    attempts = Attempts(
        planned, imagine("generic-slurm", hosts + 1, {}), env, replan=lambda *_: planned,
        prepare=lambda ready: Preparing(ready, failing),
    )  # fmt: skip
    attempts._run = lambda: Outcome(0)
    if remembered:
        assert attempts.run() == 0
    else:
        with pytest.raises(StageError):
            attempts.run()
    assert len(recall(env)) == (remembered or 0)


def test_of_the_same_job_it_is_left_out_of_others_told_for_a_day(env):
    remember(["node0002"], "it does not answer any more", "12", env)
    request = Request(("true",))
    left_out, said = avoid(HOSTS, request, "12", env)
    assert left_out == {"node0002"}
    assert "node0002 is left out: it was found bad 0.0 h ago (it does not answer" in said[0]
    left_out, said = avoid(HOSTS, request, "13", env)
    assert (left_out, "node0002 is used" in said[0]) == (set(), True)
    # What the user names is used, and where there are no others.
    assert avoid(HOSTS, Request(("true",), include="node0002"), "12", env) == (set(), [])
    assert avoid(HOSTS, Request(("true",), nodes=4), "12", env)[0] == set()
    (file,) = Path(env["EZPZ_STATE_DIR"], "nodes").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text(json.dumps({**json.loads(file.read_text()), "when": time.time() - 90000}))
    assert recall(env) == []
    assert not file.exists()


def test_the_command(env, capsys, monkeypatch):
    monkeypatch.setenv("EZPZ_STATE_DIR", env["EZPZ_STATE_DIR"])

    def said(*words, status=0):
        assert main(["nodes", *words]) == status
        both = capsys.readouterr()
        return both.out + both.err

    assert "no node was found bad" in said()
    remember(["node0002", "n3"], "SIGKILL", "12", env)
    assert [line.split()[0] for line in said().splitlines()] == ["node0002", "n3"]
    assert [each["why"] for each in json.loads(said("--json"))] == ["SIGKILL"] * 2
    assert "expected one of: node0002, n3" in said("forget", "n4", status=2)
    assert "forgotten: n3" in said("forget", "n3")
    assert "forgotten: node0002" in said("forget", "--all")
    assert "usage:" in said("--help")
    assert "is not known here" in said("forgets", status=2)


def test_a_launch_is_planned_on_other_hosts_and_is_the_same_otherwise(tmp_path, monkeypatch):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("\n".join(f"{host}:3" for host in HOSTS))
    env = {"PATH": os.environ["PATH"], "EZPZ_STATE_DIR": str(tmp_path)}
    topology = imagine("workstation", 1, {})
    request = Request(("true",), spares=1, hostfile=str(hostfile), retries=2, exclude="node0004")
    context = build_context(topology, request, env)
    planned = make_plan(context, request)
    assert (planned.placement.hosts, planned.placement.ppn) == (HOSTS[:2], 3)
    pool = Pool(planned, partial(replan, context, request))
    again, _ = pool.without(["node0001"], planned)
    assert again.placement.hosts == ("node0003", "node0002")
    assert (again.placement.ppn, again.nproc, again.request) == (3, 6, request)
    assert again.environment["MASTER_ADDR"] == "node0003"
