"""Activation check-pointing that knows the random streams of tensor-parallel regions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ezpz_tp._errors import ParallelError
from ezpz_tp._groups.default import tensor_group
from ezpz_tp._regions.split import gather_split_1d_tensor, split_tensor_into_1d_equal_chunks

from .checksum import checksum
from .random import RngTracker, rng_contexts

Result = TypeVar("Result")


def checkpoint_activations(
    function: Callable[..., Result],
    *args: Any,
    distribute_saved_activations: bool = False,
    tp_group: ProcessGroup | None = None,
    tracker: RngTracker | None = None,
) -> Result:
    """Run a function without keeping its activations; backward runs it again.

    torch's non-reentrant check-pointing, with the streams of `RngTracker` restored for the
    second run, so that dropout repeats itself in and outside tensor-parallel regions.

    Args:
        function: Takes ``args``; what it returns is returned.
        *args: Anything. Tensors among them are kept until backward.
        distribute_saved_activations: Keep of the first argument, a tensor that is equal on the
            tensor-parallel ranks, only this rank's part, and gather it in backward (collective).
            The whole is freed once nobody else holds it. Ignored under torch.compile. Not under
            sequence parallelism, where the activations between layers differ between ranks.
        tp_group: The tensor-parallel group; the default state's if None.
        tracker: Whose streams are restored; those of `get_rng_tracker` if None.

    Raises:
        TypeError: The first argument should be distributed and is not a tensor.
        DegreeError: Its number of elements is not a multiple of the degree.
        ParallelError: In backward: it was not the same, bit for bit, on all ranks. On CUDA an
            assertion of the device, so that nothing waits.
    """
    if torch.compiler.is_compiling():
        # The compiler keeps random numbers itself, and refuses contexts it cannot trace.
        return _run(function, *args, use_reentrant=False)
    contexts = functools.partial(rng_contexts, tracker)
    group = tensor_group(tp_group) if distribute_saved_activations else None
    if group is None or not torch.is_grad_enabled():
        return _run(function, *args, use_reentrant=False, context_fn=contexts)
    if not args or not isinstance(args[0], Tensor):
        found = type(args[0]).__name__ if args else "nothing"
        raise TypeError(
            f"distribute_saved_activations: the first argument is {found}; expected the tensor "
            "to share out over the tensor-parallel ranks"
        )
    part = split_tensor_into_1d_equal_chunks(args[0].detach(), new_buffer=True, tp_group=group)
    region = _Region(function, args[0], group)
    result: Result = _run(region, part, *args[1:], use_reentrant=False, context_fn=contexts)
    return result


def checkpoint(
    function: Callable[..., Result], distribute_saved_activations: bool, *args: Any
) -> Result:
    """Run `checkpoint_activations` with Megatron-LM's signature."""
    return checkpoint_activations(
        function, *args, distribute_saved_activations=distribute_saved_activations
    )


class _Region:
    """Runs a function on the whole tensor the first time, and on the gathered parts after.

    The first run's graph leads to the whole tensor's own history; a recomputation is only there
    for the values, so that what it starts from needs no history.
    """

    def __init__(self, function: Callable[..., Result], whole: Tensor, group: ProcessGroup) -> None:
        self._function = function
        self._group = group
        self._shape, self._requires_grad = whole.shape, whole.requires_grad
        self._checksum = checksum(whole)
        self._whole: Tensor | None = whole

    def __call__(self, part: Tensor, *args: Any) -> Any:
        whole, self._whole = self._whole, None
        if whole is None:
            whole = gather_split_1d_tensor(part, self._group).view(self._shape)
            self._check(whole)
            whole.requires_grad_(self._requires_grad)
        return self._function(whole, *args)

    def _check(self, gathered: Tensor) -> None:
        """Refuse parts of different tensors, whose gradients would be silently wrong."""
        same = checksum(gathered) == self._checksum
        message = (
            f"distribute_saved_activations: the first argument {list(self._shape)} differs "
            "between tensor-parallel ranks, as under sequence parallelism; expected the same on "
            "all: leave distribute_saved_activations off"
        )
        if same.is_cuda:
            torch._assert_async(same, message)  # noqa: SLF001 - nothing public asks without waiting
        elif not same:
            raise ParallelError(message)


def _run(function: Callable[..., Result], *args: Any, **options: Any) -> Result:
    result: Result = torch_checkpoint(function, *args, **options)
    return result
