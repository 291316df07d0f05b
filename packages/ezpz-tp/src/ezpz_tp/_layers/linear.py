"""Linear layers of which each rank holds a part.

A column-parallel layer followed by a row-parallel one needs one all-reduce forward and one
backward (Shoeybi et al., arXiv:1909.08053, section 3):

>>> up = ColumnParallelLinear(64, 256, gather_output=False)
>>> down = RowParallelLinear(256, 64, input_is_parallel=True)
>>> down(up(torch.zeros(8, 64)).relu()).shape
torch.Size([8, 64])
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.nn.init import xavier_normal_

from ezpz_tp._errors import DegreeError
from ezpz_tp._regions.mappings import (
    gather_from_tensor_parallel_region,
    scatter_to_tensor_parallel_region,
)

from .attributes import mark_sequence_parallel
from .fused import column_linear, row_linear
from .initialize import InitMethod
from .module import empty_parameter
from .sharded_linear import ShardedLinear

Output = Tensor | tuple[Tensor, nn.Parameter | None]


class ColumnParallelLinear(ShardedLinear):
    """``y = x @ weight.T + bias`` with the output features split over the ranks.

    Args:
        in_features: Size of the last dim of the input.
        out_features: Size of the last dim of the whole output.
        bias: Add a bias, which is split as the output is.
        gather_output: Return all output features on every rank; False returns this rank's,
            which is what a `RowParallelLinear` wants.
        init_method: Fills a tensor of the full weight's shape, in place.
        stride: Number of equal matrices that are stacked in the weight and split each by itself,
            such as 2 for a gate and an up projection; or their sizes, such as those of query,
            key and value.
        keep_master_weight_for_test: Keep the full weight as ``master_weight``.
        sequence_parallel: The input is this rank's part of dim 0: it is gathered.
        skip_bias_add: Return ``(output, bias)`` and leave the addition to the caller.
        pad_output: Allow a degree that does not divide ``out_features``, as for a vocabulary:
            every rank has ``ceil(out_features / tp)`` outputs, and those beyond are -inf, so
            that no softmax sees them (label smoothing does: give the cross entropy its
            ``vocab_size``); the gathered output has none of them.
        tp_group: Default: the tensor-parallel group.
        seed: Of the weight; default: drawn from torch's generator.
        init: ``"whole"`` makes the full weight on every rank, from torch's default generator, as
            fairscale's and torch's layers do, so that the same seed gives the same weight.

    Raises:
        DegreeError: The degree does not divide ``out_features``.
        NotInitializedError: In forward: tensor parallelism was initialized after the layer.

    Collective: every rank of the group builds the layer and calls it.

    >>> ColumnParallelLinear(64, 256, gather_output=False)
    ColumnParallelLinear(in_features=64, out_features=256, bias=True, tp=0/1)
    """

    partition_dim = 0
    weight: nn.Parameter
    bias: nn.Parameter | None
    master_weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = True,
        init_method: InitMethod = xavier_normal_,
        stride: int | Sequence[int] = 1,
        keep_master_weight_for_test: bool = False,
        *,
        sequence_parallel: bool = False,
        skip_bias_add: bool = False,
        pad_output: bool = False,
        tp_group: ProcessGroup | None = None,
        seed: int | None = None,
        init: str = "blocks",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            init_method,
            stride,
            sequence_parallel,
            skip_bias_add,
            tp_group,
            seed,
            init,
        )
        self.gather_output = gather_output
        # Summing the gradients of several layers at once is for the caller who clears this.
        self.reduce_input_gradient = True
        if pad_output and out_features % self.tp_size:
            rows = -(-out_features // self.tp_size)
            if self.blocks():
                raise DegreeError(
                    f"ColumnParallelLinear: out_features={out_features} needs padding for degree "
                    f"{self.tp_size}, which is not defined for stride={stride}"
                )
        else:
            rows = self.stacked_shard_size("out_features", out_features)
        # How many of this rank's outputs are real; the rest is padding.
        self.own_features: int = max(0, min(rows, out_features - self.tp_rank * rows))
        self.padded: bool = self.own_features != rows
        self.weight = empty_parameter(rows, in_features, device=device, dtype=dtype)
        self.tag(self.weight, out_features, in_features, padded=pad_output)
        if bias:
            self.bias = empty_parameter(rows, device=device, dtype=dtype)
            self.tag(self.bias, out_features, padded=pad_output)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()
        if keep_master_weight_for_test:
            self.master_weight = self.get_master_weight()

    def forward(self, input_: Tensor) -> Output:
        """Apply the layer to ``[..., in_features]``.

        Returns:
            ``[..., out_features]``, or ``[..., out_features / tp]`` if it is not gathered.
        """
        weight, bias = self.own_parameters()
        output = self.multiply(input_, weight, None if self.skip_bias_add else bias)
        if self.gather_output:
            output = self.gather(output)
        return (output, bias) if self.skip_bias_add else output

    def multiply(self, input_: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return this rank's output features for a weight of this layer's shape."""
        group = self.tp_group
        try:
            if input_.is_meta is not weight.is_meta:  # torch multiplies them, into garbage
                raise RuntimeError("one of input and weight has no data")
            if group is None:
                if self._built_early:
                    self.check_not_early()
                return F.linear(input_, weight, bias)
            output = column_linear(
                input_, weight, bias, group, self.sequence_parallel, self.reduce_input_gradient
            )
        except RuntimeError as error:
            self.explain(error, input_, weight, self.in_features)
        if self.padded:
            padding = torch.arange(weight.shape[0], device=output.device) >= self.own_features
            output = output.masked_fill(padding, float("-inf"))
        return output

    def gather(self, output: Tensor) -> Tensor:
        """Return all output features, given this rank's. Collective."""
        if self.tp_group is None:
            return output
        gathered = gather_from_tensor_parallel_region(output, self.tp_group)
        if gathered.shape[-1] != self.out_features:
            gathered = gathered[..., : self.out_features]
        return gathered


