# ruff: noqa: SLF001 - a region's own parts; and nothing public asks torch
"""Megatron-LM's random streams and checkpointing: its names over `ezpz_tp`'s.

"cuda" stays in the names; the CPU and other accelerators are tracked as well. Streams that can
be captured in a CUDA graph, Transformer Engine's and those that do nothing at inference are
not there: asking for one is an error.

Source: NVIDIA/Megatron-LM megatron/core/tensor_parallel/random.py, 2026-08-22.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ezpz_tp._errors import ParallelError
from ezpz_tp._random import (
    DATA_PARALLEL_RNG,
    EXPERT_PARALLEL_RNG,
    RngTracker,
    checkpoint,
    default_states,
    get_rng_tracker,
    is_checkpointing,
    rng_contexts,
    seed_as_megatron,
    set_default_states,
)

from .layers import refuse

__all__ = [
    "CheckpointWithoutOutput", "CheckpointWithoutOutputManager", "CudaRNGStatesTracker",
    "checkpoint", "convert_cuda_rng_state", "get_all_rng_states", "get_cuda_rng_tracker",
    "get_data_parallel_rng_tracker_name", "get_expert_parallel_rng_tracker_name",
    "get_gtp_remat_rng_tracker_name", "is_checkpointing", "is_graph_safe_cuda_rng_tracker",
    "model_parallel_cuda_manual_seed",
]  # fmt: skip


class CudaRNGStatesTracker(RngTracker):
    """`ezpz_tp.RngTracker` with Megatron-LM's constructor. The arguments are only False."""

    def __init__(
        self, use_cudagraphable_rng: bool = False, is_inference_rng_tracker: bool = False
    ) -> None:
        refuse("CudaRNGStatesTracker", "use_cudagraphable_rng", use_cudagraphable_rng, False)
        refuse("CudaRNGStatesTracker", "is_inference_rng_tracker", is_inference_rng_tracker, False)
        super().__init__()


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
) -> RngTracker:
    """See `ezpz_tp.get_rng_tracker`. The arguments are only False."""
    flags = use_te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng
    _refuse("get_cuda_rng_tracker", *flags)
    return get_rng_tracker()


def get_all_rng_states() -> dict[str, Tensor]:
    """Return the state of every stream of the default tracker."""
    return get_rng_tracker().get_states()


def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
    gtp_remat_rank: int | None = None,
    egtp_remat_rank: int | None = None,
    force_reset_rng: bool = False,
    gtp_remat_world_size: int | None = None,
    egtp_remat_world_size: int | None = None,
) -> None:
    """See `ezpz_tp.seed_model_parallel`; with an accelerator the CPU's stream is left alone.

    ``tp_rank``, ``ep_rank`` and ``etp_rank`` stand for this rank's place in its tensor-parallel,
    expert-parallel and expert tensor-parallel group. The streams are always replaced.
    """
    del force_reset_rng
    name = "model_parallel_cuda_manual_seed"
    _refuse(name, te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng)
    refuse(name, "gtp_remat_rank", gtp_remat_rank, None, 0)
    refuse(name, "egtp_remat_rank", egtp_remat_rank, None, 0)
    refuse(name, "gtp_remat_world_size", gtp_remat_world_size, None, 1)
    refuse(name, "egtp_remat_world_size", egtp_remat_world_size, None, 1)
    seed_as_megatron(seed, tensor_rank=tp_rank, expert_rank=ep_rank, expert_tensor_rank=etp_rank)


def get_expert_parallel_rng_tracker_name() -> str:
    """Return the name of the stream for experts."""
    return EXPERT_PARALLEL_RNG


def get_data_parallel_rng_tracker_name() -> str:
    """Return the name of the stream that starts as the default one."""
    return DATA_PARALLEL_RNG


def get_gtp_remat_rng_tracker_name(is_expert: bool = False) -> str:
    """Return the name of a stream for weights that are sharded once more; there is none here."""
    if is_expert:
        return "egtp-remat-rng"
    return "gtp-remat-rng"


def convert_cuda_rng_state(
    state: Tensor | torch.Generator, to_graphable: bool = False
) -> Tensor | torch.Generator:
    """Return a generator's state as a tensor; a tensor as it is.

    Args:
        state: A state, or the generator that has it.
        to_graphable: Only False, unless ``state`` is a generator already.
    """
    if isinstance(state, torch.Generator):
        if to_graphable:
            return state
        return state.get_state()
    refuse("convert_cuda_rng_state", "to_graphable", to_graphable, False)
    return state


def is_graph_safe_cuda_rng_tracker(cuda_rng_tracker: object) -> bool:
    """Return whether a tracker's streams can be captured in a CUDA graph."""
    return bool(getattr(cuda_rng_tracker, "use_cudagraphable_rng", False))


def _refuse(name: str, te: bool, inference: bool, graphs: bool) -> None:
    refuse(name, "Transformer Engine's tracker", te, False)
    refuse(name, "inference_rng_tracker", inference, False)
    refuse(name, "use_cudagraphable_rng", graphs, False)


# Regions whose output is freed, too, and made again before backward needs it.

Result = TypeVar("Result")


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
            self._function = run_function
            self._states = default_states(None)
            self._recomputation = rng_contexts()[1]
            kinds = {arg.device.type for arg in args if isinstance(arg, Tensor)} - {"meta"}
            self._autocast = []
            for kind in sorted(kinds):
                dtype = torch.get_autocast_dtype(kind)
                self._autocast.append((kind, dtype, torch.is_autocast_enabled(kind)))
            # So that the output requires a gradient also where only parameters do.
            mark = torch.empty(0, requires_grad=True)
            result = _WithoutOutput.apply(self, mark, *args)  # type: ignore[no-untyped-call]
        else:
            result = run_function(*args)
        self.outputs = _pack_outputs(result)
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
        if ctx is None or self._again is not None:
            return
        if not torch.autograd._is_checkpoint_valid():
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
                outputs = _pack_outputs(self._function(*inputs))
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
            ckpt._discard(hook_tensor)
        if hook_tensor.requires_grad:
            hook_tensor.register_hook(lambda _: self._recompute())

    def _recompute(self) -> None:
        for ckpt in self.checkpoints:
            ckpt._recompute(ckpt._ctx)


class _WithoutOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: CheckpointWithoutOutput, _: Tensor, *args: Any) -> Any:
        with torch.no_grad():
            result = region._function(*args)
        if not all(one is None or isinstance(one, Tensor) for one in _pack_outputs(result)):
            raise TypeError(
                f"CheckpointWithoutOutput: the function returned {type(result).__name__}; expected "
                "a tensor, or a tuple of tensors and None"
            )
        ctx.region = region
        ctx.others = list(args)
        ctx.places = []
        tensors = []
        for place, arg in enumerate(args):
            if isinstance(arg, Tensor):
                ctx.others[place] = None
                ctx.places.append(place)
                tensors.append(arg)
        ctx.save_for_backward(*tensors)
        region._ctx = ctx
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        region = ctx.region
        region._recompute(ctx)  # where no hook did
        inputs, outputs = region._again
        region._again = None
        roots = []
        root_grads = []
        for output, grad in zip(outputs, grads, strict=True):
            if output is not None and output.requires_grad and grad is not None:
                roots.append(output)
                root_grads.append(grad)
        if roots:
            torch.autograd.backward(roots, root_grads)
        return None, None, *(one.grad if isinstance(one, Tensor) else None for one in inputs)


def _pack_outputs(result: Any) -> tuple[Any, ...]:
    if isinstance(result, (tuple, list)):
        return tuple(result)
    return (result,)
