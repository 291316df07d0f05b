"""FSDP1, for those who need it."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ezpz_dist._errors import WrapError
from ezpz_dist._hangs.waiting import waiting

from .agreement import agreed, as_floating, refuse_experts, refuse_options, refuse_unmovable
from .materialize import has_meta
from .replicas import find_replicas, start_alike
from .units import find_units
from .wrapper import refuse_wrapped, remember_inside

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel

_CALL = "wrap_model_for_fsdp()"

_RESERVED = dict.fromkeys(
    ("process_group", "device_id", "device_mesh"), "it is chosen by the set-up: leave it out"
)


def wrap_model_for_fsdp(
    model: nn.Module,
    *,
    dtype: str | torch.dtype | None = None,
    units: Collection[type[nn.Module]] | None = None,
    **options: Any,
) -> FullyShardedDataParallel:
    """Shard a model by torch's FullyShardedDataParallel (FSDP1).

    torch calls it deprecated, and develops FSDP2 instead: prefer `wrap_model_for_fsdp2`, which
    also takes models on the meta device. Here for code that needs the class or its check-points.

    Collective: every rank calls this, once.

    Args:
        model: The bare model, the same on every rank; all start from the first rank's values.
        dtype: The type to compute in (``"bf16"``); gradients are reduced in fp32.
        units: As of `wrap_model_for_fsdp2`.
        options: Any of FullyShardedDataParallel's; they take the place of what is set here
            (``use_orig_params=True``, the units as ``auto_wrap_policy``).

    Raises:
        MismatchError: The ranks called something else, or with other options.
        NotSetUpError: `setup_torch` was not called.
        TypeError: ``model`` is no module.
        WrapError: The model is wrapped already, is on the meta device, or differs between ranks
            (names rank and parameter); or ``process_group``, ``device_id`` or a hybrid strategy
            is given.
        ValueError: ``dtype`` is not known, or no floating-point type.
    """
    from torch.distributed.fsdp import (  # noqa: PLC0415 - 0.6 s
        FullyShardedDataParallel,
        MixedPrecision,
    )
    from torch.distributed.fsdp.wrap import CustomPolicy  # noqa: PLC0415

    replicas = find_replicas(_CALL)
    precision = None
    with agreed(_CALL, model, {"dtype": dtype, **options}, replicas) as lines:
        refuse_wrapped(model)
        refuse_unmovable(_CALL, replicas)
        refuse_experts(_CALL, model)
        refuse_options(_CALL, options, _RESERVED)
        if "HYBRID" in str(options.get("sharding_strategy")):
            raise WrapError(
                f"{_CALL}: {options['sharding_strategy']}, which wants groups of its own; expected "
                "a strategy for one group; use wrap_model_for_fsdp2 with shard_size"
            )
        if dtype is not None:
            precision = MixedPrecision(
                param_dtype=as_floating(dtype),
                reduce_dtype=torch.float32,
                buffer_dtype=as_floating(dtype),
            )
        if has_meta(model):
            raise WrapError(
                f"{_CALL}: {type(model).__name__} is on the meta device; expected one with data: "
                "FSDP1 would fill the shards of all ranks with the same numbers; use "
                "wrap_model_for_fsdp2"
            )
        found = find_units(model, units)
        lines |= {f"unit {name}": type(module).__name__ for name, module in found.items()}
    start_alike([*model.parameters(), *model.buffers()], replicas)
    chosen = set(found.values())
    settings: dict[str, Any] = {
        "auto_wrap_policy": CustomPolicy(lambda module: module in chosen),
        "mixed_precision": precision,
        "use_orig_params": True,
        **options,
    }
    with warnings.catch_warnings(), waiting("FSDP1's start", replicas.world, replicas.ranks):
        # Said above, to the reader; no news to who runs the script. Nor is that one rank has
        # nothing to share out.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`")
        wrapped = FullyShardedDataParallel(
            model,
            process_group=replicas.group,
            device_id=replicas.world.device,
            **settings,
        )
    remember_inside(model, "FSDP1", wrapped)
    return wrapped
