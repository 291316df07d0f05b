"""The nodes' agents: the real program, real connections on loopback, real ranks."""

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

import ezpz_launch._agent
from ezpz_launch._agent import proof
from ezpz_launch._launch import Control
from ezpz_launch._nodes import Agents


class Side:
    """Our side: the agents, and what they said."""

    def __init__(self):
        # An agent of the test before, or of a session beside this one, must not meet ours.
        self.id = f"agents-test.{os.urandom(8).hex()}"
        self.poll = select.poll()
        self.greeted, self.stacks, self.lost, self.silent = [], [], [], []
        self.agents = Agents(
            [os.uname().nodename] * 4,
            self.poll,
            on_hello=self.greeted.append,
            on_stacks=lambda node, text: self.stacks.append((node, text)),
            on_lost=lambda node, rank: self.lost.append((node, rank)),
            on_silent=self.silent.append,
            timeout=15,
        )
        self.is_open = True

    def serve(self, timeout=120):
        ready = self.poll.poll(timeout)
        for fd, _ in ready:
            self.agents.handle(fd)
        return bool(ready)

    def close(self, *, farewell):
        self.is_open = False
        self.agents.close(farewell=farewell)

    @property
    def address(self):
        host, _, port = self.agents.where[0].rpartition(":")
        return host.strip("[]"), int(port)

    def connect(self):
        return socket.create_connection(self.address, timeout=120)

    def challenged(self):
        """A connection, and what it is challenged with."""
        connection = self.connect()
        said = b""
        while not said.endswith(b"\n"):
            self.serve()
            with contextlib.suppress(BlockingIOError):
                said += connection.recv(100, socket.MSG_DONTWAIT)
        word, _, challenge = said.decode().strip().partition(" ")
        assert word == "challenge"
        return connection, challenge

    def hello(self, node, challenge, secret=None, of_node=None):
        """What the agent of a node says; of_node: what that of another one would."""
        shown = proof(secret or self.agents.secret, of_node or node, "agent", challenge, "ab")
        return f"hello {node} ab {shown}\n".encode()

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
    if side.is_open:
        side.close(farewell=True)


@pytest.fixture
def agent(side, until):
    """Start the agent of a node, as the shim does."""

    def start(node=0, where=None, wait=True):
        control = Control(side.id, 5, where=where or side.agents.where, secret=side.agents.secret)
        subprocess.run(
            [sys.executable, "-I", "-S", ezpz_launch._agent.__file__, str(node)],
            env={**os.environ, "EZPZ_CONTROL": control.value()},
            check=True,
            timeout=120,
        )
        if wait:
            until(lambda: side.serve() and node in side.greeted)

    return start


@pytest.fixture
def rank(process):
    def start(**more):
        return process("sleep", "60", env={**os.environ, **more})

    return start


def served(side, until, child):
    """Serve until a process has ended, and return its exit status."""
    until(lambda: (side.is_open and side.serve()) or child.poll() is not None)
    return child.wait(120)


def test_orders_reach_the_ranks(side, agent, rank):
    child = rank()
    agent()
    side.agents.send(0, f"start 0 {child.pid}")
    side.agents.send(0, f"signal {signal.SIGTERM.value}")
    assert child.wait(120) == -signal.SIGTERM
    assert side.agents.is_reached(0)
    assert not side.agents.is_reached(1)
    side.agents.send(1, "kill")  # nobody there: no harm


def test_a_connection_that_ends_without_farewell_kills(side, agent, rank):
    child, marked = rank(), rank(EZPZ_LAUNCH_ID=side.id)
    agent()
    side.agents.send(0, f"start 0 {child.pid}")
    for fd in list(side.agents._connections):
        side.agents._drop(fd)  # as when ezpz-launch is killed
    assert child.wait(120) == -signal.SIGKILL
    assert marked.wait(120) == -signal.SIGKILL


def test_a_connection_that_is_reset_kills(side, agent, rank, until):
    child = rank()
    agent()
    side.agents.send(0, f"start 0 {child.pid}")
    # wait until it has taken that: what it has not read is lost with the connection
    side.agents.send(0, "stacks")
    until(lambda: side.serve() and side.stacks)
    for connection in side.agents._connections.values():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    side.close(farewell=False)
    assert child.wait(120) == -signal.SIGKILL


