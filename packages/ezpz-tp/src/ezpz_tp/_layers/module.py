"""What the parallel layers have in common: their group, and errors that name them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ezpz_tp._errors import DegreeError, NotInitializedError, ParallelError
from ezpz_tp._groups.default import current_state, tensor_group

from .attributes import copy_attributes, keep_attributes


class ParallelModule(nn.Module):
    """A layer of which each rank of a tensor-parallel group holds a part.

    Attributes:
        tp_group: The group, or None where one rank holds the whole layer.
        tp_size: The degree.
        tp_rank: This rank's place in the group.
    """

    scatters_sequence = False  # whether the output is a part of the sequence of the input

    def __init__(self, tp_group: ProcessGroup | None) -> None:
        super().__init__()
        self.tp_group: ProcessGroup | None = tensor_group(tp_group)
        self.tp_size: int = 1 if self.tp_group is None else self.tp_group.size()
        self.tp_rank: int = 0 if self.tp_group is None else self.tp_group.rank()
        # Whole because nothing was initialized yet, and not because the degree is one.
        self._built_early = tp_group is None and current_state() is None

    def shard_size(self, what: str, size: int) -> int:
        """Return ``size`` over the degree.

        Raises:
            DegreeError: The degree does not divide it.
        """
        if size % self.tp_size:
            raise DegreeError(
                f"{type(self).__name__}: {what}={size} is not divisible by the tensor-parallel "
                f"degree {self.tp_size}; choose a multiple of {self.tp_size}, or another degree"
            )
        return size // self.tp_size

    def check_not_early(self) -> None:
        """Refuse to use a whole layer as a shard, because it was built before initialization.

        Raises:
            NotInitializedError: A tensor-parallel degree was set after the layer was built.
        """
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
        name, group = type(self).__name__, tensor_group()
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

    # What follows may put new parameters, of which nothing is said, in the place of those here.
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with keep_attributes(self):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        with keep_attributes(self):
            super()._load_from_state_dict(*arguments, **options)


def empty_parameter(
    *shape: int, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Parameter:
    """An uninitialized parameter."""
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
