"""The two hosts themselves: apart, in reach of each other, and nothing left behind."""

import ipaddress
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

OTHER = {"nodeA": "nodeB", "nodeB": "nodeA"}

# Says where it is, and waits with a process on each host.
WAIT = """
import importlib.util, sys, threading
spec = importlib.util.spec_from_file_location("sandbox", sys.argv[1])
sandbox = importlib.util.module_from_spec(spec)
sys.modules["sandbox"] = sandbox
spec.loader.exec_module(sandbox)
with sandbox.TwoHosts() as hosts:
    print(hosts.directory, flush=True)
    wait = ["sh", "-c", "touch ready-$(hostname); sleep 300"]
    threading.Thread(target=hosts.run, args=(wait,), kwargs={"on": "nodeB"}, daemon=True).start()
    hosts.run(wait, timeout=300)
"""


def interfaces():
    """Return the names of this machine's own network interfaces."""
    return sorted(path.name for path in Path("/sys/class/net").iterdir())


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


def wait_until(so):
    deadline = time.monotonic() + 120
    while not so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def waiting(hosts, sandbox):
    """Another Python's sandbox with a process on each host: it, directory and namespaces."""
    words = [sys.executable, "-c", WAIT, str(sandbox.__file__)]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as started:
        directory = Path(started.stdout.readline().strip())
        assert directory.is_absolute()
        try:
            wait_until(lambda: all((directory / f"ready-{host}").exists() for host in OTHER))
            yield started, directory, inodes_of(sandbox, directory)
        finally:
            started.kill()
            started.wait()
            sandbox.remove(directory)


@pytest.mark.parametrize("host", OTHER)
def test_a_host_has_its_own_name_and_reaches_the_other(hosts, host):
    ours = os.uname().nodename
    assert hosts.run(["hostname"], on=host).stdout == f"{host}\n"
    listen = (
        "import socket; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True);"
        "c, a = s.accept(); c.sendall(a[0].encode())"
    )
    ask = (
        "import socket, sys; c = socket.create_connection((sys.argv[1], int(sys.argv[2])));"
        "print(c.recv(99).decode(), c.getpeername()[0])"
    )
    enter = str(hosts.directory / "enter")
    other = OTHER[host]
    with subprocess.Popen(
        [enter, other, sys.executable, "-c", listen],
        env=hosts.environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        port = server.stdout.readline().strip()
        said = hosts.run([sys.executable, "-c", ask, other, port], on=host).stdout.split()
    addresses = {"nodeA": "198.18.0.1", "nodeB": "198.18.0.2"}
    assert said == [addresses[host], addresses[other]]
    assert os.uname().nodename == ours


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


def test_a_host_has_a_disk_of_its_own(hosts):
    (hosts.directory / "nodeA" / "note").write_text("only here")
    assert hosts.run(["cat", "local/note"]).stdout == "only here"
    assert hosts.run(["cat", "local/note"], on="nodeB", expect=1).stdout == ""


def test_two_sandboxes_run_at_once_and_leave_nothing(hosts, sandbox, waiting):
    started, _, elsewhere = waiting
    before = interfaces()
    with sandbox.TwoHosts() as other:
        theirs = inodes_of(sandbox, other.directory)
        other.run(["sh", "-c", "nohup sleep 300 >/dev/null 2>&1 & hostname"], on="nodeB")
        assert len(processes_in(theirs)) == 1
        assert interfaces() == before
    assert processes_in(theirs) == []
    assert sandbox.namespaces(other.directory) == []
    assert not other.directory.exists()
    assert hosts.run(["hostname"]).stdout == "nodeA\n", "the session's live on"
    assert started.poll() is None
    assert processes_in(elsewhere), "another process's live on"


def test_an_interrupted_run_leaves_nothing(sandbox, waiting):
    started, directory, inodes = waiting
    started.send_signal(signal.SIGINT)
    assert started.wait() != 0
    assert processes_in(inodes) == []
    assert sandbox.namespaces(directory) == []
    assert not directory.exists()


def test_what_a_killed_run_leaves_is_in_nobodys_way_and_can_be_removed(sandbox, waiting):
    started, directory, inodes = waiting
    started.kill()
    started.wait()
    with sandbox.TwoHosts() as next_one:
        assert next_one.run(["getent", "hosts", "nodeB"]).stdout.split()[0] == "198.18.0.2"
    assert processes_in(inodes)
    sandbox.remove(directory)
    assert processes_in(inodes) == []
    assert sandbox.namespaces(directory) == []
    assert not directory.exists()


@pytest.mark.parametrize("wrong", ["", "198.18.0.1.2"])
def test_hosts_that_do_not_start_say_why_and_leave_nothing(hosts, sandbox, monkeypatch, wrong):
    before = interfaces()
    monkeypatch.setitem(sandbox.ADDRESSES, "nodeB", wrong)
    broken = sandbox.TwoHosts()
    with pytest.raises(sandbox.SandboxError, match=rf"nodeB address add {wrong}/24.*: \S"):
        broken.__enter__()
    assert sandbox.namespaces(broken.directory) == []
    assert not broken.directory.exists()
    assert interfaces() == before


def test_a_command_that_hangs_is_ended_with_all_that_it_started(hosts, sandbox):
    # The child holds the output open, as a launcher's proxies do.
    with pytest.raises(sandbox.SandboxError, match=r"did not end within 1 s"):
        hosts.run(["sh", "-c", "sleep 300 & sleep 300"], timeout=1)
    assert processes_in(inodes_of(sandbox, hosts.directory)) == []


def test_a_reset_ends_the_ranks_of_both_hosts(hosts, sandbox, tool, tmp_path):
    (tmp_path / "both").write_text("nodeA\nnodeB\n")
    wait = ["sh", "-c", 'touch "$0/$(hostname)"; sleep 300', str(tmp_path)]
    launch = [tool("mpiexec"), "--envall", "--np=2", "--ppn=1", f"--hostfile={tmp_path}/both"]
    with ThreadPoolExecutor() as pool:
        run = pool.submit(hosts.run, [*launch, *wait])
        try:
            wait_until(lambda: all((tmp_path / host).exists() for host in OTHER))
        finally:
            hosts.reset()
        with pytest.raises(sandbox.SandboxError, match="ended with -9"):
            run.result()
    assert processes_in(inodes_of(sandbox, hosts.directory)) == []


def test_a_command_that_fails_says_what_it_said(hosts, sandbox):
    with pytest.raises(sandbox.SandboxError, match=r"(?s)ended with 7, expected 0.*stderr\nno"):
        hosts.run(["sh", "-c", "echo no >&2; exit 7"])
    assert hosts.run(["sh", "-c", "exit 7"], expect=None).returncode == 7