def test_after_a_farewell_nothing_is_killed(side, agent, rank, process, until):
    child, marked = rank(), rank(EZPZ_LAUNCH_ID=side.id)
    agent()
    side.agents.send(0, f"start 0 {child.pid}")
    (connection,) = side.agents._connections.values()
    duplicate = connection.dup()
    side.close(farewell=True)
    # the agent has gone when its end of the connection has
    with duplicate:
        duplicate.settimeout(20)
        assert duplicate.recv(100) == b""
    assert [child.poll(), marked.poll()] == [None, None]


def test_an_agent_answers_with_stacks(side, agent, process, until, tmp_path):
    script = "import time; print('ready', flush=True); time.sleep(600)"
    command = f'"{sys.executable}" -c "{script}"; exit 7'
    shell = process("sh", "-c", command, stdout=-1, env={**os.environ, "PYTHONFAULTHANDLER": "1"},
                    stderr=-1)  # fmt: skip
    assert shell.stdout.readline() == b"ready\n"
    agent(node=2)
    side.agents.send(2, f"start 5 {shell.pid}")
    side.agents.send(2, "stacks 5")
    until(lambda: side.serve() and side.stacks)
    ((node, text),) = side.stacks
    assert node == 2
    if not text:  # no py-spy here, or it may not look: the rank has said it itself
        assert b"most recent call first" in shell.communicate(timeout=120)[1]
    else:
        assert b"rank 5:" in text


@pytest.mark.parametrize(
    "said",
    [
        b"hello {secret} abc\n",
        b"hello {secret} 0\n",
        b"hello 0 ab {wrong}\n",
        b"hello 0 ab {other}\n",
        b"hello 4 ab {beyond}\n",
        b"hello abc ab {right}\n",
        b"hello \xb2 ab {right}\n",
        b"hello 0 \xff {right}\n",
        b"hello 0 ab\n",
        b"hello 0 ab {right} 0\n",
        b"stacks 3\nabc",
        b"\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"x" * 5000,
        b"\xff" * 5000 + b"\n",
    ],
)
def test_who_does_not_know_the_secret_of_the_node_is_refused(side, until, said):
    connection, challenge = side.challenged()
    secret = side.agents.secret
    words = {
        "secret": secret,
        "right": proof(secret, 0, "agent", challenge, "ab"),
        "wrong": proof("0" * 64, 0, "agent", challenge, "ab"),
        "other": proof(secret, 1, "agent", challenge, "ab"),
        "beyond": proof(secret, 4, "agent", challenge, "ab"),
    }
    for name, word in words.items():
        said = said.replace(b"{%s}" % name.encode(), word.encode())
    with connection:
        connection.sendall(said)
        assert side.is_refused(connection, until)
    assert side.greeted == []
    assert not side.agents.is_reached(0)


def test_what_an_agent_has_said_is_of_no_use_to_another(side, until):
    first, challenge = side.challenged()
    with first:
        said = side.hello(1, challenge)
        first.sendall(said)
        until(lambda: side.serve() and side.greeted)
        second, again = side.challenged()
        with second:
            second.sendall(said)
            assert side.is_refused(second, until)
        # nor does one that knows the secret take the place of the node's own
        third, again = side.challenged()
        with third:
            third.sendall(side.hello(1, again))
            assert side.is_refused(third, until)
        assert first.recv(1000).startswith(b"welcome ")
        side.agents.send(1, "kill")
        assert first.recv(1000) == b"kill\n"
    assert side.greeted == [1]


def test_little_is_kept_of_who_has_not_said_hello(side, until):
    with side.challenged()[0] as connection:
        for _ in range(40):
            connection.sendall(b"x" * 100)
            side.serve()
        assert sum(map(len, side.agents._received.values())) <= 4096
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"x" * 1000)
        assert side.is_refused(connection, until)


def test_hello_and_stacks_in_pieces(side, until):
    connection, challenge = side.challenged()
    with connection:
        for byte in side.hello(3, challenge) + b"stacks 7\nab\ncd\n!":
            connection.sendall(bytes([byte]))
            side.serve()
        until(lambda: side.stacks or (side.serve() and side.stacks))
        expected = proof(side.agents.secret, 3, "launch", "ab", challenge)
        assert connection.recv(1000) == f"welcome {expected}\n".encode()
    assert (side.greeted, side.stacks) == ([3], [(3, b"ab\ncd\n!")])


