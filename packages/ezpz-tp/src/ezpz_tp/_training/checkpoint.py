"""Activation checkpointing that knows the random streams of tensor-parallel regions."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ezpz_tp._errors import ParallelError
from ezpz_tp._groups.default import tensor_group
from ezpz_tp._regions.split import gather_split_1d_tensor, split_tensor_into_1d_equal_chunks

from .checksum import checksum
from .generators import default_states, set_default_states
from .random import RngTracker, rng_contexts

Result = TypeVar("Result")

_checkpointing = ContextVar("_checkpointing", default=False)  # of each thread: ranks may be


def checkpoint_activations(
    function: Callable[..., Result],
    *args: Any,
    distribute_saved_activations: bool = False,
    tp_group: ProcessGroup | None = None,
    tracker: RngTracker | None = None,
) -> Result:
    """Run a function without keeping its activations; backward runs it again.

    torch's non-reentrant checkpointing, with the streams of `RngTracker` restored for the
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

    def noted(*args: Any) -> Result:
        before = _checkpointing.set(True)
        try:
            return function(*args)
        finally:
            _checkpointing.reset(before)

    return checkpoint_activations(
        function if torch.compiler.is_compiling() else noted,
        *args,
        distribute_saved_activations=distribute_saved_activations,
    )


def is_checkpointing() -> bool:
    """Return whether a region of `checkpoint` runs, for the first time or again."""
    return _checkpointing.get()


