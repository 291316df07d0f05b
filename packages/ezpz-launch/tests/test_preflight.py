"""Three nodes' programs here, each with a fault of its own, and what is said of their reports."""

import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ezpz_launch._preflight import guilty, judge, table, unjudged

HOSTS = ["n0", "n1", "n2"]
SKEWED = "import time\nnow = time.time\ntime.time = lambda: now() + 10\n"
# As a processor of half the clock: the same work takes twice the seconds.
SLOW = "import time\nits = time.process_time\ntime.process_time = lambda: 2.5 * its()\n"
OTHER = "import platform\nplatform.python_version = lambda: '2.7.18'\n"
# As a file system that lets the import of torch wait.
WAITS = "import sys, time\ntime.sleep(8 * ('-c' in sys.orig_argv))\n"


@pytest.fixture
def look():
    """Run a node's program for each host; of each its variables, and words that start it."""

    def run(own):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = str(probe.getsockname()[1])
        all_of = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "EZPZ_LAUNCH_ID": "x"}
        base = {**os.environ, **all_of, "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"}
        nodes = [
            subprocess.Popen(
                [*start, sys.executable, "-P", "-m", "ezpz_launch._preflight"],
                env={**base, "RANK": str(n), **variables}, stdout=subprocess.PIPE, text=True,
            )
            for n, (variables, start) in enumerate(own)
        ]  # fmt: skip
        lines = [node.communicate()[0].strip() for node in nodes]
        found = [json.loads(line.removeprefix("preflight ")) for line in lines]
        return dict(zip(HOSTS, found, strict=True))

    return run


@pytest.fixture
def full(tmp_path):
    """A folder, and words after which it is a full disk; none where nothing can be mounted."""
    (folder := tmp_path / "full").mkdir()
    words = f'mount -t tmpfs -o size=64k none {folder} && exec "$@"'
    start = ["unshare", "--mount", "sh", "-c", words, "sh"]
    ended = subprocess.run([*start, "true"], check=False, capture_output=True)
    return str(folder), [] if ended.returncode else start


@pytest.fixture
def throttled():
    """Words after which half a processor is left; none where no cgroup can be made."""
    group = Path("/sys/fs/cgroup/cpu", f"ezpz-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError:
        yield []
        return
    try:
        (group / "cpu.cfs_quota_us").write_text("50000")
        (group / "cpu.shares").write_text("262144")  # and that much also beside others
        yield ["sh", "-c", f'echo $$ >{group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        group.rmdir()


@pytest.mark.slow
def test_of_three_nodes_one_is_good_one_is_throttled_and_one_has_its_own_clock_and_more(
    *, look, full, throttled, tmp_path
):
    for name, its in (("own", SKEWED + OTHER + SLOW), ("waits", WAITS)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sitecustomize.py").write_text(its)
    disk, filled = full
    own = {"PYTHONPATH": str(tmp_path / "own"), "TMPDIR": disk}
    waits = {"PYTHONPATH": str(tmp_path / "waits")}
    reports = look([({}, []), (own, filled), (waits, throttled)])
    bad, notes = judge(reports, HOSTS), unjudged(reports)
    assert sorted(bad) == ["n1", "n2"][: 1 + bool(throttled)]
    whys = ["its clock is +10.0 s off", "python 2.7.18, most have"]
    whys += ["No space left on device"] * bool(filled)
    assert [why for why in whys if why not in "; ".join(bad["n1"])] == []
    assert ("throttled" in " ".join(bad.get("n2", ()))) is bool(throttled), reports["n2"]
    assert [len(each["links"]) for each in reports.values()] == [10, 5, 5]
    # Beside what else this machine does, too: then its speed is no fault, and each is named.
    has_torch = find_spec("torch") is not None
    assert ("its siblings" in str(bad["n1"]) or "others use" in str(notes)) is has_torch
    # Or torch did not come to it; then that is said.
    told = ["devices" in reports[n] or "others use" in notes.get(n, "") for n in HOSTS[:2]]
    assert told == [has_torch] * 2
    if not (filled and throttled):
        pytest.skip("here no disk can be filled by a mount, or no cgroup be made; all else is well")


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
