"""The programs of two nodes, one with faults of its own, and what is said of their reports."""

import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec

import pytest

from ezpz_launch._nodes.preflight import guilty, judge, table, unjudged

# A node of which the clock goes wrong, and that has another Python.
OTHER = """
import platform, time
now = time.time
time.time = lambda: now() + 10
platform.python_version = lambda: "2.7.18"
"""


@pytest.fixture
def look():
    """Run the program of two nodes; of each its variables, and words that start it."""

    def run(*nodes):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = str(probe.getsockname()[1])
        of_all = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "EZPZ_LAUNCH_ID": "x"}
        base = {**os.environ, **of_all, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        started = []
        for rank, (variables, before) in enumerate(nodes):
            words = [*before, sys.executable, "-P", "-m", "ezpz_launch._nodes.preflight"]
            env = {**base, "RANK": str(rank), **variables}
            started.append(subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True))
        lines = [node.communicate()[0].strip() for node in started]
        found = [json.loads(line.removeprefix("preflight ")) for line in lines]
        return dict(zip(["n0", "n1"], found, strict=True))

    return run


@pytest.mark.slow
def test_a_node_with_its_own_clock_python_and_a_full_disk_is_named(look, small_disk, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text(OTHER)
    own = {"PYTHONPATH": str(tmp_path / "other"), "TMPDIR": str(tmp_path / "disk")}
    reports = look(({}, []), (own, small_disk("64k", tmp_path / "disk")))
    bad = judge(reports, ["n0", "n1"])
    assert list(bad) == ["n1"]
    said = "; ".join(bad["n1"])
    assert "its clock is +10.0 s off" in said
    assert "python 2.7.18, most have" in said
    assert "No space left on device" in said
    assert [len(each["links"]) for each in reports.values()] == [5, 5]
    # Where others use the processors, torch may not come to it; then that is said.
    notes = unjudged(reports)
    for host, report in reports.items():
        measured = "devices" in report or "others use" in notes.get(host, "")
        assert measured is (find_spec("torch") is not None)


GOOD = {"python": "3.11", "clock": 0.0, "memory": 8e9, "disk": 1e12, "links": [900.0],
        "devices": [{"rates": [90.0, 100.0], "right": True}] * 2}  # fmt: skip


@pytest.mark.parametrize(("change", "why"), [
    ({"clock": -10.0}, "its clock is -10.0 s off"),
    ({"memory": 1e9}, "1.0 GB of memory are free, others have 8.0"),
    ({"disk": 1e6}, "1 MB of disk are free"),
    ({"links": [50.0, 60.0]}, "its links do 60 MB/s, others' 900"),
    ({"devices": GOOD["devices"][:1]}, "1 devices, others have 2"),
    ({"devices": [*GOOD["devices"][:1], {"rates": [50.0, 45.0], "right": True}]},
     "device 1 does 50 GFLOP/s, its siblings 100"),
    ({"devices": [*GOOD["devices"][:1], {"rates": [99.0], "right": False}]},
     "device 1 computes wrong numbers"),
    ({"torch_error": "torch and its devices do not answer", "devices": GOOD["devices"]}, "answer"),
    ({"kernel": ["NVRM: Xid (PCI:0000:03:00): 79"]}, "its kernel says: NVRM: Xid"),
    ({"python": "3.12"}, "python 3.12, most have 3.11"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("count", [2, 3, 50])
def test_what_differs_is_named(change, why, count):
    hosts = [f"n{index}" for index in range(count)]
    bad = judge(dict.fromkeys(hosts[:-1], GOOD) | {hosts[-1]: GOOD | change}, hosts)
    assert list(bad) == hosts[-1:]
    assert why in bad[hosts[-1]][0]


def test_a_busy_processor_is_not_judged_and_that_is_said():
    busy = {"devices": [{"rates": [], "right": True, "share": 0.4}] * 2, "throttled": 0.0}
    reports = {"n0": GOOD, "n1": GOOD | busy | {"links": [90.0]}}
    assert judge(reports, ["n0", "n1"]) == {}
    assert judge(reports, [*reports, "n2"]) == {"n2": ["no answer"]}
    assert table({}, unjudged(reports), ["n0", "n1"]) == [
        "n1  processor and links not judged (others used 60% of it)",
        "2 of 2 nodes are alike, and well",
    ]  # fmt: skip
    # One that is throttled is bad for that.
    assert unjudged({"n1": GOOD | busy | {"throttled": 0.6}}) == {}


def test_torch_that_is_late_on_most_nodes_is_no_fault_of_theirs():
    late = {"clock": 0.0, "torch_error": "torch and its devices do not answer in 45 s"}
    hosts = ["n0", "n1", "n2", "n3"]
    reports = dict.fromkeys(hosts[:3], late) | {"n3": GOOD}
    assert judge(reports, hosts) == {}
    assert list(unjudged(reports)) == hosts[:3]
    assert "as on most nodes: its file system is slow" in unjudged(reports)["n0"]
    reports = dict.fromkeys(hosts[:2], late) | dict.fromkeys(hosts[2:], GOOD)
    assert list(judge(reports, hosts)) == hosts[:2]
    # Or where a node's processors are busy: one alone, too.
    starved = {**late, "torch_error": f"{late['torch_error']}, others use the processor"}
    assert judge({"n0": starved, "n1": GOOD}, hosts[:2]) == {}
    assert unjudged({"n0": starved})["n0"].endswith("in 45 s, others use the processor)")


def test_most_nodes_that_do_not_meet_the_first_are_told_and_not_left_out():
    apart = {**GOOD, "link_error": "timed out", "links": []}
    hosts = ["n0", "n1", "n2"]
    reports = {"n0": GOOD | {"links": []}, "n1": apart, "n2": apart | {"disk": 1e6}}
    bad = judge(reports, hosts)
    full = "1 MB of disk are free"
    assert bad == {"n1": ["timed out"], "n2": ["timed out", full]}
    assert guilty(bad, reports) == {"n2": [full]}
    bad = judge(reports | {"n2": GOOD}, hosts)
    assert guilty(bad, reports | {"n2": GOOD}) == bad == {"n1": ["timed out"]}


def test_the_command_looks_at_the_hosts_of_a_launch(launch):
    found = json.loads(launch("preflight", "--json", "--launcher", "spawn").stdout)
    assert found["hosts"] == list(found["reports"]) == [os.uname().nodename]
    assert found["reports"][os.uname().nodename]["ezpz-launch"]
