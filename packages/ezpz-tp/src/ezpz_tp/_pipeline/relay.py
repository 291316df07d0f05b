"""Tensors handed from rank to rank along a pipeline, each with its shape.

torch's stages want to know every shape before the first step, or send them as pickled objects,
which needs numpy. Here a few integers go before the tensors. The methods of the process group
are called directly, so that any group will do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from ezpz_tp._errors import ParallelError

from .chunk import Chunk, Tensors

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_HEADER = 64


def run_chunks(
    chunks: Mapping[int, Chunk],
    total: int,
    batches: Sequence[Tensors],
    group: ProcessGroup,
    device: torch.device,
) -> Iterator[tuple[int, Tensors, Tensors]]:
    """Run this rank's chunks forward, microbatch by microbatch; yield what each took and gave.

    Collective: every rank of the group, with as many microbatches.

    Args:
        chunks: By their number in the model, in order: chunk c is on rank ``c % ranks``.
        total: Number of chunks of the model.
        batches: The microbatches, for the first chunk; only their number counts elsewhere.
        group: The pipeline's.
        device: Where this rank's chunks are.
    """
    before, after = (group.rank() - 1) % group.size(), (group.rank() + 1) % group.size()
    sent: list[tuple[Work, Tensor]] = []
    for batch in batches:
        for number, chunk in chunks.items():
            taken = batch if number == 0 else receive(group, before, device)
            given = chunk(*taken)
            if number < total - 1:
                sent += send(given, group, after, device)
            yield number, taken, given
    for work, _ in sent:
        work.wait()


def send(
    tensors: Tensors, group: ProcessGroup, peer: int, device: torch.device
) -> list[tuple[Work, Tensor]]:
    """Start to send tensors to a rank of the group; they are to be kept until all is done.

    Raises:
        ParallelError: Their shapes do not fit into the header, or a dtype is none that is sent.
    """
    numbers = [len(tensors)]
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            raise ParallelError(
                f"a pipeline's chunk returned a tensor of {tensor.dtype}; expected one of "
                f"{', '.join(map(str, _DTYPES))}: convert it before the chunk returns it"
            )
        kind = _DTYPES.index(tensor.dtype)
        numbers += [kind, tensor.requires_grad, tensor.dim(), *tensor.shape]
    if len(numbers) > _HEADER:
        raise ParallelError(
            f"a pipeline's chunk returned {len(tensors)} tensors, whose shapes are {len(numbers)} "
            f"numbers; expected at most {_HEADER}: join some of them"
        )
    header = torch.tensor(numbers + [0] * (_HEADER - len(numbers)), device=device)
    contents = [tensor.detach().contiguous() for tensor in tensors]
    return [(group.send([one], peer, 0), one) for one in (header, *contents)]


def receive(group: ProcessGroup, peer: int, device: torch.device) -> Tensors:
    """Return the tensors that a rank of the group sends, requiring gradients as there."""
    header = torch.zeros(_HEADER, dtype=torch.int64, device=device)
    group.recv([header], peer, 0).wait()
    numbers = iter(header.tolist())
    tensors = []
    for _ in range(next(numbers)):
        kind, requires_grad, dims = itertools.islice(numbers, 3)
        shape = list(itertools.islice(numbers, dims))
        tensor = torch.empty(shape, dtype=_DTYPES[kind], device=device)
        group.recv([tensor], peer, 0).wait()
        tensors.append(tensor.requires_grad_(bool(requires_grad)))
    return tuple(tensors)
