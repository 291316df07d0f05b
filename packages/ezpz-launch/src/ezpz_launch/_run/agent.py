"""Program: a node's agent, which signals, ends and inspects its ranks as ezpz-launch orders.

usage: python -I -S agent.py NODE         serve ezpz-launch, which runs on another host
       python -I -S agent.py --end ID     kill what a launch left on this host

On ezpz-launch's own host the agent is a child of it (`start_local_agent`), and ends everything if
ezpz-launch is killed. On other hosts the first rank of the node starts this program.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

if __name__ == "__main__":  # without site packages: the folder of this package is enough
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from ezpz_launch._run.channel import (
    MAX_MESSAGE_BYTES,
    Decoder,
    Message,
    ProtocolError,
    encode,
    is_signed,
    keep_alive,
    new_challenge,
    sign,
)
from ezpz_launch._run.node_ranks import NodeRanks
from ezpz_launch._run.processes import (
    is_running,
    kill_launcher_processes,
    parent_of,
    send,
    wait_until_gone,
)
from ezpz_launch._run.stacks import read_stacks

CONNECT_SECONDS = 5.0
"""For one attempt to connect to ezpz-launch."""

CONNECT_DELAY = 0.2
"""Before an agent connects: a launch of `true` has ended by then, and needs no agent."""

LAUNCHER_SECONDS = 1.0
"""That a launcher has to end its ranks by itself after SIGTERM, as srun does."""


class Agent:
    """Serves one connection to ezpz-launch."""

    def __init__(self, connection: socket.socket, ranks: NodeRanks) -> None:
        self._connection = connection
        self._ranks = ranks
        self._decoder = Decoder(MAX_MESSAGE_BYTES)
        self._messages = self._read_messages()
        self._send_lock = threading.Lock()
        self.launcher = 0  # the process that starts the ranks, if it is on this host; 0 if unknown

    def authenticate(self, secret: str, node: int) -> bool:
        """Answer ezpz-launch's challenge; True if it knows the secret as well."""
        challenge = str(next(self._messages, {}).get("challenge"))
        own = new_challenge()
        signature = sign(secret, node, "agent", challenge, own)
        self._send({"type": "hello", "node": node, "challenge": own, "signature": signature})
        welcome = next(self._messages, {})
        return is_signed(welcome.get("signature"), secret, node, "launch", own, challenge)

    def serve(self) -> bool:
        """Obey until the connection ends; True if ezpz-launch said farewell."""
        try:
            for message in self._messages:
                if message["type"] == "farewell":
                    return True
                self._obey(message)
        except (OSError, ProtocolError, KeyError, TypeError, ValueError):
            pass  # reset, or no orders of ezpz-launch: the same as a connection that is closed
        self._ranks.kill_ranks()
        return False

    def _obey(self, message: Message) -> None:
        match message["type"]:
            case "launcher":
                self.launcher = message["pid"]
            case "start":
                self._ranks.start(message["rank"], message["pid"])
            case "end":
                self._ranks.end(message["rank"])
            case "signal":
                self._ranks.signal(message["number"])
            case "release":
                self._ranks.release_failed_rank(message["pid"])
            case "kill":
                self._ranks.kill_ranks()
            case "end_leftover_processes":
                self._ranks.end_leftover_processes(
                    lambda names: self._send_text("leftovers", names)
                )
            case "stacks":
                # py-spy may take its time; signals are obeyed meanwhile.
                thread = threading.Thread(
                    target=self._send_stacks, args=(message["ranks"],), daemon=True
                )
                thread.start()

    def _send_stacks(self, ranks: list[int]) -> None:
        pids = {}
        for rank in ranks:
            pid = self._ranks.process_of(rank)
            if pid is not None:
                pids[rank] = pid
        self._send_text("stacks", read_stacks(pids))

    def _send_text(self, kind: str, text: str) -> None:
        self._send({"type": kind, "text": text})

    def _send(self, message: Message) -> None:
        with self._send_lock:
            try:
                self._connection.sendall(encode(message))
            except OSError:
                return  # reading shows that the connection has ended

    def _read_messages(self) -> Iterator[Message]:
        """Yield the messages that arrive; between them, report ranks that are gone."""
        while True:
            message = self._decoder.next_message()
            if message is not None:
                yield message
                continue
            if self._is_readable():
                data = self._connection.recv(1 << 16)
                if not data:
                    return
                self._decoder.feed(data)
                continue
            self._ranks.signal_again()
            missing = self._ranks.find_missing()
            for rank in missing.lost:
                self._send({"type": "lost", "rank": rank})
            for rank in missing.gone:
                self._send({"type": "gone", "rank": rank})

    def _is_readable(self) -> bool:
        """Wait for the connection; False if it is time to look for ranks that are gone."""
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        for fd in self._ranks.exit_fds:
            poller.register(fd, select.POLLIN)
        seconds = self._ranks.seconds_to_look()
        ready = poller.poll(None if seconds is None else 1000 * seconds)
        return self._connection.fileno() in [fd for fd, _ in ready]


