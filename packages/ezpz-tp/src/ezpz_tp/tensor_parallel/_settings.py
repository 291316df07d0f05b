"""What a layer takes from Megatron-LM's configuration, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from ezpz_tp._errors import DegreeError
from ezpz_tp._groups.default import current_state, tensor_group
from ezpz_tp._groups.state import ParallelState
from ezpz_tp._layers.initialize import agree_on_seed
from ezpz_tp._training.broadcast import _backend_device
from ezpz_tp.model_parallel_config import setting

_UNSUPPORTED = ("defer_embedding_wgrad_compute", "gradient_accumulation_fusion", "cpu_offloading")


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """A layer's part of a configuration, resolved.

    Args:
        tp_group: The group to give to the layer; None is the default.
        degree: Number of ranks that share the layer.
        device: Where its parameters are made.
        dtype: Of its parameters.
        initialize: Whether its parameters are filled.
        seed: Of its weight; None draws one.
        sequence_parallel: As configured; at degree 1 too.
        leaves_communication: The layer of an expert: its caller moves the tokens.
        is_reduced_with_model: Its gradients are reduced as the rest of the model's, and not over
            the expert-data group.
    """

    tp_group: ProcessGroup | None
    degree: int
    device: torch.device
    dtype: torch.dtype
    initialize: bool
    seed: int | None
    sequence_parallel: bool
    leaves_communication: bool
    is_reduced_with_model: bool


def read_settings(
    layer: str,
    config: object,
    tp_group: ProcessGroup | None,
    pg_collection: object = None,
    is_expert: bool = False,
) -> LayerSettings:
    """Resolve a configuration for one layer. Collective for a layer of experts.

    Raises:
        DegreeError: The configuration names another degree than the group has.
        NotImplementedError: It asks for what would change what a layer computes.
    """
    _refuse_settings(layer, config, pg_collection, is_expert)
    state = current_state()
    if tp_group is None and is_expert and state is not None:
        tp_group = _expert_group(state)
    group = tensor_group(tp_group)
    degree = 1 if group is None else group.size()
    inner = setting(config, "expert_tensor_parallel_size")
    outer = setting(config, "tensor_model_parallel_size")
    _check_degree(layer, degree, inner or outer if is_expert else outer, is_expert)
    expert_degree = setting(config, "expert_model_parallel_size") if is_expert else 1
    experts = expert_degree > 1
    device = _device(config, group)
    initialize = bool(setting(config, "perform_initialization"))
    seed = None
    if experts:
        index = _expert_index(layer, state, expert_degree)
        if initialize:
            # Experts must not start as copies of each other, and the default generator is the
            # same on all expert ranks.
            seed = _expert_seed(agree_on_seed(None, group, device), index)
    return LayerSettings(
        tp_group=tp_group,
        degree=degree,
        device=device,
        dtype=setting(config, "params_dtype"),
        initialize=initialize,
        seed=seed,
        sequence_parallel=bool(setting(config, "sequence_parallel")),
        leaves_communication=is_expert and (degree > 1 or experts),
        is_reduced_with_model=not (is_expert and (experts or (inner or outer) != outer)),
    )


def _expert_group(state: ParallelState) -> ProcessGroup:
    """Return the group that shares an expert: the tensor group where its ranks are the same."""
    # A state of groups that were made elsewhere may not have it twice.
    same = state.layout is not None and state.ranks("expert_tensor") == state.ranks("tensor")
    return state.group("tensor" if same else "expert_tensor")


def refuse(layer: str, what: str, value: object, *supported: object) -> None:
    """Raise NotImplementedError unless the value is one that this package supports."""
    if value not in supported:
        raise NotImplementedError(
            f"{layer}: {what}={value!r} is not supported; expected "
            f"{' or '.join(repr(one) for one in supported)}"
        )


def _refuse_settings(layer: str, config: object, pg_collection: object, is_expert: bool) -> None:
    for name in _UNSUPPORTED:
        refuse(layer, f"config.{name}", bool(setting(config, name)), False)
    name = "expert_gtp_weight_remat_size" if is_expert else "gtp_weight_remat_size"
    refuse(layer, f"config.{name}", setting(config, name), 1)
    # Looked up in the instance, as in Megatron-LM: its collections answer to every name.
    groups = getattr(pg_collection, "__dict__", {})
    group = groups.get("expt_gtp_remat" if is_expert else "gtp_remat")
    refuse(layer, "size of pg_collection's gtp_remat group", group.size() if group else 1, 1)


def _check_degree(layer: str, degree: int, wanted: int, is_expert: bool) -> None:
    # 1 is also what a configuration says whose author left the degree to the groups.
    if wanted not in {1, degree}:
        name = "expert_tensor_parallel_size" if is_expert else "tensor_model_parallel_size"
        raise DegreeError(
            f"{layer}: config.{name}={wanted}, but its tensor-parallel group has size {degree}; "
            f"call initialize_model_parallel with {wanted} before building layers, or give the "
            "layer its tp_group"
        )


def _expert_index(layer: str, state: ParallelState | None, wanted: int) -> int:
    degree = 1 if state is None else state.size("expert")
    if state is None or degree != wanted:
        raise DegreeError(
            f"{layer}: config.expert_model_parallel_size={wanted}, but the expert-parallel group "
            f"has size {degree}; call initialize_model_parallel with {wanted} before building "
            "layers"
        )
    return state.index("expert")


def _expert_seed(seed: int, index: int) -> int:
    return (seed + index * 0x9E3779B97F4A7C15) % 2**63


def _device(config: object, group: ProcessGroup | None) -> torch.device:
    """Return where a layer's parameters are made.

    The default device where that was set (also to ``meta``), else the current accelerator, as
    in Megatron-LM; the CPU if the configuration says so, there is no accelerator, or the backend
    of the ranks is of the CPU (gloo).
    """
    default = torch.get_default_device()
    if default.type != "cpu" or setting(config, "use_cpu_initialization"):
        return default
    return _backend_device(group)
