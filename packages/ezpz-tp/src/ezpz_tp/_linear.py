"""Linear layers of which each rank holds a part.

A column-parallel layer followed by a row-parallel one needs one all-reduce forward and one
backward (Shoeybi et al., arXiv:1909.08053, section 3):

>>> up = ColumnParallelLinear(64, 256, gather_output=False)
>>> down = RowParallelLinear(256, 64, input_is_parallel=True)
>>> down(up(torch.zeros(8, 64)).relu()).shape
torch.Size([8, 64])
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.nn.init import xavier_normal_

from ._current import current_state, tensor_group
from ._errors import DegreeError, NotInitializedError, ParallelError
from ._fused import column_linear, row_linear
from ._init import (
    InitMethod,
    agree_on_seed,
    as_dtype,
    initialize_from_whole,
    initialize_shard,
    one_generator,
)
from ._mappings import (
    all_gather,
    gather_from_tensor_parallel_region,
    scatter_to_tensor_parallel_region,
)
from ._shard import WHOLE, Shard, set_whole

# The attributes by which optimizers, gradient clipping and checkpoints know a parameter. The names
# are Megatron-LM's (megatron/core/tensor_parallel/layers.py), which DeepSpeed and others read:
#
# ``tensor_model_parallel``  each tensor-parallel rank holds another part of it
# ``partition_dim``          the dim along which it is split, -1 when it is not
# ``partition_stride``       how many separate stretches of that dim a rank holds
# ``sequence_parallel``      replicated, but used on a part of the sequence: its gradient is partial
# ``allreduce``              False for an expert's parameter, reduced over another group
# ``shared``                 a copy of a tied parameter that is counted elsewhere
#
# These say how large the whole is, for checkpoints that change their degree (`ezpz_tp.Shard`):
#
# ``full_shape``             shape over all ranks, without padding
# ``partition_blocks``       sizes along the dim of the matrices stacked in it, each split by itself
# ``partition_padded``       whether a degree that does not divide the dim pads it


_DEFAULTS = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}
# Megatron-LM's optimizers ask how queries, keys and values are stacked, and whose experts' it is.
_OTHERS = ("sequence_parallel", "allreduce", "shared", "is_qkv", "qkv_split_shapes", "expert_tp")
_ALL = (*_DEFAULTS, *WHOLE, *_OTHERS)


def set_tensor_model_parallel_attributes(
    tensor: Tensor, is_parallel: bool, dim: int, stride: int
) -> None:
    """Say that a parameter is split over the tensor-parallel ranks, and how.

    Args:
        tensor: The parameter.
        is_parallel: Whether each rank holds another part of it.
        dim: The dim along which it is split.
        stride: How many separate stretches of that dim a rank holds.

    Raises:
        ParallelError: It is set already, to another value: two owners claim one parameter.
    """
    wanted = dict(zip(_DEFAULTS, (is_parallel, dim, stride), strict=True))
    for name, value in wanted.items():
        found = getattr(tensor, name, value)
        if found != value:
            raise ParallelError(
                f"{name} of a parameter of shape {tuple(tensor.shape)} is already {found}, "
                f"and {value} is asked; expected it to be set once: remove one of the two calls"
            )
    for name, value in wanted.items():
        setattr(tensor, name, value)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Mark a parameter as whole on every rank, unless it is marked already."""
    for name, value in _DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(
    destination_tensor: Tensor, source_tensor: Tensor
) -> None:
    """Copy the attributes of one tensor to another, such as an optimizer's fp32 copy.

    What the source lacks is left as it is.
    """
    for name in _ALL:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def mark_sequence_parallel(param: Tensor) -> None:
    """Say that a replicated parameter acts on a part of the sequence.

    Its gradient is then partial on each tensor-parallel rank, and `finalize_grads` sums it.
    For the norms of a sequence-parallel block, and whatever else stands between its regions.
    What replaces a parameter forgets its attributes: see `keep_attributes`, `copy_attributes`.
    """
    param.sequence_parallel = True  # type: ignore[attr-defined]


def param_is_not_tensor_parallel_duplicate(
    param: Tensor, tp_group: ProcessGroup | None = None, expert_tp_group: ProcessGroup | None = None
) -> bool:
    """Return whether this rank's copy of a parameter is the one to count.

    True for a part of a split parameter, and on the first tensor-parallel rank for a
    replicated one: so that a sum over the ranks counts every value once.

    Args:
        param: The parameter.
        tp_group: The tensor-parallel group; None for the default one.
        expert_tp_group: The group of experts' parameters (``allreduce`` False), where it differs.
    """
    if getattr(param, "tensor_model_parallel", False):
        return True
    if expert_tp_group is not None and not getattr(param, "allreduce", True):
        tp_group = expert_tp_group
    group = tensor_group(tp_group)
    return group is None or group.rank() == 0


