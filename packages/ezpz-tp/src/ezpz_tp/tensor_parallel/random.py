"""Megatron-LM's random streams and checkpointing: its names over `ezpz_tp`'s.

"cuda" stays in the names; the CPU and other accelerators are tracked as well. Streams that can
be captured in a CUDA graph, Transformer Engine's and those that do nothing at inference are
not there: asking for one is an error.

Source: NVIDIA/Megatron-LM megatron/core/tensor_parallel/random.py, 2026-08-22.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ezpz_tp._random import (
    DATA_PARALLEL_RNG,
    EXPERT_PARALLEL_RNG,
    RngTracker,
    checkpoint,
    get_rng_tracker,
    is_checkpointing,
    seed_as_megatron,
)

from ._without_output import CheckpointWithoutOutput, CheckpointWithoutOutputManager
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
