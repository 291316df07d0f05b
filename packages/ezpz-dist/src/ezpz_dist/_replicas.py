"""The ranks that hold copies of a model: which, their start values, and do all wrap the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from ezpz_device import as_dtype

from ._errors import CollectiveError, MismatchError, NotSetUpError, WrapError
from ._members import Call, Members, exchange
from ._objects import as_bytes
from ._world import current_world, parallel_state

# What a module is wrapped by already.

_inside: WeakKeyDictionary[nn.Module, tuple[str, Callable[[], object]]] = WeakKeyDictionary()
"""Modules inside of a wrapper of ours: its name, and a function that is true while it exists."""


def find_wrapper(module: nn.Module) -> str | None:
    """Return what a module is wrapped by: ``"DDP"``, ``"FSDP1"``, ...; None if it is bare."""
    if isinstance(module, DistributedDataParallel):
        return "DDP"
    if isinstance(module, DataParallel):
        return "DataParallel"
    # Importing it takes half a second; where it was not imported nothing is made of it.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        if isinstance(module, fsdp.FullyShardedDataParallel):
            return "FSDP1"
        if isinstance(module, fsdp.FSDPModule):
            return "FSDP2"
    if any(kind.__name__ == "DeepSpeedEngine" for kind in type(module).__mro__):
        return "DeepSpeed"
    return None


def register_wrapped(model: nn.Module, name: str, wrapper: nn.Module | None = None) -> None:
    """Have `refuse_wrapped` know by what a model is wrapped: while the wrapper lives, or ever."""
    is_alive: Callable[[], object] = lambda: True  # noqa: E731 - in place of a weak reference
    if wrapper is not None:
        is_alive = ref(wrapper)
    for module in model.modules():
        _inside[module] = (name, is_alive)


def refuse_wrapped(model: nn.Module) -> None:
    """Raise if a model, a part of it, or what it is a part of already trains on all ranks."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{model!r} to wrap; expected a torch.nn.Module")
    for name, module in model.named_modules():
        wrapper = find_wrapper(module)
        if wrapper is None and module in _inside:
            outer, is_alive = _inside[module]
            if is_alive():
                wrapper = f"inside of {outer}"
        if wrapper is not None:
            part = f"its part {name!r}" if name else "it"
            raise WrapError(
                f"{type(model).__name__} is wrapped already: {part} is {wrapper}; expected the "
                "bare model; wrap it once"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise WrapError(
                f"{name} of {type(model).__name__} has no shape yet: it is lazy; expected one that "
                "has; run a batch through the model before, on every rank"
            )


# The ranks that hold a copy of the same model: all of them, or those of ezpz_tp's data axis.


def find_replicas(call: str) -> Members:
    """Return the ranks whose gradients of one model are averaged, by ezpz_tp's groups if any."""
    world = current_world(call)
    everyone = dist.group.WORLD
    if world is None or everyone is None:
        raise NotSetUpError(f"{call} before setup_torch(); expected ezpz.setup_torch() first")
    rank = world.info.rank
    on_host = world.on_host
    state = parallel_state()
    if state is None:
        return Members(world, everyone, range(world.info.world_size), rank, on_host)
    axes: tuple[str, ...] = ("data",)
    if state.size("context") > 1:
        # Ranks that share a sequence hold the same parameters, and each has a part of the gradient.
        axes = ("data", "context")
    if not state.has_group(*axes):
        raise WrapError(
            f"{call}: no process group spans data x context ({state.size('data')} x "
            f"{state.size('context')}), over which gradients are averaged; make it with the "
            'others: ezpz_tp.initialize_tensor_parallel(..., also=[("data", "context")])'
        )
    ranks = tuple(state.ranks(*axes))
    return Members(world, state.group(*axes), ranks, ranks.index(rank), on_host)


def broadcast_start_values(tensors: Sequence[torch.Tensor], replicas: Members) -> None:
    """Move tensors to this rank's device and give all ranks the first one's values."""
    device = replicas.world.device
    with torch.no_grad():
        for tensor in tensors:
            if tensor.is_meta:
                continue
            if tensor.device != device:
                tensor.data = tensor.data.to(device)
            # As bytes: backends send few of torch's types, and contiguous memory only.
            sent = as_bytes(tensor)
            if replicas.size > 1 and sent.numel():
                replicas.send(sent, replicas.ranks[0], "the model's start values")
            if sent.data_ptr() != tensor.data_ptr() and replicas.place > 0:
                values = sent.view(tensor.dtype).view(tensor.shape)
                strides = tensor.stride()
                _drop_repeats(tensor, strides).copy_(_drop_repeats(values, strides))


def is_expanded(tensor: torch.Tensor) -> bool:
    """True if elements along a dim are one in memory, to which torch refuses to write."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return False
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in dims)


def _drop_repeats(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return the first element along each dim of stride 0."""
    for dim, stride in enumerate(strides):
        if stride == 0 and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def unexpand_buffers(model: nn.Module) -> None:
    """Give each element of the buffers its own memory, where they are going to be written to."""
    for buffer in model.buffers():
        if is_expanded(buffer):
            buffer.data = buffer.data.contiguous()


def refuse_expanded(call: str, name: str, parameter: torch.Tensor) -> None:
    if is_expanded(parameter):
        raise WrapError(
            f"{call}: {name} has the strides {list(parameter.stride())} for the shape "
            f"{list(parameter.shape)}, so that an optimizer cannot write to it; expected memory of "
            "its own for each element; make it so before: "
            "parameter.data = parameter.data.contiguous()"
        )


# From the meta device to memory: each module's own initialization fills what the module holds.

Initialize = Callable[[nn.Module], object]
"""Fills the parameters and buffers that a module has itself, those of its children aside."""

Holder = tuple[nn.Module, str]
"""The module that has a tensor, and the tensor's name in it."""


def has_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def refuse_unfillable(model: nn.Module, initialize: Initialize | None) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta and hasattr(parameter, "device_mesh"):
            raise WrapError(
                f"{name} is a DTensor on the meta device; expected a plain parameter there; "
                "give it its values before it is sharded"
            )
    if initialize is not None:
        return
    lacking: list[str] = []
    for name, module in model.named_modules():
        own = ", ".join(_list_meta_tensors(module))
        if own and _find_reset(module) is None:
            lacking.append(f"{name or 'the model'} ({type(module).__name__}: {own})")
    if lacking:
        raise WrapError(
            f"a model on the meta device, and no way to fill {'; '.join(lacking)}; expected a "
            "method reset_parameters(), which fills what a module holds itself; write one, or "
            "give initialize=, called with each module"
        )


def materialize(model: nn.Module, device: torch.device, initialize: Initialize | None) -> None:
    """Give memory and values to all that is on the meta device."""
    holders: dict[torch.Tensor, Holder] = {}
    for module in children_first(model):
        materialize_module(module, device, initialize, holders)


def children_first(module: nn.Module, seen: set[nn.Module] | None = None) -> Iterator[nn.Module]:
    """Yield each module once, after all that it contains: mostly the order of construction."""
    seen = set() if seen is None else seen
    for child in module.children():
        if child not in seen:
            yield from children_first(child, seen)
    seen.add(module)
    yield module


def materialize_module(
    module: nn.Module,
    device: torch.device,
    initialize: Initialize | None,
    holders: dict[torch.Tensor, Holder],
) -> None:
    """Give memory and values to what a module has itself; note in ``holders`` where it is now."""
    own = _list_meta_tensors(module)
    if not own:
        return
    for name, empty in own.items():
        setattr(module, name, _allocate(empty, device))
    _initialize_module(module, initialize)
    for name, empty in own.items():
        # Of a tied parameter the first draw counts, as where the second use was assigned.
        holder, name_in_holder = holders.setdefault(empty, (module, name))
        setattr(module, name, getattr(holder, name_in_holder))


def _initialize_module(module: nn.Module, initialize: Initialize | None) -> None:
    shards = []
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "device_mesh"):
            # The version counts what is written to a tensor. There is no public way to ask.
            shards.append((name, parameter, parameter._version))  # noqa: SLF001
    with torch.no_grad():
        reset = _find_reset(module)
        if reset is not None:
            reset()
        if initialize is not None:
            initialize(module)
    for name, shard, version in shards:
        # Each rank would draw other numbers, or all the same.
        if shard._version != version:  # noqa: SLF001
            raise WrapError(
                f"the initialization of {type(module).__name__} writes to {name}, which is "
                "sharded by then; expected it to fill what the module holds itself; let each "
                "module fill its own"
            )