def test_an_agent_tells_an_impostor_nothing(side, agent, rank, until):
    """Whoever took our port does not know what the agent wants to hear."""
    child = rank()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        agent(where=(f"127.0.0.1:{server.getsockname()[1]}",), wait=False)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(20)
            connection.sendall(b"challenge ab\n")
            said = connection.recv(1000)
            assert said.startswith(b"hello 0 ")
            # its own proof proves nothing of us
            order = f"welcome {said.split()[3].decode()}\nstart 0 {child.pid}\nsignal 9\n"
            connection.sendall(order.encode())
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1000) == b""
    assert child.poll() is None


def test_an_agent_tries_every_address(side, agent):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    agent(where=(f"127.0.0.1:{port}", *side.agents.where))
    assert side.agents.is_reached(0)


def test_the_agent_outlives_signals_and_holds_no_pipe(side, agent, rank):
    read, write = os.pipe()
    child = rank()
    control = Control(side.id, 5, where=side.agents.where, secret=side.agents.secret)
    env = {**os.environ, "EZPZ_CONTROL": control.value()}
    words = [sys.executable, "-I", "-S", ezpz_launch._agent.__file__, "0"]
    null = subprocess.DEVNULL
    subprocess.run(words, env=env, check=True, pass_fds=[write], stdout=null, stderr=null)
    os.close(write)
    assert select.select([read], [], [], 20)[0]
    assert os.read(read, 1) == b""
    os.close(read)
    while 0 not in side.greeted:
        side.serve()
    side.agents.send(0, f"start 0 {child.pid}")
    side.close(farewell=False)
    assert child.wait(120) == -signal.SIGKILL


def test_an_agent_that_is_gone_before_it_is_welcome(side, until):
    connection, challenge = side.challenged()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.sendall(side.hello(0, challenge))
    connection.close()
    for _ in range(10):
        side.serve(20)
    assert not side.agents.is_reached(0)


def test_more_agents_than_files_may_be_open(side, until):
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
    child = subprocess.Popen(words, stdin=-1, stdout=-1)
    try:
        assert child.stdout.readline() == b"connected\n"
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 10, hard))
        for _ in range(40):
            side.serve(1)
        # those that found room are served
        assert side.agents._connections
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        child.kill()
        child.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
@pytest.mark.parametrize("who", ["shim", "launcher"])
def test_an_agent_tells_of_ranks_that_are_lost(side, agent, process, until, who):
    env = {**os.environ, "EZPZ_LAUNCH_ID": side.id, "EZPZ_RANK": "5"}
    script = "sh -c 'sleep 600; true' >&2 & echo $!; wait"
    launcher = process("sh", "-c", script, stdout=-1, env=env)
    shim = int(launcher.stdout.readline())
    well = process("sh", "-c", "sleep 600; true", env={**env, "EZPZ_RANK": "4"})
    agent(node=2)
    side.agents.send(2, f"start 4 {well.pid}")
    side.agents.send(2, f"start 5 {shim}")
    # wait until it has taken that
    side.agents.send(2, "stacks")
    until(lambda: side.serve() and side.stacks)
    assert side.lost == []
    os.kill(shim if who == "shim" else launcher.pid, signal.SIGKILL)
    until(lambda: side.serve() and side.lost)
    assert side.lost == [(2, 5)]
    for _ in range(30):  # it has time to say it again
        side.serve()
    assert side.lost == [(2, 5)]


@pytest.mark.parametrize(
    "said",
    [b"lost", b"lost x", b"lost -1", b"lost 1 2", b"last 1", b"", b"stacks xyz", b"stacks -1",
     b"stacks 999999999999", b"stacks \xb2", b"hello 3 ab cd", b"x" * 5000],
)  # fmt: skip
def test_an_agent_that_says_anything_else_is_dropped(side, until, said):
    connection, challenge = side.challenged()
    with connection:
        connection.sendall(side.hello(3, challenge) + b"lost 6\n" + said + b"\nlost 7\n")
        until(lambda: side.serve() and not side.agents.is_reached(3) and side.lost)
    assert (side.greeted, side.lost) == ([3], [(3, 6)])


def test_who_has_not_said_hello_loses_no_rank(side, until):
    with side.challenged()[0] as connection:
        connection.sendall(b"lost 7\n")
        assert side.is_refused(connection, until)
    assert side.lost == []
