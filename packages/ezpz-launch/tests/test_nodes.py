"""What the run loop can do to ranks: of this host directly, of others through a real agent."""

import os
import select
import signal
import subprocess
import sys

import pytest

import ezpz_launch._agent
import ezpz_launch._nodes
from ezpz_launch._agent import is_running
from ezpz_launch._launch import Control
from ezpz_launch._nodes import OtherHosts, ThisHost

ID = f"nodes-test.{os.getpid()}"  # a session beside this one must not meet ours
COUNTS = (
    "import os, signal, time\n"
    "signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'heard\\n'))\n"
    "print('ready', flush=True)\n"
    "while True: time.sleep(600)\n"
)
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")


@pytest.fixture
def told():
    """What the nodes answered when they were asked where their ranks are."""
    return []


@pytest.fixture
def here(told):
    nodes = ThisHost(ID, told.append)
    yield nodes
    nodes.close(farewell=True)


class Others:
    """Two hosts with two ranks each, of which ours is the second, and an agent there."""

    def __init__(self, told):
        # The agent of the test before may still look for what it is to kill.
        self.id = f"{ID}.{os.urandom(4).hex()}"
        self.poll = select.poll()
        here = os.uname().nodename
        # the first is not looked up, and so takes no time: it has our name
        self.nodes = OtherHosts(
            [f"{here}.other", here], 2, self.id, self.poll, told.append, timeout=15
        )

    def serve(self):
        for fd, _ in self.poll.poll(50):
            self.nodes.handle(fd)
        return True

    def start_agent(self, node=1):
        control = Control(self.id, 5, where=self.nodes.where(), secret=self.nodes.secret())
        subprocess.run(
            [sys.executable, "-I", "-S", ezpz_launch._agent.__file__, str(node)],
            env={**os.environ, "EZPZ_CONTROL": control.value()},
            check=True,
            timeout=120,
        )


@pytest.fixture
def others(told):
    others = Others(told)
    yield others
    others.nodes.close(farewell=True)


@pytest.fixture
def rank(process):
    def start(**options):
        child = process(sys.executable, "-c", COUNTS, stdout=-1, **options)
        assert child.stdout.readline() == b"ready\n"
        return child

    return start


def test_of_this_host_nothing_is_told_to_agents(here):
    assert (here.where(), here.secret(), here.why_not) == ((), "", "")
    assert here.unreached([0, 1]) == []
    with pytest.raises(AssertionError):
        here.handle(3)


def test_ranks_of_this_host_are_signalled(here, rank):
    first, second, ended = rank(), rank(), rank()
    for number, child in enumerate((first, second, ended)):
        here.start(number, child.pid)
    here.end(2)
    here.signal(signal.SIGUSR1)
    assert first.stdout.readline() == second.stdout.readline() == b"heard\n"
    here.signal(signal.SIGTERM)
    assert [first.wait(120), second.wait(120)] == [-signal.SIGTERM] * 2
    assert ended.poll() is None


def test_a_shim_of_this_host_is_released(here, process):
    shell = process(
        "sh", "-c", "trap 'exit 7' TERM; echo ready; while :; do sleep 0.05; done", stdout=-1
    )
    assert shell.stdout.readline() == b"ready\n"
    here.start(0, shell.pid)
    here.end(0)
    here.release(0, shell.pid)
    assert shell.wait(120) == 7


@pytest.mark.parametrize("farewell", [True, False])
def test_the_end_of_ranks_of_this_host(told, rank, farewell):
    nodes, child = ThisHost(ID, told.append), rank()
    nodes.start(0, child.pid)
    nodes.close(farewell=farewell)
    if farewell:
        assert child.poll() is None
    else:
        assert child.wait(120) == -signal.SIGKILL


@ON_LINUX
def test_lost_ranks_of_this_host(here, process):
    env = {**os.environ, "EZPZ_LAUNCH_ID": ID, "EZPZ_RANK": "1"}
    usual = here.next_look()
    shim = process("sh", "-c", "sleep 600 >&2 & echo ready; wait", stdout=-1, env=env)
    assert shim.stdout.readline() == b"ready\n"
    here.start(1, shim.pid)
    assert here.next_look() < usual
    assert here.lost() == []
    shim.kill()
    shim.wait(120)
    assert [here.lost(), here.lost()] == [[1], []]


def test_this_host_is_asked_where_its_ranks_are(here, told, until):
    here.stacks([3])  # that has not started
    until(lambda: told)
    assert told == [b""]


def test_ranks_that_no_agent_reaches(others):
    nodes = others.nodes
    assert nodes.unreached([0, 1, 2, 3]) == [0, 1, 2, 3]
    # no harm
    nodes.start(0, 1 << 30)
    nodes.signal(signal.SIGTERM)
    nodes.release(0, 1 << 30)
    nodes.stacks([0, 3])
    nodes.end(0)
    nodes.kill()
    assert nodes.lost() == []


def test_an_agent_that_comes_late_hears_all_of_it_once(others, rank, until):
    nodes = others.nodes
    child, ended, elsewhere = rank(), rank(), rank()
    nodes.start(2, child.pid)
    nodes.start(3, ended.pid)
    nodes.end(3)
    nodes.start(0, elsewhere.pid)  # a rank of the other host, of the same number here
    nodes.signal(signal.SIGUSR1)
    others.start_agent()
    until(lambda: others.serve() and nodes.unreached([0, 1, 2, 3]) == [0, 1])
    assert child.stdout.readline() == b"heard\n"
    nodes.signal(signal.SIGTERM)
    # the first signal is not told again
    assert child.communicate(timeout=120)[0] == b""
    assert child.returncode == -signal.SIGTERM
    assert [ended.poll(), elsewhere.poll()] == [None, None]


