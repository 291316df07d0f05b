"""fairscale's ``fairscale.nn.model_parallel.initialize``: names over the core.

What fairscale calls model parallel is tensor parallel. Two things differ, on purpose. A size
that does not fit the world is an error; fairscale cuts it down to the world's. And the ranks
are ordered as its documentation shows (tensor, context, data, pipeline from the fastest), not
as its code does with a pipeline (data slowest); pass ``order="tp-cp-pp-dp"`` for that.

Source: facebookresearch/fairscale fairscale/nn/model_parallel/initialize.py, 2025-04-26.
"""

from __future__ import annotations

from datetime import timedelta

from ezpz_tp._current import destroy_tensor_parallel as destroy_model_parallel
from ezpz_tp._current import (
    get_context_parallel_group,
    get_context_parallel_rank,
    get_context_parallel_ranks,
    get_context_parallel_world_size,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_ranks,
    get_data_parallel_world_size,
    get_pipeline_parallel_group,
    get_pipeline_parallel_ranks,
    initialize_tensor_parallel,
)
from ezpz_tp._current import get_tensor_parallel_group as get_model_parallel_group
from ezpz_tp._current import get_tensor_parallel_rank as get_model_parallel_rank
from ezpz_tp._current import get_tensor_parallel_src_rank as get_model_parallel_src_rank
from ezpz_tp._current import get_tensor_parallel_world_size as get_model_parallel_world_size
from ezpz_tp._current import tensor_parallel_is_initialized as model_parallel_is_initialized
from ezpz_tp._ranks import ORDER

__all__ = [
    "destroy_model_parallel", "get_context_parallel_group", "get_context_parallel_rank",
    "get_context_parallel_ranks", "get_context_parallel_world_size", "get_data_parallel_group",
    "get_data_parallel_rank", "get_data_parallel_ranks", "get_data_parallel_world_size",
    "get_model_parallel_group", "get_model_parallel_rank", "get_model_parallel_src_rank",
    "get_model_parallel_world_size", "get_pipeline_parallel_group", "get_pipeline_parallel_ranks",
    "initialize_model_parallel", "model_parallel_is_initialized",
]  # fmt: skip


def initialize_model_parallel(
    model_parallel_size_: int,
    pipeline_length: int = 1,
    context_parallel_size: int = 1,
    *,
    model_parallel_backend: str | None = None,
    pipeline_backend: str | None = None,
    cp_backend: str | None = None,
    ddp_backend: str | None = None,
    timeout: timedelta | None = None,
    order: str = ORDER,
) -> None:
    """See `ezpz_tp.initialize_tensor_parallel`, whose first arguments have fairscale's names here.

    Collective: every rank calls this, with the same arguments. Once more with equal arguments
    does nothing.

    Raises:
        DegreeError: The degrees do not fit, or groups exist with other arguments.
    """
    sizes = model_parallel_size_, pipeline_length, context_parallel_size
    backends = model_parallel_backend, pipeline_backend, cp_backend, ddp_backend
    initialize_tensor_parallel(*sizes, *backends, timeout, order=order)
