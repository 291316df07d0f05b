"""The nodes and their agents: the real program, real connections on loopback, real ranks."""

import contextlib
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys

import pytest

from ezpz_launch._run import agent as agent_program
from ezpz_launch._run import agents as agents_module
from ezpz_launch._run.agents import NodeAgents
from ezpz_launch._run.channel import Decoder, encode, sign
from ezpz_launch._run.launch import Launch, RankSettings

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
HERE = os.uname().nodename


class Side:
    """ezpz-launch's side: nodes with two ranks each, and what is ready served."""

    def __init__(self, hosts=(HERE,) * 4, *, on_this_host=False):
        # An agent of the test before, or of a session beside this one, must not meet ours.
        self.id = f"nodes-test.{os.urandom(8).hex()}"
        self.poll = select.poll()
        control = RankSettings(self.id, 5)
        launch = Launch(("true",), 8, hosts, 2, on_this_host, {}, control)
        self.nodes = NodeAgents(launch, self.poll)
        self.is_open = True

    def serve(self, timeout=50):
        ready = self.poll.poll(timeout)
        for fd, _ in ready:
            self.nodes.handle(fd)
        return bool(ready)

    def is_reached(self, node):
        self.serve()
        return not self.nodes.without_agent([2 * node])

    def start_agent(self, node=0, where=None, **options):
        """Start the agent of a node, as the shim does."""
        addresses = where or self.nodes.addresses
        control = RankSettings(self.id, 5, addresses=addresses, secret=self.nodes.secret)
        words = [sys.executable, "-I", "-S", agent_program.__file__, str(node)]
        env = {**os.environ, "EZPZ_CONTROL": control.to_text()}
        subprocess.run(words, env=env, check=True, **options)

    def close(self, *, farewell):
        if self.is_open:
            self.is_open = False
            self.nodes.close(farewell=farewell)

    @property
    def address(self):
        host, _, port = self.nodes.addresses[0].rpartition(":")
        return host.strip("[]"), int(port)

    def challenged(self):
        """A connection, and what it is challenged with."""
        connection = socket.create_connection(self.address, timeout=120)
        message = self.receive(connection)
        assert message["type"] == "challenge"
        return connection, message["challenge"]

    def receive(self, connection):
        """The next message that comes to the other side of a connection."""
        decoder = Decoder()
        while (message := decoder.next_message()) is None:
            if select.select([connection], [], [], 0)[0]:
                decoder.feed(connection.recv(1))
            else:
                self.serve()
        return message

    def hello(self, node, challenge):
        signature = sign(self.nodes.secret, node, "agent", challenge, "ab")
        return encode({"type": "hello", "node": node, "challenge": "ab", "signature": signature})

    def is_refused(self, connection, until):
        """Whether the connection is closed without another word."""
        connection.setblocking(False)

        def closed():
            self.serve()
            try:
                return [connection.recv(100)]
            except BlockingIOError:
                return None
            except ConnectionResetError:
                return [b""]

        return until(closed) == [b""]


@pytest.fixture
def side():
    side = Side()
    yield side
    side.close(farewell=True)


@pytest.fixture
def agent(side, until):
    """Start the agent of a node, and wait for it."""

    def start(node=0, **options):
        side.start_agent(node, **options)
        until(lambda: side.is_reached(node))

    return start


@pytest.fixture(params=["here", "elsewhere"])
def reached(request, until):
    """Nodes whose node 0 has an agent: on this host a child of ours, elsewhere the program."""
    side = Side((HERE,), on_this_host=request.param == "here")
    launcher = None
    if request.param == "here":
        launcher = subprocess.Popen(["sleep", "600"], start_new_session=True)
        side.nodes.start_local()
        side.nodes.set_launcher(launcher.pid)
    else:
        side.start_agent()
    until(lambda: side.is_reached(0))
    yield side
    side.close(farewell=True)
    if launcher:
        assert launcher.poll() is None, "it is not the agent's to end while we are there"
        launcher.kill()
        launcher.wait()


# orders


def test_ranks_are_signalled_released_and_killed_and_who_has_ended_is_not(reached, rank):
    nodes, first, second, ended = reached.nodes, rank(), rank(), rank()
    shell = rank("sh", "-c", "trap 'exit 7' TERM; echo ready; while :; do sleep 0.05; done")
    nodes.start(0, first.pid)
    nodes.start(1, shell.pid)
    nodes.end(1)
    nodes.release_failed_rank(1, shell.pid)
    assert shell.wait() == 7
    nodes.start(1, ended.pid)
    nodes.end(1)
    nodes.start(1, second.pid)
    nodes.signal(signal.SIGUSR1)
    assert first.stdout.readline() == second.stdout.readline() == b"heard\n"
    nodes.signal(signal.SIGTERM)
    assert [first.wait(), second.wait()] == [-signal.SIGTERM] * 2
    assert ended.poll() is None
    deaf = rank("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done")
    nodes.start(0, deaf.pid)
    nodes.kill_ranks()
    assert deaf.wait() == -signal.SIGKILL


