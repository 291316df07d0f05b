"""From the meta device to memory, one module at a time, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ._errors import WrapError
from ._replicas import Replicas

Initialize = Callable[[nn.Module], object]
"""Fills the parameters and buffers that a module has itself, those of its children aside."""


def has_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def refuse_unfillable(model: nn.Module, initialize: Initialize | None) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta and hasattr(parameter, "device_mesh"):
            raise WrapError(
                f"{name} is a DTensor on the meta device; expected a plain parameter there; "
                "give it its values before it is sharded"
            )
    lacking = [
        f"{name or 'the model'} ({type(module).__name__}: {', '.join(_own_meta(module))})"
        for name, module in model.named_modules()
        if initialize is None and _reset_of(module) is None and _own_meta(module)
    ]
    if lacking:
        raise WrapError(
            f"a model on the meta device, and no way to fill {'; '.join(lacking)}; expected a "
            "method reset_parameters(), which fills what a module holds itself; write one, or "
            "give initialize=, called with each module"
        )


def materialize(
    model: nn.Module,
    device: torch.device,
    initialize: Initialize | None = None,
    *,
    replicas: Replicas | None = None,
    keep_on: torch.device | None = None,
) -> None:
    """Give data to what is on the meta device; on all replicas the same. Collective over them."""
    # Module by module, children first, in the order in which constructors mostly draw: whole
    # tensors are filled, and of a sharded parameter each rank keeps its shard. So no rank ever
    # holds more whole tensors than one module has itself, and with equal generators the shards
    # are parts of one draw.
    filled: dict[torch.Tensor, torch.Tensor] = {}
    if not has_meta(model):
        return
    with nullcontext() if replicas is None else _first_ranks_draws(device, replicas):
        for name, module in _children_first(model, "", set()):
            own = _own_meta(module)
            for key, empty in own.items():
                setattr(module, key, _marked(empty, device))
            if own:
                with torch.no_grad(), _WholeDraws():  # type: ignore[no-untyped-call]
                    if (reset := _reset_of(module)) is not None:
                        reset()
                    if initialize is not None:
                        initialize(module)
            for key, empty in own.items():
                whole = getattr(module, key)
                if _is_untouched(whole):
                    path = f"{name}.{key}".removeprefix(".")
                    raise WrapError(
                        f"{path} of shape {list(whole.shape)} was built on the meta device, and "
                        f"{'initialize' if initialize else 'reset_parameters'} of "
                        f"{type(module).__name__} leaves it unfilled, or in part; expected it to "
                        "fill all that the module holds itself"
                    )
                # Of a tied parameter the first draw counts, as where the second use was assigned.
                if empty not in filled:
                    filled[empty] = _kept(whole, empty, keep_on or device)
                setattr(module, key, filled[empty])


@contextmanager
def _first_ranks_draws(device: torch.device, replicas: Replicas) -> Iterator[None]:
    """Let all ranks draw from torch's generators as the first does; it alone is further on then."""
    # torch's functions for the CPU, whose state is 5 KB, and the device's, of 16 bytes.
    modules = [torch.random, *([torch.get_device_module(device)] if device.type != "cpu" else [])]
    own = [module.get_rng_state() for module in modules]

    def give(states: list[torch.Tensor]) -> None:
        for module, state in zip(modules, states, strict=True):
            module.set_rng_state(state)

    states = [state.clone() for state in own]
    for state in states:
        replicas.send_first(state, "the state of the first rank's generators")
    give(states)
    try:
        yield
    finally:
        if not replicas.is_first:
            give(own)


def _children_first(
    module: nn.Module, path: str, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module once, after all that it contains: as constructors make them."""
    if module in seen:
        return
    seen.add(module)
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}.{name}".removeprefix("."), seen)
    yield path, module


def shard_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - only where there are some

    assert isinstance(like, DTensor)
    part = _part(whole, like).clone(memory_format=torch.contiguous_format)
    about: Any = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(part, like.device_mesh, like.placements, **about)


class _WholeDraws(TorchDispatchMode):
    """Let a random operation on a shard draw the whole tensor, and keep this rank's part."""

    # A module's reset_parameters may reach into its children, which are shards by then: torch on
    # the CPU would draw the same numbers into the shard of every rank.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        shards = [one for one in (*args, *kwargs.values()) if hasattr(one, "device_mesh")]
        if torch.Tag.nondeterministic_seeded not in func.tags or not shards:
            return func(*args, **kwargs)
        target, name = shards[0], func.overloadpacket.__name__
        fills, makes = name.endswith("_"), name.endswith("_like")
        if len(shards) > 1 or args[0] is not target or not (fills or makes):
            raise WrapError(
                f"torch.{name} of a parameter that is sharded by then, in the reset_parameters() "
                "of a module around it; expected it to be drawn in place, by normal_() say; or "
                "let each module fill its own"
            )
        local = target.to_local()
        whole = torch.empty(target.shape, dtype=target.dtype, device=local.device)
        drawn = func(whole, *args[1:], **kwargs)
        if makes:
            return shard_like(drawn, target)
        local.copy_(_part(whole, target))
        return target


def _part(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """Return the part of a whole tensor that a DTensor holds on this rank."""
    part, mesh = whole, like.device_mesh
    for axis, placement in enumerate(like.placements):
        if placement.is_shard():
            index, chunks = mesh.get_local_rank(axis), part.chunk(mesh.size(axis), placement.dim)
            part = chunks[index] if index < len(chunks) else part.narrow(placement.dim, 0, 0)
    return part


def _kept(whole: torch.Tensor, empty: torch.Tensor, where: torch.device) -> torch.Tensor:
    is_shard = hasattr(empty, "device_mesh")
    if not isinstance(empty, nn.Parameter) or (whole.device == where and not is_shard):
        return whole
    values = shard_like(whole.detach(), empty) if is_shard else whole.detach()
    return _parameter_like(values.to(where), empty)


def _parameter_like(values: torch.Tensor, empty: nn.Parameter) -> nn.Parameter:
    parameter = nn.Parameter(values, requires_grad=empty.requires_grad)
    vars(parameter).update(vars(empty))
    return parameter


def _own_meta(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return what a module holds itself, and has no data of, by name."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    buffers = module.named_buffers(recurse=False, remove_duplicate=False)
    return {name: tensor for name, tensor in (*parameters, *buffers) if tensor.is_meta}


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    names = "reset_parameters", "_reset_parameters"  # torch's MultiheadAttention has the other
    return next(filter(callable, (getattr(module, name, None) for name in names)), None)


def _marked(empty: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a whole tensor by whose content one sees whether it was filled."""
    whole = torch.empty(empty.shape, dtype=empty.dtype, device=device)
    if _is_marked_by_value(empty):
        whole.fill_(torch.nan)
    return _parameter_like(whole, empty) if isinstance(empty, nn.Parameter) else whole


def _is_untouched(tensor: torch.Tensor) -> bool:
    if tensor.is_meta:
        return True
    if not tensor.numel():
        return False
    if _is_marked_by_value(tensor):
        return bool(torch.isnan(tensor.detach()).any())
    return tensor._version == 0  # noqa: SLF001 - no public way to ask


def _is_marked_by_value(tensor: torch.Tensor) -> bool:
    # 8-bit types are compared by few of torch's kernels.
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.element_size() > 1
