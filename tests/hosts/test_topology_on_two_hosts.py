"""Ranks of Hydra on two hosts: who they are, where they are, and what they cannot know."""

import json
import re
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[1] / "worlds" / "say_topology.py"

TWO_EACH = ["nodeA:2", "nodeB:2"]
JOB = {"PBS_JOBID": "7.pbs-0001"}


@pytest.fixture
def say(hosts, tool, tmp_path):
    """Start say_topology on the ranks that Hydra's hostfile gives; return what each said."""

    def run(slots, *options, env=None):
        hostfile, said = tmp_path / "hostfile", tmp_path / "said"
        hostfile.write_text("".join(f"{line}\n" for line in slots), encoding="utf-8")
        said.mkdir()
        ranks = sum(int(line.partition(":")[2]) for line in slots)
        hosts.run(
            [tool("mpiexec"), "--envall", f"--np={ranks}", f"--hostfile={hostfile}",
             sys.executable, str(PROGRAM), str(said), "--no-scontrol", *options],
            # Whatever devices this machine has, they are not the hosts'.
            env={"TORCH_DEVICE": "cpu", **(env or {})},
            timeout=300,
        )  # fmt: skip
        reports = [json.loads(file.read_text(encoding="utf-8")) for file in said.iterdir()]
        reports.sort(key=lambda report: int(report["rank"]))
        assert [one["rank"] for one in reports] == list(range(ranks))
        assert [one["hostname"] for one in reports] == [
            host for host, _, n in (line.partition(":") for line in slots) for _ in range(int(n))
        ]
        # What every rank calls asks no scheduler and no vendor's tool.
        assert not any(one["started_commands"] for one in reports)
        return reports

    return run


@pytest.fixture
def job(tmp_path):
    """Return the variables of a PBS job whose node file, seen by both hosts, has these lines."""

    def write(*lines):
        path = tmp_path / "nodefile"
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return {**JOB, "PBS_NODEFILE": str(path)}

    return write


def place(said):
    """Return rank, world size, local rank, local world size."""
    info = said["rank_info"]
    assert info["launcher"] == "pmi"
    return info["rank"], info["world_size"], info["local_rank"], info["local_world_size"]


def row(said, name):
    """Return the value that detect() gives this name where it explains itself."""
    return said["explained"][name][0]


def is_untold(said):
    """Whether the index of the node is an error, and a gap where detect() explains itself."""
    error = "IncompleteLauncherError: pmi does not tell which node this is"
    return str(said["node_index"]).startswith(error) and row(said, "node index") is None


def are_uncounted(said):
    """Whether the number of nodes is an error: no rank can see whether the others are as many."""
    error = "IncompleteLauncherError: pmi: "
    return str(said["num_nodes"]).startswith(error) and row(said, "nodes") is None


def test_ranks_without_a_job_agree_with_mpi(say):
    said = say(TWO_EACH, "--mpi")
    assert [place(one) for one in said] == [(0, 4, 0, 2), (1, 4, 1, 2), (2, 4, 0, 2), (3, 4, 1, 2)]
    for one in said:
        assert one["mpi"] == [*place(one), one["hostname"]]
        assert are_uncounted(one)
        assert is_untold(one)
        assert one["allocation"]["scheduler"] == "none"
        # This host alone would be half an answer.
        assert one["hosts"].startswith("HostfileError: 4 ranks of pmi, not all of them known")


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("order", [("nodeA", "nodeB"), ("nodeB", "nodeA")])
def test_the_node_file_gives_nodes_and_indices_by_name(say, job, order, slots):
    names = [f"{host}.example" for host in order]
    env = job(*(name for name in names for _ in range(slots)))
    for one in say(TWO_EACH, env=env):
        allocation = one["allocation"]
        assert (allocation["scheduler"], allocation["job_id"]) == ("pbs", JOB["PBS_JOBID"])
        assert (allocation["hosts"], allocation["slots"]) == (names, [slots, slots])
        assert allocation["node_name"] == f"{one['hostname']}.example"
        if order[0] == "nodeA":
            assert one["node_index"] == row(one, "node index") == order.index(one["hostname"])
        else:
            # The ranks begin on the job's second host: whose numbers are meant?
            assert is_untold(one)
        assert one["num_nodes"] == row(one, "nodes") == 2
        assert one["hosts"] == {
            "entries": [{"host": name, "slots": slots} for name in names],
            "source": "PBS_NODEFILE",
            "path": env["PBS_NODEFILE"],
        }


