"""The weight of a linear layer of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ezpz_tp._errors import DegreeError
from ezpz_tp._regions.collectives import all_gather

from .attributes import set_tensor_model_parallel_attributes, set_whole
from .initialize import (
    Init,
    InitMethod,
    agree_on_seed,
    check_init,
    initialize_from_whole,
    initialize_shard,
    one_generator,
)
from .module import ParallelModule


class ShardedLinear(ParallelModule):
    """One weight, split along ``partition_dim``, and what both layers do with it."""

    partition_dim: int
    in_features: int
    out_features: int
    init_method: InitMethod
    seed: int | None
    init: Init
    weight: nn.Parameter
    bias: nn.Parameter | None
    master_weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        init_method: InitMethod,
        stride: int | Sequence[int],
        sequence_parallel: bool,
        skip_bias_add: bool,
        tp_group: ProcessGroup | None,
        seed: int | None,
        init: str,
    ) -> None:
        super().__init__(tp_group)
        for what, size in (("in_features", in_features), ("out_features", out_features)):
            if size < 1:
                raise DegreeError(f"{type(self).__name__}: {what}={size}; expected at least 1")
        self.in_features, self.out_features = in_features, out_features
        self.init_method, self.seed = init_method, seed
        self.init = check_init(type(self).__name__, init)
        self.stride: int | tuple[int, ...] = stride if isinstance(stride, int) else tuple(stride)
        # With one rank there is no sequence to share.
        self.sequence_parallel: bool = sequence_parallel and self.tp_group is not None
        self.skip_bias_add = skip_bias_add
        self.master_weight = None

    def stacked_shard_size(self, what: str, size: int) -> int:
        """Return ``size`` over the degree, where each of the stacked matrices is split."""
        stride = self.stride
        if isinstance(stride, int):
            if stride < 1 or size % stride:
                raise DegreeError(
                    f"{type(self).__name__}: stride={stride} does not divide {what}={size}"
                )
            self.shard_size(what if stride == 1 else f"{what} / stride {stride}", size // stride)
            return size // self.tp_size
        if not stride or min(stride) < 1 or sum(stride) != size:
            raise DegreeError(
                f"{type(self).__name__}: stride={stride} adds up to {sum(stride)}; expected "
                f"sizes above 0 that make {what}={size}"
            )
        for number, block in enumerate(stride):
            self.shard_size(f"{what}, stride[{number}]", block)
        return size // self.tp_size

    def blocks(self) -> tuple[int, ...]:
        """Return the sizes of the matrices that are stacked in the weight; none if it is one."""
        if not isinstance(self.stride, int):
            return self.stride if len(self.stride) > 1 else ()
        size = (self.out_features, self.in_features)[self.partition_dim]
        return (size // self.stride,) * self.stride if self.stride > 1 else ()

    def tag(self, parameter: nn.Parameter, *full_shape: int, padded: bool = False) -> None:
        """Say of a parameter how it is split, and what it is a part of."""
        blocks = self.blocks()
        set_tensor_model_parallel_attributes(
            parameter, self.tp_size > 1, self.partition_dim, max(1, len(blocks))
        )
        set_whole(parameter, full_shape, blocks, padded and not blocks)

    def own_parameters(self) -> tuple[nn.Parameter, nn.Parameter | None]:
        """Return weight and bias without the search of `Module.__getattr__`."""
        parameters = self._parameters
        try:
            return parameters["weight"], parameters["bias"]  # type: ignore[return-value]
        except KeyError:  # parametrized: no longer a parameter, but an attribute
            return self.weight, self.bias

    def reset_parameters(self) -> None:
        """Fill the weight with this rank's part of the full one, which no rank holds; zero bias.

        The full weight is the same for every degree. It is drawn from ``seed``, or else from
        torch's default generator on the group's first rank. Collective over the tensor-parallel
        group, unless ``seed`` was given or the layer is on the meta device.
        """
        if self.weight.device.type == "meta":
            return
        place = (
            self.weight,
            (self.out_features, self.in_features),
            self.partition_dim,
            self.tp_rank,
            self.tp_size,
            self.init_method,
        )
        if self.init == "whole":
            with one_generator(self.seed, self.tp_group, self.weight.device):
                initialize_from_whole(*place, stride=self.stride)
        else:
            seed = agree_on_seed(self.seed, self.tp_group, self.weight.device)
            initialize_shard(*place, seed=seed, stride=self.stride)
        with torch.no_grad():
            if self.bias is not None:
                self.bias.zero_()

    def get_master_weight(self) -> Tensor:
        """Return the full weight ``[out_features, in_features]``. Collective."""
        if self.tp_group is None:
            return self.weight.detach().clone()
        dim = self.partition_dim
        full = all_gather(self.weight.detach(), dim, self.tp_group)
        if blocks := self.blocks():
            # A rank's part has a piece of each block, of which the full weight takes turns.
            sizes = [block // self.tp_size for block in blocks]
            parts = [part.split(sizes, dim) for part in full.chunk(self.tp_size, dim)]
            full = torch.cat([torch.cat(same, dim) for same in zip(*parts, strict=True)], dim)
        return full.narrow(0, 0, self.out_features)

    def extra_repr(self) -> str:
        """Return the sizes, the options and this rank's place."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, tp={self.tp_rank}/{self.tp_size}"
            + (", sequence_parallel=True" if self.sequence_parallel else "")
        )