@pytest.mark.parametrize("farewell", [True, False])
def test_the_end_of_a_launch(reached, rank, farewell):
    """Ranks that run are killed; after a farewell what is marked as ours is named and ended."""
    child, marked = rank(), rank(env={"EZPZ_LAUNCH_ID": reached.id})
    reached.nodes.start(0, child.pid)
    reached.close(farewell=farewell)
    assert marked.wait() == (-signal.SIGTERM if farewell else -signal.SIGKILL)
    if not farewell:
        assert child.wait() == -signal.SIGKILL
        return
    assert child.poll() is None
    name = f"pid {marked.pid} ({os.path.basename(sys.executable)})"
    # No one waits for the agents of other hosts.
    assert reached.nodes.leftovers in ([], [f"{name} on {HERE}"])
    assert bool(reached.nodes.leftovers) is (reached.nodes.addresses == ())


def test_what_ranks_left_is_named_once_and_killed_in_the_end(reached, rank, until):
    script = "trap 'echo heard' TERM; echo ready; while :; do sleep 0.05; done"
    left = rank("sh", "-c", script, env={"EZPZ_LAUNCH_ID": reached.id})
    reached.nodes.end_leftover_processes()
    until(lambda: reached.serve() and reached.nodes.leftovers)
    # what the shell is just running is named, too
    assert f"pid {left.pid} (sh)" in reached.nodes.leftovers[0]
    assert left.stdout.readline() == b"heard\n"
    assert left.wait() == -signal.SIGKILL


def test_an_agent_that_comes_late_ends_what_was_left(side, agent, rank):
    left = rank(env={"EZPZ_LAUNCH_ID": side.id})
    side.nodes.end_leftover_processes()
    agent()
    assert left.wait() == -signal.SIGTERM


@ON_LINUX
@pytest.mark.parametrize("who", ["process", "launcher"])
def test_ranks_that_are_gone_are_reported_once(reached, process, until, who):
    launcher = process("sh", "-c", "sleep 600 >&2 & echo $!; wait", stdout=-1)
    gone = int(launcher.stdout.readline())
    well = process("sleep", "600")
    nodes = reached.nodes
    nodes.start(0, well.pid)
    nodes.start(1, gone)
    nodes.request_stacks([0])  # wait until it has taken that
    until(lambda: reached.serve() and nodes.stacks)
    assert nodes.gone_ranks + nodes.lost_ranks == []
    os.kill(gone if who == "process" else launcher.pid, signal.SIGKILL)
    found = nodes.gone_ranks if who == "process" else nodes.lost_ranks
    until(lambda: reached.serve() and found)
    for _ in range(30):  # it has time to say it again
        reached.serve()
    assert nodes.gone_ranks + nodes.lost_ranks == [1]


# agents of other hosts


def test_an_agent_that_comes_late_hears_all_of_it_once(side, agent, rank):
    nodes = side.nodes
    child, ended, elsewhere, late = rank(), rank(), rank(), rank()
    nodes.start(2, child.pid)
    nodes.start(3, ended.pid)
    nodes.end(3)
    nodes.start(0, elsewhere.pid)
    nodes.signal(signal.SIGUSR1)
    # No harm without an agent.
    nodes.release_failed_rank(0, elsewhere.pid)
    nodes.request_stacks([0])
    nodes.kill_ranks()
    agent(1)
    assert nodes.without_agent([0, 1, 2, 3, 4]) == [0, 1, 4]
    assert child.stdout.readline() == b"heard\n"
    nodes.signal(signal.SIGTERM)
    # the first signal is not told again
    assert child.communicate()[0] == b""
    assert child.returncode == -signal.SIGTERM
    nodes.start(3, late.pid)
    assert late.wait() == -signal.SIGTERM
    assert [ended.poll(), elsewhere.poll()] == [None, None]


def test_a_connection_that_is_reset_kills(side, agent, rank, until):
    child, marked = rank(), rank(env={"EZPZ_LAUNCH_ID": side.id})
    agent()
    side.nodes.start(0, child.pid)
    # wait until it has taken that: what it has not read is lost with the connection
    side.nodes.request_stacks([1])
    until(lambda: side.serve() and side.nodes.stacks)
    for connection in side.nodes._connections.values():
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    side.close(farewell=False)
    assert child.wait() == marked.wait() == -signal.SIGKILL


DEEP = b"\0\0\x0f\xa0" + b"[" * 4000


