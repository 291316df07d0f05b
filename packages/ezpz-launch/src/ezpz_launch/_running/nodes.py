"""The ranks of a launch, wherever they are: on this host directly, elsewhere through agents."""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from .guardian import Guardian
from .node import stacks
from .node_ranks import LOOK, NodeRanks

if TYPE_CHECKING:
    from .agents import Agents


class Nodes(Protocol):
    """What the run loop can do to ranks.

    Attributes:
        why_not: Why there can be no agents; empty where there can.
    """

    why_not: str

    def where(self) -> tuple[str, ...]:
        """Return the addresses that agents connect to; none where there are no agents."""

    def secret(self) -> str:
        """Return what agents know; empty where there are none."""

    def watch(self, launcher: int, scratch: str) -> None:
        """See to it that nothing outlives us, if we are killed; not a scratch file either."""

    def handle(self, fd: int) -> None:
        """Serve a socket that is ready."""

    def start(self, rank: int, pid: int) -> None:
        """Take note of a rank that has started."""

    def end(self, rank: int) -> None:
        """Take note of a rank that has ended."""

    def signal(self, number: int) -> None:
        """Signal every rank that runs, and those that are still to be reached when they are."""

    def release(self, rank: int, pid: int) -> None:
        """Let the shim of a rank that failed go."""

    def kill(self) -> None:
        """SIGKILL all that is left of the launch."""

    def stacks(self, ranks: Sequence[int]) -> None:
        """Ask these ranks where they are; `on_stacks` is called with what each node answers."""

    def end_left(self) -> None:
        """End what ranks that have all ended left running; `on_stacks` is called with its names."""

    def end_all_left(self) -> None:
        """The same at the end of the launch; see to it that they do end."""

    def next_look(self) -> float:
        """Return after how many seconds to ask again."""

    def lost(self) -> list[int]:
        """Return the ranks, once each, whose end nobody would report: what started them is gone."""

    def silent(self) -> list[int]:
        """Return the nodes, once each, that do not answer any more."""

    def unreached(self, ranks: Sequence[int]) -> list[int]:
        """Return those of these ranks that nothing reaches."""

    def close(self, *, farewell: bool) -> None:
        """End it; without farewell all that is left is killed."""


OnStacks = Callable[[bytes], None]


class ThisHost:
    """Ranks of this host alone.

    Args:
        launch_id: What every process of the launch has in its environment.
        on_stacks: Called, from another thread, with the ranks' stacks.
    """

    def __init__(self, launch_id: str, on_stacks: OnStacks) -> None:
        self._launch_id = launch_id
        self._ranks = NodeRanks(launch_id)
        self._on_stacks = on_stacks
        self._guardian: Guardian | None = None
        self.why_not = ""

    def where(self) -> tuple[str, ...]:  # as all below: see Nodes
        return ()

    def secret(self) -> str:
        return ""

    def watch(self, launcher: int, scratch: str) -> None:
        self._guardian = Guardian(self._launch_id, launcher, scratch)

    def handle(self, fd: int) -> None:
        raise AssertionError(fd)

    def start(self, rank: int, pid: int) -> None:
        self._ranks.started(rank, pid)
        self._tell(f"start {rank} {pid}")

    def end(self, rank: int) -> None:
        self._ranks.ended(rank)
        self._tell(f"end {rank}")

    def signal(self, number: int) -> None:
        self._ranks.signal(number)

    def release(self, rank: int, pid: int) -> None:  # noqa: ARG002
        self._ranks.release(pid)

    def kill(self) -> None:
        self._ranks.kill()

    def stacks(self, ranks: Sequence[int]) -> None:
        import threading  # noqa: PLC0415

        def ask() -> None:
            self._on_stacks(stacks(self._ranks, list(ranks)))

        # py-spy may take its time; signals are heard meanwhile.
        threading.Thread(target=ask, daemon=True).start()

    def end_left(self) -> None:
        self._on_stacks(self._ranks.name_left().encode())
        self._ranks.end_left()

    def end_all_left(self) -> None:
        self._on_stacks(self._ranks.end_all_left().encode())

    def next_look(self) -> float:
        return self._ranks.next_look()

    def lost(self) -> list[int]:
        return self._ranks.lost()

    def silent(self) -> list[int]:
        return []

    def unreached(self, ranks: Sequence[int]) -> list[int]:  # noqa: ARG002
        return []

    def close(self, *, farewell: bool) -> None:
        if not farewell:
            self._ranks.kill()
        if self._guardian is not None:
            self._guardian.dismiss()

    def _tell(self, order: str) -> None:
        if self._guardian is not None:
            self._guardian.tell(order)


