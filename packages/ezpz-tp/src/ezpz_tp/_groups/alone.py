"""The group of one rank: what an axis of degree 1 has, where every collective is a copy.

It exists so that a getter never returns None, which torch.distributed takes for the whole
world, and so that nothing is made: no store is asked and no communicator opened.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d
from torch.futures import Future

from ezpz_tp._errors import ParallelError

# Its names are private and untyped.
c10d: Any = distributed_c10d
_core: Any = _distributed_c10d
_numbers = itertools.count()


_Group: Any = dist.ProcessGroup  # whose overloads say more than a group of one needs


class Alone(_Group):  # type: ignore[misc]
    """A process group of this rank and no other, on any device.

    Its methods are those that torch.distributed's functions, functional collectives and
    DistributedDataParallel call on a group, so any of these may be given it. They take the
    options that a group takes, and need none.

    Args:
        rank: This rank's number in the world.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(0, 1)
        self._name = f"ezpz_tp.alone.{next(_numbers)}"
        self._listed = _list(self, rank)

    def forget(self) -> None:
        """Leave the tables of torch.distributed."""
        if self._listed:
            _unlist(self)
        self._listed = False

    @property
    def group_name(self) -> str:
        """Return the name that functional collectives look it up by."""
        return self._name

    @property
    def group_desc(self) -> str:
        """Return what it is for."""
        return "one rank alone"

    def getGroupName(self) -> str:  # noqa: N802 - torch's
        """Return the same to C++."""
        return self._name

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        """Return the name that error messages show."""
        return "alone"

    _get_backend_name = getBackendName

    def shutdown(self) -> None:
        """Do nothing: nothing is open."""

    abort = shutdown

    def allreduce(self, tensors: Tensor | Sequence[Tensor], *_: object, **__: object) -> dist.Work:
        """Leave the tensors as they are: a sum of one."""
        return _done([tensors] if isinstance(tensors, Tensor) else list(tensors))

    allreduce_coalesced = allreduce
    broadcast = allreduce
    reduce = allreduce

    def barrier(self, *_: object, **__: object) -> dist.Work:
        """Wait for no one."""
        return _done([])

    monitored_barrier = barrier

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], *_: object
    ) -> dist.Work:
        """Copy each input into the one output there is for it."""
        return _copy([each[0] for each in outputs], inputs)

    gather = allgather

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], *_: object
    ) -> dist.Work:
        """Copy the inputs into this rank's list of outputs."""
        return _copy(outputs[0], inputs)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], *_: object
    ) -> dist.Work:
        """Copy each input into its output."""
        return _copy(outputs, [each[0] for each in inputs])

    scatter = reduce_scatter

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *_: object
    ) -> dist.Work:
        """Copy each input into its output."""
        return _copy(outputs, inputs)

    # The newer names are those of torch 2.13; 2.6 knows the older ones only.
    allgather_into_tensor_coalesced = all_gather_single_coalesced = alltoall
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = alltoall

    def all_to_all_single(self, output: Tensor, input_: Tensor, *_: object) -> dist.Work:
        """Copy the input into the output."""
        return _copy([output], [input_])

    alltoall_base = all_to_all_single
    _allgather_base = all_gather_single = all_to_all_single
    _reduce_scatter_base = reduce_scatter_single = all_to_all_single

    def send(self, *_: object) -> dist.Work:
        """Refuse: there is no one to send to.

        Raises:
            ParallelError: Always.
        """
        raise ParallelError("send or receive in a group of this rank alone; there is no peer")

    recv = recv_anysource = send


def _copy(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> dist.Work:
    done = list(outputs)
    for output, input_ in zip(done, inputs, strict=True):
        output.copy_(input_.reshape(output.shape))
    return _done(done)


def _done(tensors: list[Tensor]) -> dist.Work:
    """Return work that has ended, with the tensors that DistributedDataParallel asks it for."""
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    future: Future[list[Tensor]] = Future(devices=list(devices))
    future.set_result(tensors)
    work: dist.Work = _core._create_work_from_future(future)  # noqa: SLF001
    return work


def _list(group: Alone, rank: int) -> bool:
    """Enter a group into the tables where torch.distributed's functions look groups up.

    ``dist.get_rank(group)``, ``dist.get_backend(group)``, ``dist.broadcast(src=...)`` and
    functional collectives (by name) do. Not into the table of names: the number of its
    entries is part of the names of groups that others make.
    """
    if not dist.is_available() or not dist.is_initialized():
        return False
    c10d._world.pg_group_ranks[group] = {rank: 0}  # noqa: SLF001
    c10d._world.pg_map[group] = ("alone", None)  # noqa: SLF001
    c10d._world.pg_backend_config[group] = dist.get_backend_config()  # noqa: SLF001
    _core._register_process_group(group.group_name, group)  # noqa: SLF001
    return True


def _unlist(group: Alone) -> None:
    if c10d._world.pg_group_ranks.pop(group, None) is not None:  # noqa: SLF001 - else cleared
        c10d._world.pg_map.pop(group, None)  # noqa: SLF001
        c10d._world.pg_backend_config.pop(group, None)  # noqa: SLF001
        _core._unregister_process_group(group.group_name)  # noqa: SLF001
