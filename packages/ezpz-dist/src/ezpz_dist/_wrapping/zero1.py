"""ZeRO-1: each rank updates a part of the parameters, and holds the optimizer's state of these."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from ezpz_dist._errors import WrapError
from ezpz_dist._hangs.waiting import waiting

from .agreement import agreed, refuse_options
from .replicas import find_replicas

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

_CALL = "wrap_optimizer_for_zero1()"


def wrap_optimizer_for_zero1(
    optimizer_class: type[Optimizer],
    params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
    **options: Any,
) -> ZeroRedundancyOptimizer:
    """Share an optimizer's state out over the ranks, for a model wrapped by DDP (ZeRO-1).

    Parameters and gradients stay whole on every rank; each rank updates those that are its own
    and sends them to the others. AdamW's two states of a parameter are then on one rank only.

    For a check-point every rank calls ``optimizer.consolidate_state_dict(to=0)``, after which
    ``optimizer.state_dict()`` of rank 0 (of the data-parallel group) is that of a plain
    optimizer; ``load_state_dict`` takes it on every rank, whatever their number.

    Collective: every rank calls this, with the same parameters in the same order.

    Args:
        optimizer_class: ``torch.optim.AdamW``, say.
        params: Of the DDP model: all of one dtype. Or groups of parameters.
        options: The optimizer's own (``lr``, ...), and ZeroRedundancyOptimizer's
            (``parameters_as_bucket_view``).

    Raises:
        MismatchError: The ranks called something else, or with other options.
        NotSetUpError: `setup_torch` was not called.
        WrapError: The parameters are FSDP's, which shards the optimizer's state as well; or they
            differ between ranks; or ``process_group`` is given.
    """
    replicas = find_replicas(_CALL)
    given: list[Any] = list(params)
    tensors: dict[str, torch.Tensor] = {}
    asked = {"optimizer_class": getattr(optimizer_class, "__name__", None), **options}
    with agreed(_CALL, tensors, asked, replicas):
        every = [one for entry in given for one in _tensors(entry)]
        tensors |= {f"parameter {number}": one for number, one in enumerate(every)}
        refuse_options(
            _CALL, options, {"process_group": "it is chosen by the set-up: leave it out"}
        )
        for sharded, by in (("device_mesh", "FSDP2"), ("_fsdp_flattened", "FSDP1")):
            if any(hasattr(one, sharded) for one in every):
                raise WrapError(
                    f"{_CALL}: the parameters are {by}'s shards; expected those of a DDP model; "
                    f"use {optimizer_class.__name__} itself: its state is sharded as they are"
                )
    with warnings.catch_warnings(), waiting("ZeRO-1's start", replicas.world, replicas.ranks):
        # Importing it warns of TorchScript, which is not used here.
        warnings.simplefilter("ignore")
        from torch.distributed import optim  # noqa: PLC0415

        return optim.ZeroRedundancyOptimizer(
            given, optimizer_class=optimizer_class, process_group=replicas.group, **options
        )


def _tensors(entry: Any) -> list[torch.Tensor]:
    """Return the parameters of an entry of an optimizer's argument: one, or a group of them."""
    if isinstance(entry, torch.Tensor):
        return [entry]
    params = entry["params"]
    return [params] if isinstance(params, torch.Tensor) else list(params)