def test_ranks_on_one_host_of_the_job_are_all_on_the_first_node_with_ranks(say, job):
    # Its own launcher says so: no guess, though the job names that host second.
    for one in say(["nodeB:2"], env=job("nodeA.example", "nodeB.example")):
        assert place(one)[1:] == (2, one["rank"], 2)
        assert one["node_index"] == row(one, "node index") == 0
        assert one["rank_info"]["sources"]["node_rank"] == "every rank is on this node"
        assert one["num_nodes"] == 2, "those of the job"
        assert one["allocation"]["node_name"] == "nodeB.example"


UNEVEN = ["nodeA:2", "nodeB:1"]


@pytest.mark.parametrize(
    ("slots", "lines", "num_nodes"),
    [
        (TWO_EACH, ["nodeA", "nodeX", "nodeB"], 3),
        (UNEVEN, ["nodeA", "nodeA", "nodeB"], 2),
        (UNEVEN, [], None),
        (["nodeA:2", "nodeB:4"], ["nodeX", "nodeA", "nodeB"], 3),
    ],
    ids=["two hosts of three", "uneven", "uneven, without a job", "uneven, two hosts of three"],
)
def test_who_cannot_tell_its_node_does_not_guess(say, job, slots, lines, num_nodes):
    for one in say(slots, env=job(*(f"{host}.example" for host in lines)) if lines else {}):
        assert is_untold(one)
        assert are_uncounted(one) if num_nodes is None else one["num_nodes"] == num_nodes


def test_a_host_that_is_not_in_the_node_file_does_not_guess_its_node(say, job):
    # What nodeA says is not looked at: it cannot know that nodeB is no node of the job.
    for one in say(TWO_EACH, env=job("nodeA.example", "nodeX.example"))[2:]:
        assert is_untold(one)
        assert one["allocation"]["node_name"] is None
        (note,) = one["allocation"]["notes"]
        assert "host nodeB is no node of job 7.pbs-0001" in note


def test_a_node_without_the_node_file_says_what_it_can_and_asks_nobody(say, hosts, tmp_path):
    # As PBS does it: the variable on every node, the file on the first one's own disk.
    (hosts.directory / "nodeA" / "nodefile").write_text("nodeA.example\nnodeB.example\n")
    qstat = tmp_path / "bin" / "qstat"
    qstat.parent.mkdir()
    qstat.write_text(f'#!/bin/sh\ntouch "{tmp_path}/asked"\nexit 153\n', encoding="utf-8")
    qstat.chmod(0o755)
    env = {
        **JOB,
        "PBS_NODEFILE": str(hosts.directory / "local" / "nodefile"),
        "PATH": f"{qstat.parent}:{hosts.environment['PATH']}",
    }
    said = say(TWO_EACH, env=env)
    assert [place(one) for one in said] == [(0, 4, 0, 2), (1, 4, 1, 2), (2, 4, 0, 2), (3, 4, 1, 2)]
    for one in said:
        allocation = one["allocation"]
        assert allocation["scheduler"] == "pbs"
        if one["hostname"] == "nodeA":
            assert one["node_index"] == 0
            assert one["num_nodes"] == row(one, "nodes") == 2
            assert allocation["hosts"] == ["nodeA.example", "nodeB.example"]
            continue
        assert is_untold(one)
        assert are_uncounted(one)
        assert allocation["hosts"] == []
        missing = f"PBS_NODEFILE={env['PBS_NODEFILE']!r} cannot be read here"
        assert missing in allocation["sources"]["hosts"]
        assert one["hosts"].startswith(f"SchedulerError: {missing}")
        assert row(one, "hosts") is None
    assert not (tmp_path / "asked").exists()


def test_hosts_that_gloo_cannot_connect_are_an_error_of_set_up(say, sandbox):
    # As where Debian gives a host's own name the address 127.0.1.1: the store is reached.
    with pytest.raises(sandbox.SandboxError) as caught:
        say(["nodeA:1", "nodeB:1"], "--torch=20", env={"GLOO_SOCKET_IFNAME": "lo"})
    said = str(caught.value)
    assert "did not end within" not in said
    # Who fails first ends the other, too.
    failed = re.search(r"SetupError: rank [01] of 2 could not meet the others at node.*", said)
    assert failed, said
    assert "GLOO_SOCKET_IFNAME names it" in failed[0]
    assert re.search(r"ezpz: rank [01] on node[AB] failed in setup_torch: .*connectFullMesh", said)
