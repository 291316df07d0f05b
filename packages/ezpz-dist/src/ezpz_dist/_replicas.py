"""The ranks that hold copies of a model: which they are, and whether all wrap the same."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from ezpz_device import as_dtype

from ._collectives import broadcast
from ._errors import CollectiveError, NotSetUpError, WrapError
from ._members import Call, Members, exchange, parties_of, payload_of
from ._objects import as_bytes
from ._world import current_world

if TYPE_CHECKING:
    from ezpz_tp import ParallelState


# What a module is wrapped by already.

_inside: WeakKeyDictionary[nn.Module, tuple[str, Callable[[], object]]] = WeakKeyDictionary()
"""Modules inside of a wrapper of ours: its name, and what tells whether it still exists."""


def find_wrapper(module: nn.Module) -> str | None:
    """Return what a module is wrapped by: ``"DDP"``, ``"FSDP1"``, ...; None if it is bare."""
    if isinstance(module, DistributedDataParallel):
        return "DDP"
    if isinstance(module, DataParallel):
        return "DataParallel"
    # Importing it takes half a second; where it was not imported nothing is made of it.
    if fsdp := sys.modules.get("torch.distributed.fsdp"):
        if isinstance(module, fsdp.FullyShardedDataParallel):
            return "FSDP1"
        if isinstance(module, getattr(fsdp, "FSDPModule", ())):
            return "FSDP2"
    packages = {kind.__module__.split(".")[0] for kind in type(module).__mro__}
    is_engine = "deepspeed" in packages and hasattr(module, "zero_optimization_stage")
    return "DeepSpeed" if is_engine else None


def home_of(name: str, found: Container[str]) -> str:
    """Return the innermost of the modules found that a name is in, or "", the root."""
    while name:
        name = name.rpartition(".")[0]
        if name in found:
            return name
    return ""


def remember_inside(model: nn.Module, name: str, wrapper: nn.Module | None = None) -> None:
    """Have `refuse_wrapped` know by what a model is wrapped: while the wrapper lives, or ever."""
    lives = (lambda: True) if wrapper is None else ref(wrapper)
    for module in model.modules():
        _inside[module] = name, lives


def refuse_wrapped(model: nn.Module) -> None:
    """Raise if a model, a part of it, or what it is a part of already trains on all ranks."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{model!r} to wrap; expected a torch.nn.Module")
    for name, module in model.named_modules():
        where = f"its part {name!r} is" if name else "it is"
        around, lives = _inside.get(module, ("", lambda: None))
        if wrapper := find_wrapper(module):
            found = f"{where} {wrapper}"
        elif lives() is not None:
            found = f"{where} inside of {around}"
        else:
            continue
        raise WrapError(
            f"{type(model).__name__} is wrapped already: {found}; expected the bare model; wrap "
            "it once"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise WrapError(
                f"{name} of {type(model).__name__} has no shape yet: it is lazy; expected one that "
                "has; run a batch through the model before, on every rank"
            )


# The ranks that hold a copy of the same model: all of them, or those of ezpz_tp's data axis.


class Replicas(Members):
    """The ranks whose gradients of one model are averaged. All start from the first's model."""

    __slots__ = ()

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.place == 0

    def send_first(self, data: torch.Tensor, what: str) -> None:
        """Fill a tensor, uint8 [bytes], with what the first rank has in it. Collective."""
        if self.size > 1 and data.numel():
            self.send(data, self.ranks[0], what)

    def name(self, places: Sequence[int]) -> str:
        """Say which ranks, and where they run: ``rank 1 on host-a, rank 5 on host-b``."""
        ranks = [self.ranks[place] for place in places]
        some = ", ".join(f"rank {rank} on {self.world.hosts[rank]}" for rank in ranks[:8])
        return some if len(ranks) <= 8 else f"{some}, and {len(ranks) - 8} more"


def find_replicas(call: str) -> Replicas:
    """Return the ranks over which a model is wrapped: of ezpz_tp's groups, where there are some."""
    world = current_world(call)
    everyone = dist.group.WORLD
    if world is None or everyone is None:
        raise NotSetUpError(f"{call} before setup_torch(); expected ezpz.setup_torch() first")
    rank, on_host = world.info.rank, world.on_host
    if (state := parallel_state()) is None:
        return Replicas(world, everyone, range(world.info.world_size), rank, on_host)
    # Ranks that share a sequence hold the same parameters, and each has a part of the gradient.
    axes = ("data", "context") if state.size("context") > 1 else ("data",)
    if not state.has_group(*axes):
        raise WrapError(
            f"{call}: no process group spans data x context ({state.size('data')} x "
            f"{state.size('context')}), over which gradients are averaged; make it with the "
            'others: ezpz_tp.initialize_tensor_parallel(..., also=[("data", "context")])'
        )
    ranks = tuple(state.ranks(*axes))
    return Replicas(world, state.group(*axes), ranks, ranks.index(rank), on_host)


def parallel_state() -> ParallelState | None:
    """Return ezpz_tp's groups if there are any; it is not imported for the question."""
    tp = sys.modules.get("ezpz_tp")
    state: ParallelState | None = None if tp is None else tp.current_state()
    return state if state is not None and state.is_live else None


def attributes_kept(model: nn.Module) -> AbstractContextManager[None]:
    """Keep what ezpz_tp says of parameters while others take their place."""
    tp = sys.modules.get("ezpz_tp")
    return nullcontext() if tp is None else tp.keep_attributes(model)


def start_alike(tensors: Sequence[torch.Tensor], replicas: Replicas) -> None:
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
            replicas.send_first(sent, "the model's start values")
            if sent.data_ptr() != tensor.data_ptr() and not replicas.is_first:
                tensor.copy_(sent.view(tensor.dtype).view(tensor.shape))


# Before anything is wrapped: can it be, and do all ranks wrap the same?

# torch compares nothing that is quick to compare: it waits until it times out, ends the process, or
# goes on with tensors of other shapes. Here each rank sends a checksum; who differs is looked for
# only if one does.

_CHOSEN = "device_id", "device_ids", "output_device", "process_group", "device_mesh"
RESERVED = dict.fromkeys(_CHOSEN, "it is chosen by the set-up: leave it out")


@contextmanager
def agreed(
    call: str,
    wrapped: nn.Module | Mapping[str, torch.Tensor],
    options: Mapping[str, object],
    replicas: Replicas,
) -> Iterator[dict[str, str]]:
    """Refuse on all ranks what one refuses inside, or wraps differently; yields what must agree."""
    lines: dict[str, str] = {}
    try:
        yield lines
        if isinstance(wrapped, nn.Module):
            parameters = wrapped.named_parameters(remove_duplicate=False)
            tensors = {f"parameter {name}": one for name, one in parameters}
            wrapped = tensors | {f"buffer {name}": one for name, one in wrapped.named_buffers()}
        lines |= {name: _of_tensor(tensor) for name, tensor in wrapped.items()}
    except Exception as error:  # whatever it is, the others wait to hear of it; raised again
        if replicas.size > 1:
            with suppress(CollectiveError):
                exchange(Call(call), replicas, refusal=error)
        raise
    if replicas.size == 1:
        return
    digest = hashlib.sha256(repr(list(lines.items())).encode()).digest()
    try:
        every = exchange(Call(_of_call(call, options)), replicas, digest)
    except CollectiveError as error:
        if type(error) is CollectiveError:  # a rank refuses; it has raised its own
            raise WrapError(str(error)) from None
        raise
    said = [bytes(payload_of(place, every)[: len(digest)]) for place in range(replicas.size)]
    if len(parties := parties_of(said)) > 1:
        raise WrapError(f"{call}: {_difference(lines, parties, replicas)}")


def check_model(
    call: str,
    model: nn.Module,
    replicas: Replicas,
    options: Mapping[str, object] | None = None,
    reserved: Mapping[str, str] | None = None,
) -> None:
    """Raise if a model cannot be wrapped here, or an option is given that is set-up's to choose."""
    refuse_wrapped(model)
    refuse_mps(call, replicas)
    for name, parameter in model.named_parameters():
        # As ezpz_tp, and Megatron, mark them.
        if not getattr(parameter, "allreduce", True):
            raise WrapError(
                f"{call}: {name} is an expert's: its copies are on the ranks of the expert_data "
                "group, not on these; wrap the model without its experts, and average their "
                'gradients over ezpz_tp.get_state().group("expert_data")'
            )
    check_options(call, options or {}, reserved or {})


def refuse_mps(call: str, replicas: Replicas) -> None:
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


def _of_call(call: str, options: Mapping[str, object]) -> str:
    lasting = (str, int, float, bool, torch.dtype)
    said = (
        f"{name}={value!r}" if isinstance(value, lasting) else f"{name}=<{type(value).__name__}>"
        for name, value in sorted(options.items())
        if value is not None  # a message has room for what was given
    )
    return f"{call.removesuffix('()')}({', '.join(said)})"


def _of_tensor(tensor: torch.Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    frozen = ", frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    # Gradients that lie otherwise in memory would be added element by wrong element.
    strides = "" if tensor.is_contiguous() else f", strides {list(tensor.stride())}"
    return f"{kind} {list(tensor.shape)}{strides}{frozen}{' on meta' if tensor.is_meta else ''}"


def _difference(lines: dict[str, str], parties: list[list[int]], replicas: Replicas) -> str:
    """Say who differs, and in what. Collective: one rank of each party says what it has."""
    right, wrong = parties[0][0], sorted(place for party in parties[1:] for place in party)
    theirs, odd = (
        broadcast(lines, replicas.ranks[place], replicas.group) for place in (right, wrong[0])
    )
    differ = [name for name in {**theirs, **odd} if theirs.get(name) != odd.get(name)]
    if not differ:
        what = "the parameters are in another order"
    else:
        there, here = (lines.get(differ[0], "missing") for lines in (odd, theirs))
        what = f"{differ[0]} is {there} there, and {here} on {replicas.name([right])}"
        if len(differ) > 1:
            what += f" (and {len(differ) - 1} more differ)"
    return (
        f"not the same on all ranks: {replicas.name(wrong)}: {what}; expected the same model on "
        "every rank; build it from the same arguments everywhere"
    )
