"""Looking up rows of a vocabulary of which each rank holds a stretch, as one autograd function.

The sum over the ranks works in place on what the lookup just made, and backward skips the ids
that are not this rank's instead of adding rows of zeros: compared with an embedding, a mask and
a region function in a row, that saves two passes over the output and one over its gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.overrides import has_torch_function_unary

from ezpz_tp._regions.collectives import all_gather, all_reduce_, reduce_scatter
from ezpz_tp._regions.mappings import (
    copy_gradient,
    gather_from_sequence_parallel_region,
)
from ezpz_tp._regions.watched import watched


def vocabulary_lookup(
    weight: Tensor,
    rows: Tensor,
    foreign: Tensor,
    group: ProcessGroup,
    *,
    padding_row: int | None = None,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    sequence_parallel: bool = False,
) -> Tensor:
    """Return the embeddings of ids of which some are in each rank's stretch. Collective.

    Args:
        weight: ``[rows, width]``, this rank's.
        rows: For each id its row here; any valid row where it is another rank's.
        foreign: Whether an id is another rank's, of the shape of ``rows``.
        group: The ranks that share the vocabulary.
        padding_row: A row here that gets no gradient.
        scale_grad_by_freq: Divide a row's gradient by how often it was looked up.
        sparse: Make the gradient a sparse tensor.
        sequence_parallel: Return this rank's part of dim 0.

    Raises:
        IndexError: A row is out of range (on accelerators, an assertion on the device).
    """
    if has_torch_function_unary(weight):
        return watched(
            vocabulary_lookup,
            weight,
            rows,
            foreign,
            group,
            padding_row=padding_row,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            sequence_parallel=sequence_parallel,
        )
    flags = (padding_row, scale_grad_by_freq, sparse, sequence_parallel)
    output: Tensor = _Lookup.apply(weight, rows, foreign, group, flags)  # type: ignore[no-untyped-call]
    return output


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        rows: Tensor,
        foreign: Tensor,
        group: ProcessGroup,
        flags: tuple[int | None, bool, bool, bool],
    ) -> Tensor:
        ctx.save_for_backward(rows, foreign)
        ctx.shape, ctx.group, ctx.flags = weight.shape, group, flags
        output = torch.embedding(weight, rows)
        if output.device.type == "cpu" and not torch.compiler.is_compiling():
            # Whole rows: several times as fast there as a mask that is broadcast.
            output.view(-1, output.shape[-1]).index_fill_(
                0, foreign.reshape(-1).nonzero().view(-1), 0
            )
        else:
            output.masked_fill_(foreign.unsqueeze(-1), 0)
        return reduce_scatter(output, 0, group) if flags[-1] else all_reduce_(output, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        rows, foreign = ctx.saved_tensors
        padding_row, by_frequency, sparse, sequence_parallel = ctx.flags
        if not sequence_parallel:
            grad = copy_gradient(grad, ctx.group)
        elif torch.is_grad_enabled():
            grad = gather_from_sequence_parallel_region(grad, tp_group=ctx.group)
        else:
            grad = all_gather(grad, 0, ctx.group)
        count, width = ctx.shape
        # An extra row collects, and as "padding" skips, what has no gradient here.
        rows = rows.masked_fill(foreign, count)
        if padding_row is not None:
            rows.masked_fill_(rows == padding_row, count)
        if sparse:
            own = (rows != count).reshape(-1).nonzero().view(-1)
            values = grad.reshape(-1, width).index_select(0, own)
            indices = rows.reshape(-1).index_select(0, own).unsqueeze(0)
            gradient = torch.sparse_coo_tensor(
                indices, values, (count, width), check_invariants=False
            )
        else:
            gradient = torch.ops.aten.embedding_dense_backward(
                grad, rows, count + 1, count, by_frequency
            )[:count]
        return gradient, None, None, None, None