def test_who_does_not_know_the_secret_of_the_node_is_refused(side, until):
    def signed(node, secret=side.nodes.secret, role="agent", as_node=None):
        def hello(challenge):
            signature = sign(secret, node, role, challenge, "ab")
            return {"type": "hello", "node": node if as_node is None else as_node,
                    "challenge": "ab", "signature": signature}  # fmt: skip

        return hello

    strangers = {
        "the wrong secret": signed(0, secret="0" * 64),
        "another node's": signed(1, as_node=0),
        "ours": signed(0, role="launch"),
        "no such node": signed(4),
        "no signature": lambda _: {"type": "hello", "node": 0, "challenge": "ab"},
        "no number": lambda _: {"type": "hello", "node": float("inf"), "challenge": "ab"},
        "a number": lambda _: {"type": "hello", "node": 0, "challenge": "ab", "signature": 7},
        "no hello": lambda _: {"type": "gone", "rank": 1},
    }
    for name, hello in strangers.items():
        connection, challenge = side.challenged()
        with connection:
            connection.sendall(encode(hello(challenge)))
            assert side.is_refused(connection, until), name
    for data in (b"\0\0\0\2[]", b"\0\0\0\2{x", b"\0\0\x7f\xff", b"GET / HTTP/1.1\r\n", DEEP):
        connection, _ = side.challenged()
        with connection:
            connection.sendall(data)
            assert side.is_refused(connection, until), data
    assert side.nodes.without_agent([0, 2, 4, 6]) == [0, 2, 4, 6]
    assert side.nodes.gone_ranks == []


def test_what_an_agent_has_said_is_of_no_use_to_another(side, until):
    first, challenge = side.challenged()
    with first:
        hello = side.hello(1, challenge)
        first.sendall(hello)
        until(lambda: side.is_reached(1))
        second, _ = side.challenged()
        with second:
            second.sendall(hello)
            assert side.is_refused(second, until)
        # nor does one that knows the secret take the place of the node's own
        third, again = side.challenged()
        with third:
            third.sendall(side.hello(1, again))
            assert side.is_refused(third, until)
        assert side.receive(first)["type"] == "welcome"
        side.nodes.kill_ranks()
        assert side.receive(first) == {"type": "kill"}


def test_hello_and_stacks_in_pieces(side, until):
    connection, challenge = side.challenged()
    with connection:
        stacks = encode({"type": "stacks", "text": "ab\ncd\n!"})
        for byte in side.hello(3, challenge) + stacks:
            connection.sendall(bytes([byte]))
            side.serve()
        until(lambda: side.is_reached(3) and side.nodes.stacks)
        expected = sign(side.nodes.secret, 3, "launch", "ab", challenge)
        assert side.receive(connection) == {"type": "welcome", "signature": expected}
    assert side.nodes.stacks == ["ab\ncd\n!"]


@pytest.mark.parametrize(
    "said",
    [encode({"type": "gone", "rank": "x"}), encode({"type": "gone"}), encode({"type": "last"}),
     b"\xff\xff\xff\xff"],
)  # fmt: skip
def test_an_agent_that_says_anything_else_is_dropped(side, until, said):
    connection, challenge = side.challenged()
    with connection:
        # It speaks for the ranks of its node, 6 and 7.
        gone = [encode({"type": "gone", "rank": rank}) for rank in (5, 6, 7)]
        connection.sendall(side.hello(3, challenge) + gone[0] + gone[1] + said + gone[2])
        until(lambda: side.serve() and side.nodes.gone_ranks and not side.is_reached(3))
    assert side.nodes.gone_ranks == [6]


def test_an_agent_tells_an_impostor_nothing(side, rank):
    """Whoever took our port does not know what the agent wants to hear."""
    child = rank()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        side.start_agent(where=(f"127.0.0.1:{server.getsockname()[1]}",))
        connection, _ = server.accept()
        with connection:
            connection.settimeout(20)
            connection.sendall(encode({"type": "challenge", "challenge": "ab"}))
            hello = side.receive(connection)
            assert (hello["type"], hello["node"]) == ("hello", 0)
            # its own proof proves nothing of us
            orders = encode({"type": "welcome", "signature": hello["signature"]})
            orders += encode({"type": "start", "rank": 0, "pid": child.pid})
            orders += encode({"type": "signal", "number": 9})
            connection.sendall(orders)
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1000) == b""
    assert child.poll() is None


def test_an_agent_tries_every_address_and_holds_no_pipe(side, agent):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    read, write = os.pipe()
    agent(
        where=(f"127.0.0.1:{port}", *side.nodes.addresses), pass_fds=[write], stdout=-3, stderr=-3
    )
    os.close(write)
    assert select.select([read], [], [], 20)[0]
    assert os.read(read, 1) == b""
    os.close(read)


def test_more_agents_than_files_may_be_open(side, process):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    program = (
        "import socket, sys\n"
        "all = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) for _ in range(30)]\n"
        "print('connected', flush=True)\n"
        "sys.stdin.read()"
    )
    words = [sys.executable, "-c", program, *map(str, side.address)]
    child = process(*words, stdin=-1, stdout=-1)
    try:
        assert child.stdout.readline() == b"connected\n"
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 10, hard))
        for _ in range(40):
            side.serve(1)
        # those that found room are served
        assert side.nodes._connections
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_an_address_there_are_no_agents(monkeypatch):
    def nowhere(_):
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr(agents_module, "find_own_address", nowhere)
    nodes = Side(["absent.invalid"]).nodes
    assert nodes.why_none == (
        "no address of ours that absent.invalid could reach ([Errno -2] Name or service not known)"
    )
    assert (nodes.addresses, nodes.secret, nodes.without_agent([0, 1])) == ((), "", [0, 1])
    nodes.signal(signal.SIGTERM)
    nodes.close(farewell=False)