def start_local_agent(launch_id: str, scratch: str) -> tuple[int, socket.socket]:
    """Fork this host's agent; return its process id and our connection to it.

    It comes before the launcher, so that there is no moment in which nobody would end that. If
    ezpz-launch is killed, it ends the launcher and removes the scratch file or folder.
    """
    ours, its = socket.socketpair()
    pid = os.fork()
    if pid:
        its.close()
        return pid, ours
    try:
        os.dup2(its.fileno(), 3)
        _daemonize(4)
        agent = Agent(socket.socket(fileno=3), NodeRanks(launch_id))
        has_farewell = agent.serve()
        if not has_farewell:
            if agent.launcher:
                send(-agent.launcher, signal.SIGTERM)
                wait_until_gone(lambda: is_running(agent.launcher), LAUNCHER_SECONDS)
            kill_launcher_processes(agent.launcher, launch_id)
            if scratch:
                subprocess.run(["rm", "-rf", scratch], check=False)
    finally:
        os._exit(0)


def _daemonize(first: int) -> None:
    """Start a new session, ignore signals, and close descriptors from ``first`` on."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2"):
        signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_IGN)
    # The launcher's own pipes and sockets among them: their readers would wait for our end.
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def main() -> int:
    """Do what the usage above says; return the exit status."""
    if sys.argv[1] == "--end":
        NodeRanks(sys.argv[2]).kill_ranks()
        return 0
    return _serve_node(int(sys.argv[1]))


def _serve_node(node: int) -> int:
    # The parent of the rank that started us is the parent of this node's other ranks, too.
    launcher = parent_of(os.getppid())
    if launcher == 1:
        launcher = 0  # it is gone already, and init never ends
    if os.fork():
        # Not a child of the rank: nobody may take it for its command.
        os._exit(0)
    _daemonize(3)
    settings = _read_settings()
    launch_id = settings["launch_id"]
    time.sleep(CONNECT_DELAY)
    ranks = NodeRanks(launch_id, launcher)
    # ezpz-launch has to see first that we are lost: the end of our ranks is not their failure.
    connection = connect(settings["addresses"].split(), 2 * int(settings["node_timeout"]))
    if connection is None:
        # The launch is over, or its host cannot be reached; ezpz-launch says so if it matters.
        while launcher and is_running(launcher):
            time.sleep(1)
        if launcher:
            ranks.end_leftover_processes(lambda _: None)
        return 0
    agent = Agent(connection, ranks)
    try:
        if not agent.authenticate(settings["secret"], node):
            return 1
    except (OSError, ProtocolError):
        ranks.kill_ranks()
        return 1
    return 0 if agent.serve() else 1


def _read_settings() -> dict[str, str]:
    lines = os.environ["EZPZ_CONTROL"].split("\n")
    return dict(line.split("=", 1) for line in lines)


def connect(addresses: list[str], timeout: int) -> socket.socket | None:
    """Connect to the first of these addresses (host:port) that accepts; None if none does."""
    # Of thousands of agents that connect at once some find no room, and try again.
    for attempt, address in enumerate(addresses * 3):
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS)
        except ConnectionRefusedError:
            continue  # the launch is over
        except OSError:
            time.sleep(attempt + int.from_bytes(os.urandom(1), "little") / 256)
            continue
        connection.settimeout(None)
        keep_alive(connection, timeout)
        return connection
    return None


if __name__ == "__main__":
    sys.exit(main())