@contextmanager
def keep_attributes(module: nn.Module) -> Iterator[None]:
    """Set the attributes that a module's parameters had before the block on those after it.

    For what makes new parameters, which have no attributes: ``fully_shard`` of FSDP2, ``to_empty``
    of a module on the meta device, ``load_state_dict(..., assign=True)``. Parameters are known
    again by their names. (The layers of this package keep those of their own in the last two.)
    """
    attributes = _read_attributes(module)
    yield
    _write_attributes(module, attributes)


def copy_attributes(source: nn.Module, destination: nn.Module) -> None:
    """Copy the attributes of a module's parameters to those of the same name in another.

    For what copies a module: ``copy.deepcopy`` makes parameters without attributes.
    """
    _write_attributes(destination, _read_attributes(source))


def _read_attributes(module: nn.Module) -> dict[str, dict[str, Any]]:
    named = module.named_parameters(remove_duplicate=False)
    return {name: dict(vars(param)) for name, param in named}


def _write_attributes(module: nn.Module, attributes: dict[str, dict[str, Any]]) -> None:
    for name, param in module.named_parameters(remove_duplicate=False):
        for attribute, value in attributes.get(name, {}).items():
            if not hasattr(param, attribute):
                setattr(param, attribute, value)


# What the parallel layers have in common: their group, and errors that name them.