def _list_meta_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that a module has itself on the meta device, by name."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    buffers = module.named_buffers(recurse=False, remove_duplicate=False)
    return {name: tensor for name, tensor in chain(parameters, buffers) if tensor.is_meta}


def _find_reset(module: nn.Module) -> Callable[[], object] | None:
    for name in ("reset_parameters", "_reset_parameters"):  # torch's MultiheadAttention's
        method = getattr(module, name, None)
        if callable(method):
            return method  # type: ignore[no-any-return]
    return None


def _allocate(empty: torch.Tensor, device: torch.device) -> torch.Tensor:
    tensor = torch.empty_like(empty, device=device)
    if tensor.is_floating_point() or tensor.is_complex():
        # What no initialization writes is then seen in the first loss.
        tensor.fill_(torch.nan)
    if not isinstance(empty, nn.Parameter):
        return tensor
    parameter = nn.Parameter(tensor, requires_grad=empty.requires_grad)
    vars(parameter).update(vars(empty))
    return parameter


# Before anything is wrapped: can it be, and do all ranks wrap the same?

# torch compares nothing that is quick to compare: it waits until it times out, ends the process, or
# goes on with tensors of other shapes.

_CHOSEN_BY_SET_UP = ("device_id", "device_ids", "output_device", "process_group", "device_mesh")
RESERVED = dict.fromkeys(_CHOSEN_BY_SET_UP, "it is chosen by the set-up: leave it out")
"""Options of torch's wrappers that ours do not take, and the remedy."""