class CheckpointWithoutOutput:
    """A region whose output is freed, too, and made again before backward needs it: Megatron-LM's.

    For an output that what follows keeps for its backward, such as a norm's before a linear layer.

    Args:
        fp8: Only False or None.
        ckpt_manager: Frees the outputs of several regions together.
        retain_input_tensors: Without effect: what shares memory with an input is never freed.

    >>> region = CheckpointWithoutOutput()
    >>> x = torch.ones(3, requires_grad=True)
    >>> middle = region.checkpoint(torch.exp, x)
    >>> y = middle.square()
    >>> region.discard_output_and_register_recompute(y)
    >>> middle.untyped_storage().size()
    0
    >>> y.sum().backward()
    >>> torch.allclose(x.grad, 2 * (2 * x).exp())
    True
    """

    def __init__(
        self,
        fp8: object = False,
        ckpt_manager: CheckpointWithoutOutputManager | None = None,
        retain_input_tensors: bool = False,
    ) -> None:
        del retain_input_tensors
        if fp8 not in (None, False):
            raise NotImplementedError(
                f"CheckpointWithoutOutput: fp8={fp8!r} is not supported; expected False"
            )
        self.ckpt_manager = ckpt_manager
        self.outputs: tuple[Tensor | None, ...] | None = None
        self._ctx: Any = None
        self._again: tuple[list[Any], tuple[Any, ...]] | None = None

    def checkpoint(self, run_function: Callable[..., Result], *args: Any) -> Result:
        """Run a function of ``args`` without keeping its activations.

        Raises:
            TypeError: It returns something else than a tensor or a tuple of tensors and None.
        """
        if torch.compiler.is_compiling():
            return run_function(*args)
        if torch.is_grad_enabled():
            self._function, self._states = run_function, default_states(None)
            self._recomputation = rng_contexts()[1]
            kinds = {arg.device.type for arg in args if isinstance(arg, Tensor)} - {"meta"}
            self._autocast = [
                (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
                for kind in sorted(kinds)
            ]
            # So that the output requires a gradient also where only parameters do.
            mark = torch.empty(0, requires_grad=True)
            result = _WithoutOutput.apply(self, mark, *args)  # type: ignore[no-untyped-call]
        else:
            result = run_function(*args)
        self.outputs = _as_tuple(result)
        inputs = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        self._own = [
            output is not None and output.untyped_storage().data_ptr() not in inputs
            for output in self.outputs
        ]
        if self.ckpt_manager is not None:
            self.ckpt_manager.add_checkpoint(self)
        return result  # type: ignore[no-any-return]

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Free the output, and make it again once ``hook_tensor`` has its gradient.

        Does nothing with a manager, which does so for all its regions.

        Args:
            hook_tensor: Made of the output, by what keeps the output for its backward.

        Raises:
            ParallelError: It has no gradient, and the output needs one.
        """
        if self.ckpt_manager is None:
            self._discard(hook_tensor)
            if hook_tensor.requires_grad:
                hook_tensor.register_hook(lambda _: self._recompute(self._ctx))

    def _discard(self, hook_tensor: Tensor) -> None:
        if self.outputs is None:
            return
        for output, own in zip(self.outputs, self._own, strict=True):
            if output is not None and output.requires_grad and not hook_tensor.requires_grad:
                raise ParallelError(
                    "CheckpointWithoutOutput: hook_tensor has no gradient, so the output would not "
                    "be made again; expected what was computed from it"
                )
            if output is not None and own:
                output.untyped_storage().resize_(0)

    def _recompute(self, ctx: Any) -> None:
        """Run the function again, and fill the outputs that were freed."""
        if ctx is None or self._again is not None:
            return
        if not torch.autograd._is_checkpoint_valid():  # noqa: SLF001 - nothing public asks
            raise ParallelError(
                "CheckpointWithoutOutput does not work with torch.autograd.grad(), nor with "
                "backward(inputs=...); use backward()"
            )
        inputs = list(ctx.others)
        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            inputs[place] = tensor.detach().requires_grad_(tensor.requires_grad)
        now = default_states(None)
        set_default_states(self._states, None)
        try:
            with contextlib.ExitStack() as stack:
                for kind, dtype, enabled in self._autocast:
                    stack.enter_context(torch.autocast(kind, dtype, enabled))
                stack.enter_context(self._recomputation)
                stack.enter_context(torch.enable_grad())
                outputs = _as_tuple(self._function(*inputs))
        finally:
            set_default_states(now, None)
        for output, again in zip(self.outputs or (), outputs, strict=False):
            if output is not None and output.untyped_storage().size() == 0:
                # Of the storage, so that views see it, and autograd no change in place.
                output.untyped_storage().resize_(again.untyped_storage().size())
                output.untyped_storage().copy_(again.detach().untyped_storage())
        self._again = inputs, outputs
        self.outputs = self._ctx = None  # which would keep each other alive


class CheckpointWithoutOutputManager:
    """Regions whose outputs are freed, and made again, together: each may be the next's input."""

    def __init__(self) -> None:
        self.checkpoints: list[CheckpointWithoutOutput] = []
        self.is_last_layer_in_recompute_block = False  # Megatron-LM's blocks set and read it

    def add_checkpoint(self, ckpt: CheckpointWithoutOutput) -> None:
        """Take a region that has run; one that was made with this manager comes by itself."""
        if not isinstance(ckpt, CheckpointWithoutOutput):
            raise TypeError(f"expected a CheckpointWithoutOutput, found {type(ckpt).__name__}")
        if ckpt.outputs is None:
            raise ValueError("the region has not run yet; call its checkpoint() first")
        self.checkpoints.append(ckpt)

    def discard_all_outputs_and_register_unified_recompute(self, hook_tensor: Tensor) -> None:
        """Free all outputs, and make them again in order once ``hook_tensor`` has its gradient."""
        for ckpt in self.checkpoints:
            ckpt._discard(hook_tensor)  # noqa: SLF001
        if hook_tensor.requires_grad:
            hook_tensor.register_hook(lambda _: self._recompute())

    def _recompute(self) -> None:
        for ckpt in self.checkpoints:
            ckpt._recompute(ckpt._ctx)  # noqa: SLF001


class _WithoutOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: CheckpointWithoutOutput, mark: Tensor, *args: Any) -> Any:
        del mark
        with torch.no_grad():
            result = region._function(*args)  # noqa: SLF001
        if not all(one is None or isinstance(one, Tensor) for one in _as_tuple(result)):
            raise TypeError(
                f"CheckpointWithoutOutput: the function returned {type(result).__name__}; expected "
                "a tensor, or a tuple of tensors and None"
            )
        ctx.region, ctx.others = region, [None if isinstance(a, Tensor) else a for a in args]
        ctx.places = [place for place, arg in enumerate(args) if isinstance(arg, Tensor)]
        ctx.save_for_backward(*(args[place] for place in ctx.places))
        region._ctx = ctx  # noqa: SLF001
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        region = ctx.region
        region._recompute(ctx)  # noqa: SLF001 - where no hook did
        (inputs, outputs), region._again = region._again, None  # noqa: SLF001
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if output is not None and output.requires_grad and grad is not None
        ]
        if pairs:
            torch.autograd.backward([each for each, _ in pairs], [grad for _, grad in pairs])
        return None, None, *(one.grad if isinstance(one, Tensor) else None for one in inputs)


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


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
