"""Ranks of Hydra on two hosts: who they are, where they are, and what they cannot know."""

import json
import re
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[1] / "worlds" / "say_topology.py"


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


def place(said):
    """Return rank, world size, local rank, local world size."""
    info = said["rank_info"]
    assert info["launcher"] == "pmi"
    return info["rank"], info["world_size"], info["local_rank"], info["local_world_size"]


def test_ranks_without_a_job_agree_with_mpi(say):
    said = say(["nodeA:2", "nodeB:2"], "--mpi")
    assert [place(one) for one in said] == [(0, 4, 0, 2), (1, 4, 1, 2), (2, 4, 0, 2), (3, 4, 1, 2)]
    for one in said:
        assert one["mpi"] == [*place(one), one["hostname"]]
        assert one["allocation"]["scheduler"] == "none"


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
