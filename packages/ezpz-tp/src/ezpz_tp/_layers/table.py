"""What the embeddings have in common: a table, of which each rank holds a part."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ezpz_tp._errors import DegreeError, ParallelError
from ezpz_tp._regions.collectives import all_gather

from .attributes import set_tensor_model_parallel_attributes, set_whole
from .initialize import (
    Init,
    InitMethod,
    agree_on_seed,
    check_init,
    initialize_from_whole,
    initialize_shard,
    local_part,
    one_generator,
)
from .module import ParallelModule, empty_parameter


class EmbeddingTable(ParallelModule):
    """One table, split along ``partition_dim``, and what both embeddings do with it.

    Attributes:
        partition_dim: 0 where ranks hold rows, 1 where they hold columns.
        weight: This rank's part.
    """

    partition_dim: int
    weight: nn.Parameter
    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool
    init_method: InitMethod
    seed: int | None
    init: Init

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None,
        *,
        max_norm: float | None,
        norm_type: float,
        scale_grad_by_freq: bool,
        sparse: bool,
        init_method: InitMethod,
        tp_group: ProcessGroup | None,
        seed: int | None,
        init: str,
    ) -> None:
        super().__init__(tp_group)
        for what, size in (("num_embeddings", num_embeddings), ("embedding_dim", embedding_dim)):
            if size < 1:
                raise DegreeError(f"{type(self).__name__}: {what}={size}; expected at least 1")
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise DegreeError(
                f"{type(self).__name__}: padding_idx={padding_idx} is not an id of the "
                f"vocabulary; expected 0 to {num_embeddings - 1}, or as many from its end"
            )
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.init_method, self.seed = init_method, seed
        self.init = check_init(type(self).__name__, init)

    def make_weight(
        self, *shape: int, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        """Make this rank's part of the weight, and fill it."""
        self.weight = empty_parameter(*shape, device=device, dtype=dtype)
        set_tensor_model_parallel_attributes(self.weight, self.tp_size > 1, self.partition_dim, 1)
        full_shape = (self.num_embeddings, self.embedding_dim)
        set_whole(self.weight, full_shape, padded=self.partition_dim == 0)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the weight with this rank's part of the full one, which no rank holds.

        The row of ``padding_idx`` is zero, and so are rows past the end of the vocabulary. The
        full weight is the same for every degree. It is drawn from ``seed``, or else from torch's
        default generator on the group's first rank. Collective over the tensor-parallel group,
        unless ``seed`` was given or the layer is on the meta device.
        """
        if self.weight.is_meta:
            return
        place = (
            self.weight,
            (self.num_embeddings, self.embedding_dim),
            self.partition_dim,
            self.tp_rank,
            self.tp_size,
            self.init_method,
        )
        if self.init == "whole":
            with one_generator(self.seed, self.tp_group, self.weight.device):
                initialize_from_whole(*place)
        else:
            seed = agree_on_seed(self.seed, self.tp_group, self.weight.device)
            initialize_shard(*place, seed=seed)
        row = self.padding_row()
        if row is not None:
            with torch.no_grad():
                local, (first, _) = local_part(self.weight)
                if first <= row < first + local.shape[0]:
                    local[row - first].zero_()

    def get_master_weight(self) -> Tensor:
        """Return the full weight ``[num_embeddings, embedding_dim]``. Collective."""
        if self.tp_group is None:
            return self.weight.detach().clone()
        full = all_gather(self.weight.detach(), self.partition_dim, self.tp_group)
        return full.narrow(0, 0, self.num_embeddings)

    def extra_repr(self) -> str:
        """Return the sizes, the options and this rank's place."""
        return (
            f"{self.num_embeddings}, {self.embedding_dim}"
            + ("" if self.padding_idx is None else f", padding_idx={self.padding_idx}")
            + ("" if self.max_norm is None else f", max_norm={self.max_norm}")
            + f", tp={self.tp_rank}/{self.tp_size}"
        )

    def padding_row(self) -> int | None:
        """Return the row here that gets no gradient."""
        return self.padding_idx

    def look_up_whole(self, ids: Tensor) -> Tensor:
        """Return the embeddings, on a rank that holds all rows: what `nn.Embedding` does."""
        if self._built_early:
            self.check_not_early()
        return nn.functional.embedding(
            ids,
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )

    def check_device(self, ids: Tensor) -> None:
        """Raise `ParallelError` where the ids are on another device, or a DTensor."""
        self.check_plain(ids)
        if ids.device != self.weight.device:
            raise ParallelError(
                f"{type(self).__name__}({self.extra_repr()}): the ids are on {ids.device} and "
                f"the weight on {self.weight.device}; move one of them"
            )

    def outside(self, ids: Tensor) -> IndexError:
        """Return what to raise once a lookup has failed."""
        low, high = (int(bound) for bound in ids.aminmax())
        return IndexError(
            f"{type(self).__name__}({self.extra_repr()}): id {low if low < 0 else high} is not in "
            f"the vocabulary; expected 0 to {self.num_embeddings - 1}"
        )
