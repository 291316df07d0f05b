"""The two hosts themselves: apart, in reach of each other, and nothing left behind."""

import ipaddress
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import until

# Says where it is, and waits with a process on each host.
WAIT = """
import sys, threading
sys.path.append(sys.argv[1])
import sandbox
with sandbox.TwoHosts() as hosts:
    print(hosts.directory, flush=True)
    wait = ["sh", "-c", "touch ready-$(hostname); sleep 300"]
    threading.Thread(target=hosts.run, args=(wait,), kwargs={"on": "nodeB"}, daemon=True).start()
    hosts.run(wait)
"""


def processes_in(inodes):
    """Return the processes that are in one of these network namespaces, named or not."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "ns/net").stat().st_ino in inodes:
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended
    return found


def inodes_of(sandbox, directory):
    names = sandbox.namespaces(directory)
    assert len(names) == 3
    return {Path("/run/netns", name).stat().st_ino for name in names}


@pytest.fixture
def waiting(hosts, sandbox):
    """Another Python's sandbox with a process on each host: it, directory and namespaces."""
    words = [sys.executable, "-c", WAIT, str(Path(sandbox.__file__).parent)]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as started:
        directory = Path(started.stdout.readline().strip())
        assert directory.is_absolute()
        try:
            until(lambda: all((directory / f"ready-{host}").exists() for host in hosts.names))
            yield started, directory, inodes_of(sandbox, directory)
        finally:
            started.kill()
            started.wait()
            sandbox.remove(directory)


def test_the_hosts_reach_nothing_else(hosts):
    routes = json.loads(hosts.run(["ip", "-json", "route"]).stdout)
    assert [route["dst"] for route in routes] == ["198.18.0.0/24"]
    devices = json.loads(hosts.run(["ip", "-json", "link"]).stdout)
    # Some kernels add tunnels to every namespace; they are down.
    assert {one["ifname"] for one in devices if "UP" in one["flags"]} == {"lo", "eth0"}
    # And this machine neither has their range nor knows the way.
    answer = subprocess.run(
        ["ip", "-json", "-4", "route", "show", "table", "all"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    here = ipaddress.IPv4Network("198.18.0.0/24")
    for route in json.loads(answer.stdout):
        if route["dst"] != "default":
            assert not ipaddress.IPv4Network(route["dst"]).overlaps(here), route


def test_an_interrupted_run_leaves_nothing(hosts, sandbox, waiting):
    started, directory, inodes = waiting
    started.send_signal(signal.SIGINT)
    assert started.wait() != 0
    assert processes_in(inodes) == []
    assert sandbox.namespaces(directory) == []
    assert not directory.exists()
    assert hosts.run(["hostname"]).stdout == "nodeA\n", "the session's live on"