@contextmanager
def require_agreement(
    call: str,
    wrapped: nn.Module | Mapping[str, torch.Tensor],
    options: Mapping[str, object],
    replicas: Members,
) -> Iterator[dict[str, str]]:
    """Refuse on all ranks what one refuses inside, or wraps differently.

    Yields a dict for what else must be the same on all ranks, by name.
    """
    lines: dict[str, str] = {}
    try:
        yield lines
        for name, tensor in _name_tensors(wrapped).items():
            lines[name] = _describe_tensor(tensor)
    except Exception as error:  # whatever it is, the others wait to hear of it; raised again
        if replicas.size > 1:
            with suppress(CollectiveError):
                exchange(Call(call), replicas, refusal=error)
        raise
    if replicas.size == 1:
        return
    try:
        exchange(Call(_describe_call(call, options)), replicas)
    except CollectiveError as error:
        if type(error) is CollectiveError:  # a rank refuses, and has raised its own error
            raise WrapError(str(error)) from None
        raise
    try:
        exchange(Call(call, leaves=tuple(lines.items())), replicas)
    except MismatchError as error:
        raise WrapError(
            f"{call}: not the same on all ranks: {error}; build the model from the same arguments "
            "everywhere"
        ) from None


def _name_tensors(wrapped: nn.Module | Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    if not isinstance(wrapped, nn.Module):
        return wrapped
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in wrapped.named_parameters(remove_duplicate=False):
        tensors[f"parameter {name}"] = parameter
    for name, buffer in wrapped.named_buffers():
        tensors[f"buffer {name}"] = buffer
    return tensors


def _describe_call(call: str, options: Mapping[str, object]) -> str:
    texts = []
    for name, value in sorted(options.items()):
        if isinstance(value, (str, int, float, bool, torch.dtype)):
            texts.append(f"{name}={value!r}")
        elif value is not None:  # those that are not given would fill the message
            texts.append(f"{name}=<{type(value).__name__}>")
    return f"{call.removesuffix('()')}({', '.join(texts)})"


def _describe_tensor(tensor: torch.Tensor) -> str:
    text = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if not tensor.is_contiguous():
        # Gradients that lie otherwise in memory would be added element by wrong element.
        text += f", strides {list(tensor.stride())}"
    if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
        text += ", frozen"
    if tensor.is_meta:
        text += " on meta"
    return text


def check_model(
    call: str,
    model: nn.Module,
    replicas: Members,
    options: Mapping[str, object] | None = None,
    reserved: Mapping[str, str] | None = None,
) -> None:
    """Raise if a model cannot be wrapped here, or an option is given that is set-up's to choose."""
    refuse_wrapped(model)
    refuse_mps(call, replicas)
    for name, parameter in model.named_parameters():
        refuse_expanded(call, name, parameter)
        # As ezpz_tp, and Megatron, mark them.
        if not getattr(parameter, "allreduce", True):
            raise WrapError(
                f"{call}: {name} is an expert's: its copies are on the ranks of the expert_data "
                "group, not on these; wrap the model without its experts, and average their "
                'gradients over ezpz_tp.get_state().group("expert_data")'
            )
    check_options(call, options or {}, reserved or {})


def refuse_mps(call: str, replicas: Members) -> None:
    if replicas.world.device.type == "mps":
        raise WrapError(
            f"{call} over {replicas.size} rank(s) on mps, from which gloo cannot send; expected "
            "one process, and wrap_model, which leaves the model as it is there; to run several "
            "ranks compute on the CPU: TORCH_DEVICE=cpu"
        )


def check_options(call: str, options: Mapping[str, object], reserved: Mapping[str, str]) -> None:
    for name in options.keys() & reserved.keys():
        raise WrapError(f"{call} takes no {name}; {reserved[name]}")


def as_floating(dtype: str | torch.dtype, what: str = "dtype") -> torch.dtype:
    wanted = as_dtype(dtype)
    if not wanted.is_floating_point:
        raise ValueError(f"{what} {wanted}; expected a floating-point type")
    return wanted
