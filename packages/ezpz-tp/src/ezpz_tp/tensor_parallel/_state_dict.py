"""What Megatron-LM's layers put into checkpoints besides their parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ezpz_tp._formats.dcp import dtensors
from ezpz_tp._layers.module import ParallelModule
from ezpz_tp._shard import shard_of


class ShardedStateDict:
    """A layer with Megatron-LM's name for what distributed checkpoints are made of."""

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Tensor]:
        """Return this rank's parts as DTensors, for `torch.distributed.checkpoint`.

        They are what `ezpz_tp.dtensor_state_dict` returns of this layer, not the objects of
        Megatron-LM's own ``dist_checkpointing``. They are views: loading fills the parameters.

        Args:
            prefix: Of the names.
            sharded_offsets: Only empty: layers of other stages have names of their own.
            metadata: Without effect.

        Raises:
            NotImplementedError: There are offsets, or the layer is an expert's.
        """
        del metadata
        layer = self
        assert isinstance(layer, ParallelModule)
        where = f"{type(self).__name__} {prefix!r}: sharded_state_dict"
        if sharded_offsets:
            raise NotImplementedError(
                f"{where}(sharded_offsets={sharded_offsets}) is not supported; expected (): give "
                "every layer of the model a prefix of its own"
            )
        found: dict[str, Tensor] = {}
        for name, parameter in layer.named_parameters():
            if not getattr(parameter, "allreduce", True):
                raise NotImplementedError(
                    f"{where}() of an expert's layer is not supported; save state_dict() on each "
                    "rank, which holds this rank's parts"
                )
            shard = shard_of(parameter, layer.tp_size)
            assert shard is not None  # a degree was given
            found |= dtensors(f"{prefix}{name}", parameter.detach(), shard, layer.tp_group)
        return found


class ExtraState(ShardedStateDict):
    """A layer whose checkpoints have an empty ``_extra_state``, as Transformer Engine's do."""

    def get_extra_state(self) -> None:
        """Return None."""

    def set_extra_state(self, state: Any) -> None:
        """Ignore what another implementation saved."""

    def backward_dw(self) -> None:
        """Do nothing: gradients of weights are never delayed."""


def allow_without_extra_state(module: nn.Module) -> None:
    """Let a checkpoint without ``_extra_state`` be loaded strictly, as of a plain layer."""
    module.register_load_state_dict_pre_hook(_add_extra_state)


def _add_extra_state(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: object
) -> None:
    del module, rest
    state_dict.setdefault(f"{prefix}_extra_state", None)