class ParallelModule(nn.Module):
    """A layer of which each rank of a tensor-parallel group holds a part.

    Attributes:
        tp_group: The group, or None where one rank holds the whole layer.
        tp_size: The degree.
        tp_rank: This rank's place in the group.
    """

    scatters_sequence = False  # whether the output is a part of the sequence of the input
    partition_dim: int
    full_shape: tuple[int, int]  # of the weight
    weight: nn.Parameter
    init_method: InitMethod
    seed: int | None
    init: str
    stride: int | tuple[int, ...] = 1

    def __init__(
        self,
        sizes: Mapping[str, int],
        init_method: InitMethod,
        tp_group: ProcessGroup | None,
        seed: int | None,
        init: str,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        for what, size in sizes.items():
            if size < 1:
                raise DegreeError(f"{name}: {what}={size}; expected at least 1")
        if init not in ("blocks", "whole"):
            raise ValueError(f"{name}: init={init!r}; expected 'blocks' or 'whole'")
        self.init_method = init_method
        self.seed = seed
        self.init = init
        self.tp_group: ProcessGroup | None = tensor_group(tp_group)
        self.tp_size: int = 1 if self.tp_group is None else self.tp_group.size()
        self.tp_rank: int = 0 if self.tp_group is None else self.tp_group.rank()
        # Whole because nothing was initialized yet, and not because the degree is one.
        self._built_early = tp_group is None and current_state() is None

    def part(
        self,
        *shape: int,
        of: tuple[int, ...],
        padded: bool = False,
        device: torch.device | str | None,
        dtype: torch.dtype | str | None,
    ) -> nn.Parameter:
        """Return an empty parameter that says how it is split, and what it is a part of."""
        if dtype is not None:
            dtype = as_dtype(dtype)
        parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        blocks = self.blocks()
        set_tensor_model_parallel_attributes(
            parameter, self.tp_size > 1, self.partition_dim, max(1, len(blocks))
        )
        set_whole(parameter, of, blocks, padded and not blocks)
        return parameter

    def reset_parameters(self) -> None:
        """Fill the weight with this rank's part of the full one, which no rank holds.

        A bias is zero, and so are the row of ``padding_idx`` and rows past the end of a
        vocabulary. The full weight is the same for every degree. It is drawn from ``seed``, or
        else from torch's default generator on the group's first rank. Collective over the
        tensor-parallel group, unless ``seed`` was given or the layer is on the meta device.
        """
        weight = self.weight
        group = self.tp_group
        if weight.is_meta:
            return
        where = (weight, self.full_shape, self.partition_dim, self.tp_rank, self.tp_size)
        if self.init == "whole":
            with one_generator(self.seed, group, weight.device):
                initialize_from_whole(*where, self.init_method, stride=self.stride)
        else:
            seed = agree_on_seed(self.seed, group, weight.device)
            initialize_shard(*where, self.init_method, seed=seed, stride=self.stride)
        with torch.no_grad():
            self.set_zeros()

    def set_zeros(self) -> None:
        """Set what is zero at first."""
        bias = self._parameters.get("bias")
        if bias is not None:
            bias.zero_()

    def blocks(self) -> tuple[int, ...]:
        """Return the sizes of the matrices that are stacked in the weight; none if it is one."""
        if not isinstance(self.stride, int):
            if len(self.stride) > 1:
                return self.stride
            return ()
        size = self.full_shape[self.partition_dim]
        if self.stride > 1:
            return (size // self.stride,) * self.stride
        return ()

    def get_master_weight(self) -> Tensor:
        """Return the full weight, ``[out_features, in_features]`` or the whole table. Collective.

        What pads an uneven dim is left out.
        """
        if self.tp_group is None:
            return self.weight.detach().clone()
        parts = all_gather(self.weight.detach(), 0, self.tp_group).chunk(self.tp_size)
        blocks = self.blocks()
        return Shard(self.full_shape, self.partition_dim, blocks, padded=not blocks).join(parts)

    def shard_size(self, what: str, size: int) -> int:
        """Return ``size`` over the degree, which has to divide it."""
        if size % self.tp_size:
            raise DegreeError(
                f"{type(self).__name__}: {what}={size} is not divisible by the tensor-parallel "
                f"degree {self.tp_size}; choose a multiple of {self.tp_size}, or another degree"
            )
        return size // self.tp_size

    def check_not_early(self) -> None:
        """Raise `NotInitializedError` where a degree was set after this whole layer was built."""
        state = current_state()
        if state is not None and state.size("tensor") > 1:
            raise NotInitializedError(
                f"{type(self).__name__}({self.extra_repr()}) was built before tensor parallelism "
                f"was initialized, so it is whole, but the degree is now "
                f"{state.size('tensor')}; call initialize_tensor_parallel() before building layers"
            )

    def check_plain(self, input_: Tensor) -> None:
        """Refuse a DTensor, which torch does not mix with this rank's part of a weight."""
        placements = getattr(input_, "placements", None)
        if placements is not None:
            raise ParallelError(
                f"{type(self).__name__}({self.extra_repr()}): the input is a DTensor, "
                f"{list(placements)}; expected this rank's plain tensor: pass input.to_local(), "
                "or input.full_tensor() where every rank is to have the whole"
            )

    def explain(self, error: RuntimeError, input_: Tensor, weight: Tensor, size: int) -> NoReturn:
        """Raise what a failed forward means for this layer, if its input is the reason."""
        if isinstance(error, ParallelError):
            raise error
        name = f"{type(self).__name__}({self.extra_repr()})"
        self.check_plain(input_)
        if input_.device != weight.device:
            raise ParallelError(
                f"{name}: the input is on {input_.device} and the weight on {weight.device}; "
                "move one of them"
            ) from error
        if input_.dim() == 0 or input_.shape[-1] != size:
            raise DegreeError(
                f"{name}: the last dim of the input {tuple(input_.shape)} should be {size} on "
                f"each of the {self.tp_size} tensor-parallel ranks"
            ) from error
        shares = self.scatters_sequence and getattr(self, "sequence_parallel", False)
        if shares and input_.shape[0] % self.tp_size:
            raise DegreeError(
                f"{name}: dim 0 of the input {tuple(input_.shape)}, the sequence, is not divisible "
                f"by the tensor-parallel degree {self.tp_size}; pad it to a multiple"
            ) from error
        if input_.dtype != weight.dtype:
            raise ParallelError(
                f"{name}: the input is {input_.dtype} and the weight {weight.dtype}; cast one of "
                "them, or use torch.autocast"
            ) from error
        raise error

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # The copy is of the same group, which cannot be copied.
        memo[id(self.tp_group)] = self.tp_group
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        copy_attributes(self, new)
        return new

    def __copy__(self) -> Self:
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __getstate__(self) -> dict[str, Any]:
        # A group cannot be saved; whoever loads the layer is in one of the same size.
        return {**self.__dict__, "tp_group": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.tp_size == 1:
            return
        name = type(self).__name__
        group = tensor_group()
        if group is None:
            raise NotInitializedError(
                f"{name}: it was saved by rank {self.tp_rank} of {self.tp_size} tensor-parallel "
                "ranks, and there is no tensor-parallel group here; call "
                f"initialize_tensor_parallel({self.tp_size}) before loading it"
            )
        if (group.rank(), group.size()) != (self.tp_rank, self.tp_size):
            raise DegreeError(
                f"{name}: it was saved by rank {self.tp_rank} of {self.tp_size} tensor-parallel "
                f"ranks, and this is rank {group.rank()} of {group.size()}; expected the file of "
                "this rank at the same degree; for another one save dtensor_state_dict of the model"
            )
        self.tp_group = group

    # What follows may put new parameters, without attributes, in the place of those here.
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with keep_attributes(self):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        with keep_attributes(self):
            super()._load_from_state_dict(*arguments, **options)


# The weight of a linear layer of which each rank holds a part.


class ShardedLinear(ParallelModule):
    """One weight, split along ``partition_dim``, and what both layers do with it."""

    in_features: int
    out_features: int
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
        sizes = {"in_features": in_features, "out_features": out_features}
        super().__init__(sizes, init_method, tp_group, seed, init)
        self.in_features = in_features
        self.out_features = out_features
        self.full_shape: tuple[int, int] = (out_features, in_features)
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

    def own_parameters(self) -> tuple[nn.Parameter, nn.Parameter | None]:
        """Return weight and bias without the search of `Module.__getattr__`."""
        parameters = self._parameters
        try:
            return parameters["weight"], parameters["bias"]  # type: ignore[return-value]
        except KeyError:  # parametrized: no longer a parameter, but an attribute
            return self.weight, self.bias

    def extra_repr(self) -> str:
        """Return the sizes, the options and this rank's place."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, tp={self.tp_rank}/{self.tp_size}"
            + (", sequence_parallel=True" if self.sequence_parallel else "")
        )


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
            such as 2 for a gate and an up projection. Or their sizes, such as those of query,
            key and value.
        keep_master_weight_for_test: Keep the full weight as ``master_weight``.
        sequence_parallel: The input is this rank's part of dim 0: it is gathered.
        skip_bias_add: Return ``(output, bias)`` and leave the addition to the caller.
        pad_output: Allow a degree that does not divide ``out_features``, as for a vocabulary.
            Every rank has ``ceil(out_features / tp)`` outputs. Those beyond are -inf, so that no
            softmax sees them. Label smoothing does, so give the cross entropy its
            ``vocab_size``. The gathered output has none of them.
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
        dtype: torch.dtype | str | None = None,
    ) -> None:
        how = init_method, stride, sequence_parallel, skip_bias_add, tp_group, seed, init
        super().__init__(in_features, out_features, *how)
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
        options: Any = {"padded": pad_output, "device": device, "dtype": dtype}
        self.weight = self.part(rows, in_features, of=self.full_shape, **options)
        own_bias = None
        if bias:
            own_bias = self.part(rows, of=(out_features,), **options)
        self.register_parameter("bias", own_bias)
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
        if self.skip_bias_add:
            return output, bias
        return output

    def multiply(self, input_: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return this rank's output features for a weight of this layer's shape."""
        group = self.tp_group
        try:
            if input_.is_meta is not weight.is_meta:  # torch multiplies them, into garbage
                raise RuntimeError
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
        stride: As of `ColumnParallelLinear`, along the input features.
        sequence_parallel: Return this rank's part of dim 0 of the sum. The gradient of the bias
            is then of that part: the bias is tagged, and `finalize_grads` sums it.

    The other arguments are those of `ColumnParallelLinear`.

    Raises:
        DegreeError: The degree does not divide ``in_features``.
        NotInitializedError: In forward: tensor parallelism was initialized after the layer.

    Collective: every rank of the group builds the layer and calls it.
    """

    partition_dim = 1
    weight: nn.Parameter
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
        dtype: torch.dtype | str | None = None,
    ) -> None:
        how = init_method, stride, sequence_parallel, skip_bias_add, tp_group, seed, init
        super().__init__(in_features, out_features, *how)
        self.input_is_parallel = input_is_parallel
        columns = self.stacked_shard_size("in_features", in_features)
        options: Any = {"device": device, "dtype": dtype}
        self.weight = self.part(out_features, columns, of=self.full_shape, **options)
        own_bias = None
        if bias:
            empty = torch.empty(out_features, device=device, dtype=self.weight.dtype)
            own_bias = nn.Parameter(empty)
        self.register_parameter("bias", own_bias)
        if self.bias is not None and self.sequence_parallel:
            mark_sequence_parallel(self.bias)
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
        added = bias
        if self.skip_bias_add:
            added = None
        try:
            if input_.is_meta is not weight.is_meta:  # torch multiplies them, into garbage
                raise RuntimeError
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
        if self.skip_bias_add:
            return output, bias
        return output