class RowParallelLinear(ShardedLinear):
    """``y = x @ weight.T + bias`` with the input features split over the ranks.

    The ranks' partial products are summed; the bias is on every rank and added once, after.

    Args:
        in_features: Size of the last dim of the whole input.
        out_features: Size of the last dim of the output.
        bias: Add a bias.
        input_is_parallel: The input is this rank's features, as a `ColumnParallelLinear` leaves
            them; False splits a replicated input first.
        init_method: Fills a tensor of the full weight's shape, in place.
        stride: As of `ColumnParallelLinear`, along the input features.
        keep_master_weight_for_test: Keep the full weight as ``master_weight``.
        sequence_parallel: Return this rank's part of dim 0 of the sum. The gradient of the bias
            is then of that part: the bias is tagged, and `finalize_grads` sums it.
        skip_bias_add: Return ``(output, bias)`` and leave the addition to the caller.
        tp_group: Default: the tensor-parallel group.
        seed: Of the weight; default: drawn from torch's generator.
        init: ``"whole"`` makes the full weight on every rank, from torch's default generator, as
            fairscale's and torch's layers do, so that the same seed gives the same weight.

    Raises:
        DegreeError: The degree does not divide ``in_features``.
        NotInitializedError: In forward: tensor parallelism was initialized after the layer.

    Collective: every rank of the group builds the layer and calls it.
    """

    partition_dim = 1
    weight: nn.Parameter
    bias: nn.Parameter | None
    master_weight: Tensor | None
    scatters_sequence = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: InitMethod = xavier_normal_,
        stride: int | Sequence[int] = 1,
        keep_master_weight_for_test: bool = False,
        *,
        sequence_parallel: bool = False,
        skip_bias_add: bool = False,
        tp_group: ProcessGroup | None = None,
        seed: int | None = None,
        init: str = "blocks",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            init_method,
            stride,
            sequence_parallel,
            skip_bias_add,
            tp_group,
            seed,
            init,
        )
        self.input_is_parallel = input_is_parallel
        columns = self.stacked_shard_size("in_features", in_features)
        self.weight = empty_parameter(out_features, columns, device=device, dtype=dtype)
        self.tag(self.weight, out_features, in_features)
        if bias:
            self.bias = empty_parameter(out_features, device=device, dtype=dtype)
            if self.sequence_parallel:
                mark_sequence_parallel(self.bias)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()
        if keep_master_weight_for_test:
            self.master_weight = self.get_master_weight()

    def forward(self, input_: Tensor) -> Output:
        """Apply the layer to ``[..., in_features / tp]``, or to all features if it splits them.

        Returns:
            ``[..., out_features]``, the same on all ranks; under sequence parallelism
            ``[s / tp, ..., out_features]``.
        """
        group = self.tp_group
        weight, bias = self.own_parameters()
        added = None if self.skip_bias_add else bias
        try:
            if input_.is_meta is not weight.is_meta:  # torch multiplies them, into garbage
                raise RuntimeError("one of input and weight has no data")
            if group is None:
                if self._built_early:
                    self.check_not_early()
                output = F.linear(input_, weight, added)
            else:
                if not self.input_is_parallel:
                    input_ = scatter_to_tensor_parallel_region(input_, group)
                output = row_linear(input_, weight, added, group, self.sequence_parallel)
        except RuntimeError as error:
            self.explain(error, input_, weight, weight.shape[1])
        return (output, bias) if self.skip_bias_add else output
