"""The ranks of a collective, and how torch carries what they say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

_CHUNK = 1 << 28
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
    """

    world: World
    group: dist.ProcessGroup | None
    ranks: Sequence[int]
    place: int
    where: torch.device

    def gather(self, mine: bytearray, what: str, timeout: float | None = None) -> bytearray:
        """Return every rank's bytes, of equal length, one after the other by place."""
        every = bytearray(len(mine) * len(self.ranks))
        sent = torch.frombuffer(mine, dtype=torch.uint8)
        got = on_host = torch.frombuffer(every, dtype=torch.uint8)
        if self.where.type != "cpu":
            sent, got = sent.to(self.where), torch.empty_like(on_host, device=self.where)
        group = self.group or dist.group.WORLD
        assert group is not None  # set-up made it
        # The group's own method, named anew in torch 2.13: dist's function costs a fifth more,
        # and warns of the old name.
        gather = getattr(group, "all_gather_single", None) or group._allgather_base  # noqa: SLF001
        with waiting(what, self.world, self.ranks):
            work = gather(got, sent)
            finish(work, timeout, what, self.world, members=self.ranks, where=self.where)
            if got is not on_host:
                on_host.copy_(got)
        return every

    def reduce(self, tensor: torch.Tensor, op: str, what: str) -> None:
        """Combine a contiguous tensor at `where` over the ranks, in place."""
        with waiting(what, self.world, self.ranks):
            dist.all_reduce(tensor, op=REDUCE_OPS[op], group=self.group)

    def send(self, data: torch.Tensor, root: int, what: str) -> None:
        """Fill a tensor on every rank with what the one of ``root`` holds.

        Args:
            data: uint8 [bytes], anywhere; on each rank of the same length, at least 1.
            root: The sender's rank in the world.
            what: The operation, for whoever asks.
        """
        for piece in data.split(_CHUNK):
            staged = piece.to(self.where)
            with waiting(what, self.world, self.ranks):
                dist.broadcast(staged, src=root, group=self.group)
                if staged is not piece and self.ranks[self.place] != root:
                    piece.copy_(staged)


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
        return Members(world, None, range(size), world.info.rank, world.on_host)
    ranks = _ranks_of(group, operation, world.info.rank)
    if len(ranks) == 1:
        return None
    where = torch.device("cpu") if "gloo" in dist.get_backend(group) else world.device
    return Members(world, group, ranks, ranks.index(world.info.rank), where)


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