class OtherHosts:
    """Ranks of several hosts, or of one that is not this one.

    Args:
        hosts: The hosts, in the order of their nodes.
        ppn: Ranks of a full host.
        launch_id: What every process of the launch has in its environment.
        poll: Where the agents' sockets are registered.
        on_stacks: Called with what a node's agent answers.
        timeout: Seconds after which a node that does not answer is lost.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        ppn: int,
        launch_id: str,
        poll: select.poll,
        on_stacks: OnStacks,
        *,
        timeout: int,
    ) -> None:
        self._hosts, self._ppn, self._launch_id = hosts, ppn, launch_id
        self._pids: dict[int, dict[int, int]] = {}
        self._signals: list[int] = []
        self._delivered: dict[int, int] = {}
        self._lost: list[int] = []
        self._silent: list[int] = []
        self._guardian: Guardian | None = None
        self._agents: Agents | None = None
        self.why_not = ""
        from .agents import Agents  # noqa: PLC0415  # socket: 6 ms

        try:
            self._agents = Agents(
                hosts,
                poll,
                on_hello=self._greet,
                on_stacks=lambda _, text: on_stacks(text),
                on_lost=self._lose,
                on_silent=self._silent.append,
                timeout=timeout,
            )
        except OSError as error:
            self.why_not = f"no address of ours that {hosts[0]} could reach ({error})"

    def where(self) -> tuple[str, ...]:  # as all below: see Nodes
        return self._agents.where if self._agents else ()

    def secret(self) -> str:
        return self._agents.secret if self._agents else ""

    def watch(self, launcher: int, scratch: str) -> None:
        self._guardian = Guardian(self._launch_id, launcher, scratch)

    def handle(self, fd: int) -> None:
        if self._agents:
            self._agents.handle(fd)

    def start(self, rank: int, pid: int) -> None:
        self._pids.setdefault(rank // self._ppn, {})[rank] = pid
        self._send(rank, f"start {rank} {pid}")

    def end(self, rank: int) -> None:
        self._pids.get(rank // self._ppn, {}).pop(rank, None)
        self._send(rank, f"end {rank}")

    def signal(self, number: int) -> None:
        self._signals.append(number)
        for node in range(len(self._hosts)):
            self._deliver(node)

    def release(self, rank: int, pid: int) -> None:
        self._send(rank, f"release {pid}")

    def kill(self) -> None:
        self._to_all("kill")

    def stacks(self, ranks: Sequence[int]) -> None:
        nodes: dict[int, list[str]] = {}
        for rank in ranks:
            nodes.setdefault(rank // self._ppn, []).append(str(rank))
        for node, its in nodes.items():
            if self._agents:
                self._agents.send(node, f"stacks {' '.join(its)}")

    def end_left(self) -> None:
        self._to_all("left")  # it is named before the launcher can end
        self._to_all("end-left")

    def end_all_left(self) -> None:
        # Nobody waits for thousands of nodes.
        self._to_all("end-all-left")

    def next_look(self) -> float:
        return LOOK

    def lost(self) -> list[int]:
        lost = list(self._lost)
        self._lost.clear()
        return lost

    def silent(self) -> list[int]:
        silent = list(self._silent)
        self._silent.clear()
        return silent

    def unreached(self, ranks: Sequence[int]) -> list[int]:
        agents = self._agents
        return [r for r in ranks if agents is None or not agents.is_reached(r // self._ppn)]

    def close(self, *, farewell: bool) -> None:
        if self._agents:
            self._agents.close(farewell=farewell)
        if self._guardian is not None:
            self._guardian.dismiss()

    def _to_all(self, order: str) -> None:
        for node in range(len(self._hosts)):
            if self._agents:
                self._agents.send(node, order)

    def _send(self, rank: int, order: str) -> None:
        if self._agents:
            self._agents.send(rank // self._ppn, order)

    def _lose(self, node: int, rank: int) -> None:
        # An agent speaks for the ranks of its node.
        if rank // self._ppn == node:
            self._lost.append(rank)

    def _greet(self, node: int) -> None:
        """Tell an agent that has just connected what it has missed."""
        assert self._agents
        for rank, pid in self._pids.get(node, {}).items():
            self._agents.send(node, f"start {rank} {pid}")
        self._deliver(node)

    def _deliver(self, node: int) -> None:
        if self._agents and self._agents.is_reached(node):
            for number in self._signals[self._delivered.get(node, 0) :]:
                self._agents.send(node, f"signal {number}")
            self._delivered[node] = len(self._signals)
