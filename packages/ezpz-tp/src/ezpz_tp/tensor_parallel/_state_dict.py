"""What Megatron-LM's layers put into check-points besides their parameters."""

from __future__ import annotations

from typing import Any

from torch import nn


class ShardedStateDict:
    """A layer with Megatron-LM's name for distributed check-points, which is still to come."""

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Raise NotImplementedError: ``state_dict()`` holds this rank's parts."""
        del sharded_offsets, metadata
        raise NotImplementedError(
            f"{type(self).__name__} {prefix!r}: sharded_state_dict() is not supported; save "
            "state_dict() on each tensor-parallel rank, which holds this rank's parts"
        )


class ExtraState(ShardedStateDict):
    """A layer whose check-points have an empty ``_extra_state``, as Transformer Engine's do."""

    def get_extra_state(self) -> None:
        """Return None."""

    def set_extra_state(self, state: Any) -> None:
        """Ignore what another implementation saved."""

    def backward_dw(self) -> None:
        """Do nothing: gradients of weights are never delayed."""


def allow_without_extra_state(module: nn.Module) -> None:
    """Let a check-point without ``_extra_state`` be loaded strictly, as of a plain layer."""
    module.register_load_state_dict_pre_hook(_add_extra_state)


def _add_extra_state(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: object
) -> None:
    del module, rest
    state_dict.setdefault(f"{prefix}_extra_state", None)
