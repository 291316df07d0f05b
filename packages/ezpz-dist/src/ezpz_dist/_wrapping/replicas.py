"""The ranks that hold a copy of the same model: all of them, or those of ezpz_tp's data axis."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from ezpz_dist._collectives.members import Members
from ezpz_dist._collectives.pickled import as_bytes
from ezpz_dist._errors import NotSetUpError, WrapError
from ezpz_dist._world import World, current_world

if TYPE_CHECKING:
    from ezpz_tp import ParallelState


class Replicas(Members):
    """The ranks whose gradients of one model are averaged. All start from the first's model."""

    __slots__ = ()

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this rank's model is the one that the others start from."""
        return self.place == 0

    def send_first(self, data: torch.Tensor, what: str) -> None:
        """Fill a tensor, uint8 [bytes], with what the first rank has in it. Collective."""
        if self.size > 1 and data.numel():
            self.send(data, self.ranks[0], what)

    def name(self, places: Sequence[int]) -> str:
        """Say which ranks, and where they run: ``rank 1 on host-a, rank 5 on host-b``."""
        ranks = [self.ranks[place] for place in places]
        some = ", ".join(f"rank {rank} on {self.world.hosts[rank]}" for rank in ranks[:8])
        return some if len(ranks) <= 8 else f"{some}, and {len(ranks) - 8} more"


def find_replicas(call: str) -> Replicas:
    """Return the ranks over which a model is wrapped, given ezpz_tp's groups where there are some.

    Args:
        call: What is called, for the message.

    Raises:
        NotSetUpError: `setup_torch` was not called.
        WrapError: There is context parallelism, and no group that spans data and context.
    """
    world = current_world(call)
    everyone = dist.group.WORLD
    if world is None or everyone is None:
        raise NotSetUpError(f"{call} before setup_torch(); expected ezpz.setup_torch() first")
    state = parallel_state()
    if state is None:
        return _seen_from(world, everyone, range(world.info.world_size))
    # Ranks that share a sequence hold the same parameters, and each has a part of the gradient.
    axes = ("data", "context") if state.size("context") > 1 else ("data",)
    if not state.has_group(*axes):
        raise WrapError(
            f"{call}: no process group spans data x context ({state.size('data')} x "
            f"{state.size('context')}), over which gradients are averaged; make it with the "
            'others: ezpz_tp.initialize_tensor_parallel(..., also=[("data", "context")])'
        )
    return _seen_from(world, state.group(*axes), tuple(state.ranks(*axes)))


def parallel_state() -> ParallelState | None:
    """Return ezpz_tp's groups if there are any; it is not imported for the question."""
    tp = sys.modules.get("ezpz_tp")
    state: ParallelState | None = None if tp is None else tp.current_state()
    return state if state is not None and state.is_live else None


def attributes_kept(model: nn.Module) -> AbstractContextManager[None]:
    """Keep what ezpz_tp says of parameters while others take their place."""
    tp = sys.modules.get("ezpz_tp")
    return nullcontext() if tp is None else tp.keep_attributes(model)


def start_alike(tensors: Sequence[torch.Tensor], replicas: Replicas) -> None:
    """Move tensors to this rank's device and give all ranks the first one's values.

    Collective over the replicas. Tensors on the meta device have none, and are left.
    """
    device = replicas.world.device
    with torch.no_grad():
        for tensor in tensors:
            if tensor.is_meta:
                continue
            if tensor.device != device:
                tensor.data = tensor.data.to(device)
            # As bytes: backends send few of torch's types, and contiguous memory only.
            sent = as_bytes(tensor)
            replicas.send_first(sent, "the model's start values")
            if sent.data_ptr() != tensor.data_ptr() and not replicas.is_first:
                tensor.copy_(sent.view(tensor.dtype).view(tensor.shape))


def _seen_from(world: World, group: dist.ProcessGroup, ranks: Sequence[int]) -> Replicas:
    return Replicas(world, group, ranks, ranks.index(world.info.rank), world.on_host)
