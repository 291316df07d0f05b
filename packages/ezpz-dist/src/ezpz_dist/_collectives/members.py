"""The ranks of a collective, and how torch carries what they say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ezpz_dist._errors import NotSetUpError
from ezpz_dist._hangs.waiting import finish, waiting
from ezpz_dist._world import World, current_world

REDUCE_OPS: dict[str, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
"""What every backend can do: oneCCL and gloo have no AVG."""

_DIRECT = 1 << 20
"""Bytes, of all ranks, that each sends straight to all others, on the host: one message each,
all at once, takes half the time of gloo's ring (2 and 4 ranks, torch 2.13)."""

_CHUNK = 1 << 24
"""Bytes that a broadcast moves at once: what is staged on a device stays within this."""


@dataclass(frozen=True, slots=True)
class Members:
    """Several ranks that take part in a collective, seen from one of them.

    Attributes:
        world: What set-up decided.
        group: torch's group; None: the world's.
        ranks: Their ranks in the world, by place in the group.
        place: This rank's place in the group.
        where: Where tensors must lie for the group's backend to send them.
        scope: Which group it is, in words: ranks that wait in different ones are told apart.
    """

    world: World
    group: dist.ProcessGroup | None
    ranks: Sequence[int]
    place: int
    where: torch.device
    scope: str = ""

    def gather(self, mine: bytearray, what: str, timeout: float | None = None) -> bytearray:
        """Return every rank's bytes, of equal length, one after the other by place."""
        size = len(self.ranks)
        every = bytearray(len(mine) * size)
        group = self.group or dist.group.WORLD
        assert group is not None  # set-up made it
        got = on_host = torch.frombuffer(every, dtype=torch.uint8)
        what += self.scope
        with waiting(what, self.world, self.ranks):
            if self.where.type == "cpu" and len(every) <= _DIRECT:
                sent = torch.frombuffer(mine * size, dtype=torch.uint8)
                swap = getattr(group, "all_to_all_single", None) or group.alltoall_base
                work = swap(
                    got,
                    sent,
                    [],
                    [],
                    self._within(dist.AllToAllOptions(), timeout),
                )
            else:
                sent = torch.frombuffer(mine, dtype=torch.uint8).to(self.where)
                got = torch.empty_like(on_host, device=self.where)
                # The group's own method, named anew in torch 2.13: dist's function costs a fifth
                # more, and warns of the old name.
                gather = getattr(group, "all_gather_single", None) or group._allgather_base  # noqa: SLF001
                options = dist.distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]  # it is there
                work = gather(got, sent, self._within(options, timeout))
            finish(work, timeout, what, self.world, members=self.ranks, where=self.where)
            if got is not on_host:
                on_host.copy_(got)
        return every

    def _within(self, options: Any, timeout: float | None) -> Any:
        """Give an operation more time than the group's own, where more was asked for.

        Not less: gloo closes the connections of an operation that runs out of its own time.
        """
        if timeout is not None:
            options.timeout = timedelta(seconds=max(timeout, self.world.timeout))
        return options

    def reduce(self, tensor: torch.Tensor, op: str, what: str) -> None:
        """Combine a contiguous tensor at `where` over the ranks, in place."""
        with waiting(what + self.scope, self.world, self.ranks):
            dist.all_reduce(tensor, op=REDUCE_OPS[op], group=self.group)

    def send(self, data: torch.Tensor, root: int, what: str) -> None:
        """Fill a tensor on every rank with what the one of ``root`` holds.

        Args:
            data: uint8 [bytes], anywhere; on each rank of the same length, at least 1. On the
                meta device what comes is dropped.
            root: The sender's rank in the world.
            what: The operation, for whoever asks.
        """
        sends = self.ranks[self.place] == root
        for piece in data.split(_CHUNK):
            staged = (
                piece if piece.device == self.where else torch.empty_like(piece, device=self.where)
            )
            with waiting(what + self.scope, self.world, self.ranks):
                if sends and staged is not piece:
                    staged.copy_(piece)
                dist.broadcast(staged, src=root, group=self.group)
                if not (sends or staged is piece or piece.is_meta):
                    piece.copy_(staged)


_everyone: Members | None = None
"""The world's, made once: most calls are for all ranks."""


def find_members(operation: str, group: dist.ProcessGroup | None) -> Members | None:
    """Return the ranks that take part; None where this process is the only one.

    Args:
        operation: What is called, for messages: ``"barrier()"``.
        group: torch's group of which this rank is a member; None: the world.

    Raises:
        NotSetUpError: There are several ranks, and `setup_torch` was not called.
        TypeError: ``group`` is no process group.
        ValueError: This rank is not a member of ``group``.
    """
    world = current_world(operation)
    if world is None:
        # A group that a script made by itself, without any launcher's variables.
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise NotSetUpError(
                f"{operation} on rank {dist.get_rank()} of {dist.get_world_size()}, in a process "
                "group that setup_torch() did not make; expected ezpz.setup_torch() in place of "
                "init_process_group, on every rank"
            )
        return None
    if group is None:
        size = world.info.world_size
        if size == 1:
            return None
        global _everyone
        everyone = _everyone
        if everyone is None or everyone.world is not world:
            where = world.on_host
            everyone = _everyone = Members(world, None, range(size), world.info.rank, where)
        return everyone
    ranks = _ranks_of(group, operation, world.info.rank)
    if len(ranks) == 1:
        return None
    where = torch.device("cpu") if "gloo" in dist.get_backend(group) else world.device
    scope = f" in group {group.group_name}"
    return Members(world, group, ranks, ranks.index(world.info.rank), where, scope)


def _ranks_of(group: object, operation: str, rank: int) -> list[int]:
    # new_group returns this, and not None, to ranks that are not in the group.
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"{operation} on rank {rank} with a group of which it is no member; expected the call "
            "on the group's members only"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{operation} with group={group!r}; expected a torch.distributed.ProcessGroup, for "
            "example from new_group() or mesh.get_group(), or None for all ranks"
        )
    try:
        return dist.get_process_group_ranks(group)
    except KeyError:
        raise ValueError(
            f"{operation} with a group that torch does not know; expected one made since "
            "setup_torch() and not destroyed"
        ) from None