def test_a_rank_that_starts_after_it_was_told_to_end(others, rank, until):
    nodes, child = others.nodes, rank()
    nodes.signal(signal.SIGTERM)
    others.start_agent()
    until(lambda: others.serve() and not nodes.unreached([2]))
    nodes.start(2, child.pid)
    assert child.wait(120) == -signal.SIGTERM


def test_ranks_elsewhere_are_released_and_killed(others, process, rank, until):
    nodes, child = others.nodes, rank()
    shell = process(
        "sh", "-c", "trap 'exit 7' TERM; echo ready; while :; do sleep 0.05; done", stdout=-1
    )
    assert shell.stdout.readline() == b"ready\n"
    others.start_agent()
    until(lambda: others.serve() and not nodes.unreached([2]))
    nodes.start(2, child.pid)
    nodes.start(3, shell.pid)
    nodes.release(3, shell.pid)
    assert shell.wait(120) == 7
    nodes.kill()
    assert child.wait(120) == -signal.SIGKILL


@pytest.mark.parametrize("farewell", [True, False])
def test_the_end_of_ranks_elsewhere(others, rank, until, farewell):
    nodes, child = others.nodes, rank()
    others.start_agent()
    until(lambda: others.serve() and not nodes.unreached([2]))
    nodes.start(2, child.pid)
    nodes.close(farewell=farewell)
    others.nodes = ThisHost(ID, print)  # closed already
    if farewell:
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.5)
    else:
        assert child.wait(120) == -signal.SIGKILL


def test_nodes_elsewhere_are_asked_where_their_ranks_are(others, told, until):
    others.start_agent(0)
    others.start_agent(1)
    until(lambda: others.serve() and not others.nodes.unreached([0, 1, 2, 3]))
    others.nodes.stacks([0, 1, 3])
    until(lambda: others.serve() and len(told) == 2)
    assert told == [b"", b""]  # one a node: none of them has started


@ON_LINUX
def test_lost_ranks_elsewhere(others, process, until):
    nodes = others.nodes
    env = {**os.environ, "EZPZ_LAUNCH_ID": others.id, "EZPZ_RANK": "3"}
    shim = process("sh", "-c", "sleep 600 >&2 & echo ready; wait", stdout=-1, env=env)
    assert shim.stdout.readline() == b"ready\n"
    others.start_agent()
    until(lambda: others.serve() and not nodes.unreached([2]))
    nodes.start(3, shim.pid)
    shim.kill()
    found = until(lambda: others.serve() and nodes.lost())
    assert found == [3]
    assert nodes.lost() == []


def test_without_an_address_there_are_no_agents(told, monkeypatch):
    def nowhere(_):
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr(ezpz_launch._nodes, "_own_address", nowhere)
    nodes = OtherHosts(["absent.invalid"], 2, ID, select.poll(), told.append, timeout=15)
    assert nodes.why_not == (
        "no address of ours that absent.invalid could reach ([Errno -2] Name or service not known)"
    )
    assert (nodes.where(), nodes.secret()) == ((), "")
    assert nodes.unreached([0, 1]) == [0, 1]
    # no harm
    nodes.start(0, 1 << 30)
    nodes.signal(signal.SIGTERM)
    nodes.stacks([0])
    nodes.release(0, 1 << 30)
    nodes.kill()
    nodes.handle(3)
    nodes.end(0)
    nodes.close(farewell=False)


WATCHED = """
import os, select, subprocess, sys
from ezpz_launch._nodes import OtherHosts, ThisHost
launcher = subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.DEVNULL)
rank = subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.DEVNULL)
print(launcher.pid, rank.pid, flush=True)
if sys.argv[1] == "here":
    nodes = ThisHost(sys.argv[3], print)
else:
    nodes = OtherHosts([os.uname().nodename], 2, sys.argv[3], select.poll(), print, timeout=15)
nodes.watch(launcher.pid, sys.argv[2])
nodes.start(0, rank.pid)
print("watched", flush=True)
sys.stdin.readline()
nodes.close(farewell=True)
print("closed", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def watched(process, scratch):
    """Start a process that watches a launcher and a rank; return all three."""
    known = []

    def start(where):
        parent = process(
            sys.executable, "-c", WATCHED, where, scratch, f"{ID}1", stdin=-1, stdout=-1
        )
        known.extend(map(int, parent.stdout.readline().split()))
        assert parent.stdout.readline() == b"watched\n"
        return parent, *known

    yield start
    for pid in filter(is_running, known):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def scratch(tmp_path):
    """A file of the launch, such as its hostfile."""
    path = tmp_path / "hosts"
    path.touch()
    return path


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_the_launcher_does_not_outlive_us(watched, scratch, until, where):
    parent, launcher, rank = watched(where)
    parent.kill()
    until(lambda: not is_running(launcher))
    until(lambda: not scratch.exists())
    if where == "here":  # elsewhere it is the agent that ends it
        until(lambda: not is_running(rank))


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_after_the_end_nobody_is_watched(watched, scratch, where):
    parent, launcher, rank = watched(where)
    parent.stdin.write(b"\n")
    parent.stdin.flush()
    assert parent.stdout.readline() == b"closed\n"
    parent.kill()
    # nobody holds its output any more, the guardian neither
    assert parent.stdout.read() == b""
    assert is_running(launcher)
    assert is_running(rank)
    assert scratch.exists()
