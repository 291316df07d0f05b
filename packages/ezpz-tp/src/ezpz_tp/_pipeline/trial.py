"""One microbatch through the pipeline, to learn what every rank will receive and send."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ezpz_tp._errors import DegreeError
from ezpz_tp._training.generators import default_states, set_default_states
from ezpz_tp._training.random import rng_contexts

from .chunk import Chunk, Tensors, facts
from .relay import run_chunks


class Trial:
    """What this rank's chunks took and gave: tensors without contents, on the meta device.

    Collective: every rank of the group makes one at the same time. The model is as it was after
    it: no gradients, the same buffers, the same random streams.

    Attributes:
        device: That of this rank's chunks.
        shapes: What each chunk, by its number, takes and gives.
    """

    def __init__(
        self,
        chunks: Mapping[int, Chunk],
        total: int,
        inputs: Tensors,
        targets: Tensors,
        group: ProcessGroup,
    ) -> None:
        self.device = device_of(chunks)
        self.shapes: dict[int, tuple[Tensors, Tensors]] = {}
        self._inputs = facts(inputs)
        if total - 1 in chunks:
            chunks[total - 1].expect([targets])
        # With gradients, as the steps will be: what is compiled is compiled for them, and which
        # activations need one is a part of what is asked.
        with _without_trace(chunks.values()), torch.enable_grad():
            for number, taken, given in run_chunks(chunks, total, [inputs], group, self.device):
                self.shapes[number] = _metas(taken), _metas(given)

    def check(self, inputs: Tensors) -> None:
        """Compare a later step's microbatch with that of the first.

        Raises:
            DegreeError: It is another shape or dtype, and buffers wait for the first.
        """
        found = facts(inputs)
        if found and self._inputs and found != self._inputs:
            raise DegreeError(
                f"Pipeline: a microbatch's inputs are {' and '.join(found)}; expected those of the "
                f"first step, {' and '.join(self._inputs)}: pad them, or call forget_shapes() on "
                "every rank before"
            )

    @contextmanager
    def agreed(self, chunks: Mapping[int, Chunk]) -> Iterator[None]:
        """Hold chunks to what they gave in the trial for the time of a block."""
        for number, chunk in chunks.items():
            chunk.agreed = facts(self.shapes[number][1])
        try:
            yield
        finally:
            for chunk in chunks.values():
                chunk.agreed = None


def device_of(chunks: Mapping[int, Chunk]) -> torch.device:
    """Return the device that this rank's chunks are on; torch's default one if they say none."""
    for chunk in chunks.values():
        for tensor in itertools.chain(chunk.parameters(), chunk.buffers()):
            return tensor.device
    return torch.get_default_device()


@contextmanager
def _without_trace(chunks: Iterable[Chunk]) -> Iterator[None]:
    """Put back random streams and buffers after the block."""
    states = default_states(None)
    kept = [
        (module, name, buffer, buffer.detach().clone())
        for chunk in chunks
        for module in chunk.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    _, tracked = rng_contexts()
    try:
        with tracked:
            yield
    finally:
        set_default_states(states, None)
        with torch.no_grad():
            for module, name, buffer, before in kept:
                setattr(module, name, buffer)  # forward may have put another in its place
                if not torch.equal(buffer, before):  # an expanded one cannot be written to
                    buffer.copy_(before)


def _metas(tensors: Tensors) -> Tensors:
    return tuple(_meta(one) for one in tensors)


def _meta(tensor: Tensor) -> Tensor:
    like = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=torch.device("meta")
    )
    return like.requires_grad_(tensor.requires_grad)
