"""One chunk of a pipeline's model, as the schedule runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from ezpz_tp._errors import ParallelError

Tensors = tuple[Tensor, ...]
Given = Tensor | Tensors
"""What a chunk takes and returns: a tensor, or a tuple of them."""


class Chunk(nn.Module):
    """A part of the model, from what it receives to what it sends, or to the loss.

    The last chunk returns its share of the mean loss rather than its output: the schedule keeps
    what a chunk returns until the step is over, and of logits that is the most memory there is.

    Args:
        module: The layers.
        number: Its place in the model, from 0.
        total: Number of chunks in the whole pipeline.
        loss: From the last chunk's output and the targets to a 0-dim loss.
        microbatches: What the loss is averaged over.
    """

    def __init__(
        self,
        module: nn.Module,
        number: int,
        total: int,
        loss: Callable[..., object],
        microbatches: int,
    ) -> None:
        super().__init__()
        self.module = module
        self.is_first, self.is_last = number == 0, number == total - 1
        self._name = f"chunk {number} of {total}"
        self._loss = loss
        self._microbatches = microbatches
        self._targets: Iterator[Tensors] = iter(())
        self.losses: list[Tensor] = []
        self.agreed: list[str] | None = None
        """What the next chunk's rank waits for; None where every message tells its shape."""

    def expect(self, targets: Iterable[Tensors]) -> None:
        """Forget the losses, and take the targets of the microbatches that come next, in order."""
        self._targets, self.losses = iter(targets), []

    def forward(self, *inputs: Tensor) -> Tensors:
        """Return what goes to the next chunk; of the last one its part of the loss, ``[1]``."""
        received = inputs
        if not self.is_first:
            received = tuple(entering(one, self.module) for one in inputs)
        output = self.module(*received)
        if not self.is_last:
            outputs = tuple(one.contiguous() for one in self._sendable(output))
            if self.agreed is not None and facts(outputs) != self.agreed:
                raise ParallelError(
                    f"{self._name} returned {' and '.join(facts(outputs))}; expected, as in the "
                    f"first step, {' and '.join(self.agreed)}, for which the next chunk's rank "
                    "waits: call forget_shapes() on every rank before such a change"
                )
            return outputs
        loss = self._loss(output, *next(self._targets))
        if not (isinstance(loss, Tensor) and loss.dim() == 0):
            raise ParallelError(
                f"the pipeline's loss returned {_told(loss)}; expected a 0-dim tensor, the mean "
                "over the microbatch that it is given"
            )
        self.losses.append(loss.detach())
        # Not a view of the loss, because torch's stages detach it in place.
        return (torch.stack([loss / self._microbatches]),)

    def _sendable(self, output: object) -> Tensors:
        outputs = tuple(output) if isinstance(output, tuple | list) else (output,)
        for one in outputs:
            if not isinstance(one, Tensor):
                raise ParallelError(
                    f"{self._name} returned {type(one).__name__}; expected a tensor, or a tuple "
                    "of tensors, for the next chunk's forward"
                )
        return outputs


def entering(received: Tensor, module: nn.Module) -> Tensor:
    """Return what a chunk's module received from the one before: where activations enter a rank."""
    if has_torch_function_unary(received):  # `check` is told
        seen: Tensor = handle_torch_function(entering, (received,), received, module)
        return seen
    return received


def facts(tensors: Tensors) -> list[str]:
    """Return what ranks have to agree on of tensors that they exchange."""
    return [
        f"{tuple(one.shape)} of {one.dtype}{' with a gradient' if one.requires_grad else ''}"
        for one in tensors
    ]


def _told(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__
