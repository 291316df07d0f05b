"""Low-rank adapters (Hu et al., arXiv:2106.09685) on plain and parallel linear layers.

A layer keeps its class and its names. It gets two small layers, ``lora_A`` and ``lora_B``, and a
hook that adds their output to its own. What tensor-parallel ranks hold of them, and what they sum:

layer            lora_A        lora_B     summed                   and under sequence parallelism
---------------  ------------  ---------  -----------------------  -------------------------------
column-parallel  whole         its rows   gradient of A's output   A's gradient, by finalize_grads
row-parallel     its columns   whole      A's output               B's gradient, by finalize_grads
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ._current import current_state, tensor_group
from ._errors import DegreeError, ParallelError
from ._formats import Stored, load_json, new_folder
from ._formats.safetensors import open_safetensors, write_safetensors
from ._groups import live_world
from ._init import InitMethod, agree_on_seed, held_part, initialize_shard
from ._linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    ShardedLinear,
    keep_attributes,
    mark_sequence_parallel,
)
from ._random import get_rng_tracker
from ._shard import Piece, Shard, whole
from ._state import ParallelState
from ._state_dict import Part, all_or_none, gather_full, tell_all

# The two halves of an adapter, and what they add to a layer's output.


class _Adapter(NamedTuple):
    """What a layer knows of its adapter."""

    name: str  # of the layer, in the model that was adapted: wrappers do not change it
    rank: int
    alpha: float
    dropout: float
    splits_input: bool  # each tensor-parallel rank is given another part of the input
    hook: RemovableHandle


class _WholeLinear(nn.Linear):
    """A half that every tensor-parallel rank holds whole, equal at every degree."""

    def __init__(
        self, in_features: int, out_features: int, init_method: InitMethod, seed: int, **where: Any
    ) -> None:
        self._init_method, self._seed = init_method, seed  # the constructor fills the weight
        super().__init__(in_features, out_features, bias=False, **where)

    def reset_parameters(self) -> None:
        weight = self.weight
        initialize_shard(weight, weight.shape, None, 0, 1, self._init_method, seed=self._seed)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with keep_attributes(self):  # `to_empty` makes a new parameter
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


_uniform = partial(nn.init.kaiming_uniform_, a=math.sqrt(5))  # as PEFT, and torch's own layers
_zeros = nn.init.zeros_


def _halves(layer: Any, rank: int, seed: int, where: Any) -> tuple[nn.Linear | ShardedLinear, ...]:
    inputs, outputs = layer.in_features, layer.out_features
    down: nn.Linear | ShardedLinear = _WholeLinear(inputs, rank, _uniform, seed, **where)
    up: nn.Linear | ShardedLinear = _WholeLinear(rank, outputs, _zeros, 0, **where)
    partial_gradients = [down, up] if getattr(layer.weight, "sequence_parallel", False) else []
    if getattr(layer, "tp_group", None) is None:
        pass
    elif isinstance(layer, ColumnParallelLinear):
        up = ColumnParallelLinear(
            rank, outputs, bias=False, gather_output=layer.gather_output, init_method=_zeros,
            stride=layer.stride, sequence_parallel=layer.sequence_parallel, seed=0,
            pad_output=outputs % layer.tp_size > 0, tp_group=layer.tp_group, **where,
        )  # fmt: skip
        # Where the caller sums the gradient of the layer's input, that of A is partial too.
        up.reduce_input_gradient = layer.reduce_input_gradient
        if layer.sequence_parallel or not layer.reduce_input_gradient:
            partial_gradients = [down]
    else:
        down = RowParallelLinear(
            inputs, rank, bias=False, input_is_parallel=layer.input_is_parallel,
            init_method=_uniform, stride=layer.stride, seed=seed,
            sequence_parallel=layer.sequence_parallel, tp_group=layer.tp_group, **where,
        )  # fmt: skip
        if layer.sequence_parallel:
            partial_gradients = [up]
    for half in partial_gradients:
        mark_sequence_parallel(half.weight)
    return down, up


def _splits_input(layer: Any) -> bool:
    if isinstance(layer, RowParallelLinear):
        return layer.tp_group is not None and layer.input_is_parallel
    if isinstance(layer, ColumnParallelLinear):
        return layer.sequence_parallel
    return getattr(layer.weight, "sequence_parallel", False) and tensor_group() is not None


def _add(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Add an adapter's output to its layer's: a forward hook, with PEFT's order of operations."""
    adapter: _Adapter = layer.lora
    input_: Tensor = args[0] if args else next(iter(kwargs.values()))
    input_ = input_.to(layer.lora_A.weight.dtype)
    if adapter.dropout and layer.training:
        # Of the same input every rank drops the same; of its own part, each something else.
        own = adapter.splits_input
        with get_rng_tracker().fork() if own else contextlib.nullcontext():
            input_ = nn.functional.dropout(input_, adapter.dropout)
    added = layer.lora_B(layer.lora_A(input_)) * (adapter.alpha / adapter.rank)
    if isinstance(output, tuple):  # and the bias that the caller adds
        return ((output[0] + added).to(output[0].dtype), *output[1:])
    return (output + added).to(output.dtype)


# Adapters put on a model, and merged into it.


def apply_lora(
    model: nn.Module,
    targets: str | Iterable[str] = ("q_proj", "v_proj"),
    rank: int = 8,
    alpha: float = 16,
    dropout: float = 0.0,
    *,
    seed: int | None = None,
    dtype: torch.dtype | None = None,
) -> list[str]:
    """Put low-rank adapters on linear layers, in place, and freeze everything else.

    A layer ``y = W x`` becomes ``y = W x + (alpha / rank) B A dropout(x)``. Its own names stay, so
    that the model's files still load. A and B are ``<layer>.lora_A.weight`` ``[rank, in]`` and
    ``<layer>.lora_B.weight`` ``[out, rank]``, split as the layer is. A is drawn as PEFT does it,
    equal on all ranks and at every degree. B is zero, so that the model computes what it did.

    Call it before the model is wrapped (DDP, FSDP2, torch.compile) and the optimizer is made.
    Under tensor parallelism call `finalize_grads` after backward.
    Collective unless ``seed`` is given: every rank calls this.

    Args:
        model: Has ``nn.Linear``, `ColumnParallelLinear` or `RowParallelLinear`.
        targets: Which of its layers, as PEFT's ``target_modules``: ends of names, or one regular
            expression that matches whole names.
        rank: Rows of A and columns of B.
        alpha: What the adapter adds is multiplied by ``alpha / rank``.
        dropout: Chance of an input of A to be zero in training.
        seed: Of A; default: drawn from torch's default generator.
        dtype: Of A and B; default: the layer's, or float32 where that has 16 bits.

    Returns:
        The names of the layers that have adapters now.

    Raises:
        ParallelError: No layer matches; or one that is not linear, is an expert's, or is used
            without being called. Or the model is wrapped, or has adapters already.
        ValueError: ``rank``, ``alpha`` or ``dropout`` is out of range.
    """
    if rank < 1 or alpha <= 0 or not 0 <= dropout < 1:
        raise ValueError(
            f"rank={rank}, alpha={alpha}, dropout={dropout}; expected a rank of at least 1, alpha "
            "above 0, and dropout from 0 to below 1"
        )
    if isinstance(model, DistributedDataParallel) or _is_sharded(model):
        raise ParallelError(
            f"apply_lora: {type(model).__name__} is wrapped already, by what would not reduce the "
            "adapters' gradients; call apply_lora first, then wrap the model"
        )
    if any(_adapted(model)):
        raise ParallelError("apply_lora: the model has adapters; expected none: call merge_lora")
    chosen = targets if isinstance(targets, str) else tuple(targets)
    layers = {n: _checked(model, n) for n, _ in model.named_modules() if _matches(n, chosen)}
    state = current_state()
    if not layers and (state is None or state.size("pipeline") == 1):
        ends = {n.rpartition(".")[2] for n, one in model.named_modules() if _is_linear(one)}
        raise ParallelError(
            f"apply_lora: targets {chosen!r} match no module of {type(model).__name__}; expected "
            f"some of {', '.join(sorted(ends)) or 'its linear layers, of which there are none'}"
        )
    if seed is None:
        seed = agree_on_seed(None, live_world() or tensor_group())
    model.requires_grad_(False)
    for name, layer in layers.items():
        own: torch.dtype = layer.weight.dtype
        wide = torch.float32 if own.itemsize == 2 else own
        where = {"device": layer.weight.device, "dtype": dtype or wide}
        # By name, so that stages of a pipeline draw what the whole model does.
        halves = _halves(layer, rank, seed + zlib.crc32(name.encode()), where)
        layer.lora_A, layer.lora_B = halves
        hook = layer.register_forward_hook(_add, with_kwargs=True)
        layer.lora = _Adapter(name, rank, alpha, dropout, _splits_input(layer), hook)
    return list(layers)


def _matches(name: str, targets: str | tuple[str, ...]) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | ColumnParallelLinear | RowParallelLinear)


def _is_sharded(model: nn.Module) -> bool:
    return any(hasattr(one, "device_mesh") for one in model.parameters())


def _checked(model: nn.Module, name: str) -> Any:
    """Return a layer that can have an adapter."""
    layer: Any = model.get_submodule(name)
    if not _is_linear(layer) or layer.weight is None or not layer.weight.is_floating_point():
        found = f"is a {type(layer).__name__}"
    elif not getattr(layer.weight, "allreduce", True):
        found = "is an expert's (allreduce is False), whose gradients other groups reduce"
    elif isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
        found = "belongs to nn.MultiheadAttention, which uses its weight without calling it"
    else:
        return layer
    raise ParallelError(
        f"apply_lora: {name} {found}; expected an nn.Linear, ColumnParallelLinear or "
        "RowParallelLinear of floating-point weight that is called: give targets that match such"
    )


def _adapted(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(vars(module).get("lora"), _Adapter))


@torch.no_grad()
def merge_lora(model: nn.Module) -> None:
    """Add every adapter to the weight of its layer, in place, and take the adapters out.

    The model has then the modules and names that it had before `apply_lora`. Its weights stay
    frozen. Nothing is sent: each tensor-parallel rank has what its part of a weight needs.

    Raises:
        ParallelError: The model has no adapters. Or FSDP2 shards it: save the adapters, and load
            them into a model that is not wrapped. Or another module has one of the weights too.
    """
    layers = list(_adapted(model))
    if not layers or _is_sharded(model):
        found = "FSDP2 shards the model" if layers else "the model has no adapters"
        raise ParallelError(
            f"merge_lora: {found}; expected one that is not wrapped, with adapters: call save_lora "
            "where they are, and load_lora and merge_lora on the bare model"
        )
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for shared in (names.get(id(layer.weight), ()) for layer in layers):
        if len(shared) > 1:
            raise ParallelError(
                f"merge_lora: {' and '.join(shared)} are one weight, and one of them has an "
                "adapter; keep it, or give them weights of their own first"
            )
    for layer in layers:
        # Rows that pad a vocabulary are zero in B too.
        added = layer.lora_B.weight @ layer.lora_A.weight
        layer.weight.add_(added * (layer.lora.alpha / layer.lora.rank))
        layer.lora.hook.remove()
        del layer.lora_A, layer.lora_B, layer.lora


# Whole adapters in memory, and in PEFT's files.


def lora_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole adapters of a model, wrapped or not, on the CPU of every rank.

    Collective: every rank calls this, where layers are parallel, FSDP2 shards them, or stages of
    a pipeline have some each.

    Returns:
        ``<layer>.lora_A.weight`` and ``<layer>.lora_B.weight``, without the names that DDP and
        other wrappers add. Empty where there are no adapters.
    """
    found = {name: _joined(half) for name, half in _named_halves(model)}
    if (state := current_state()) is not None:
        stages = tell_all(found, state, ("pipeline",))
        found = {name: tensor for stage in stages for name, tensor in stage.items()}
    return found


def _named_halves(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for layer in _adapted(model):
        yield f"{layer.lora.name}.lora_A.weight", layer.lora_A
        yield f"{layer.lora.name}.lora_B.weight", layer.lora_B


def _shard_of(half: Any) -> Shard:
    # Asked of the layer: FSDP2 may have dropped the attributes of the parameter.
    if isinstance(half, ShardedLinear):
        padded = half.full_shape[half.partition_dim] % half.tp_size > 0
        return Shard(half.full_shape, half.partition_dim, half.blocks(), padded)
    return Shard((half.out_features, half.in_features))


def _joined(half: Any) -> Tensor:
    weight: Any = half.weight.detach()
    if hasattr(weight, "full_tensor"):
        weight = weight.full_tensor()
    if isinstance(half, ShardedLinear) and half.tp_group is not None:
        weight = gather_full(Part(weight, _shard_of(half)), half.tp_group, None)
    joined: Tensor = weight.to("cpu", copy=True)
    return joined


_CONFIG, _TENSORS, _PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."


def save_lora(model: nn.Module, folder: str | Path) -> None:
    """Write the adapters of a model to a new folder, in PEFT's layout.

    ``adapter_config.json`` and ``adapter_model.safetensors``, which ``PeftModel.from_pretrained``
    loads onto the model that this one was made of. Rank 0 writes aside, and renames the folder
    when it is whole. Neither PEFT nor safetensors has to be installed.

    Collective: every rank calls this.

    Args:
        model: Wrapped or not.
        folder: There is none yet, or an empty one.

    Raises:
        ParallelError: On every rank: the model has no adapters, or the folder is not empty, or
            cannot be written.
    """
    tensors, state = lora_state_dict(model), _world_state()
    here = next((layer.lora for layer in _adapted(model)), None)
    # In a pipeline, rank 0's stage may have none.
    found = [one for one in tell_all(here and here[1:4], state) if one]
    if not found:
        raise ParallelError("save_lora: the model has no adapters; expected apply_lora before")
    rank, alpha, dropout = found[0]
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": alpha, "lora_dropout": dropout,
        "target_modules": list(_modules_of(tensors)), "bias": "none", "init_lora_weights": True,
        "fan_in_fan_out": False, "inference_mode": True, "task_type": None,
        "base_model_name_or_path": None,
    }  # fmt: skip
    named = {_PREFIX + name: (one.dtype, tuple(one.shape), [one]) for name, one in tensors.items()}
    with all_or_none(state):
        if state.rank == 0:
            with new_folder(folder) as made:
                (made / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
                write_safetensors(made / _TENSORS, named, {"format": "pt"})


def _world_state() -> ParallelState:
    """Return a state whose axes are the whole world: all of it data-parallel without groups."""
    if (state := current_state()) is not None:
        return state
    world = live_world()
    return ParallelState.from_groups(data=world, rank=0 if world is None else None)


def _modules_of(names: Iterable[str]) -> dict[str, None]:
    return dict.fromkeys(name.rpartition(".lora_")[0] for name in names)


@torch.no_grad()
def load_lora(model: nn.Module, folder: str | Path) -> None:
    """Read adapters in PEFT's layout into a model.

    A model without adapters gets them, as by `apply_lora`: it must not be wrapped yet. One that
    has those of the file, wrapped or not, is filled.

    Collective: every rank calls this, and reads the files.

    Args:
        model: Its layers have the names of the model that was adapted.
        folder: Has ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        DegreeError: On every rank, as the others: a tensor has another shape than the model's.
        ParallelError: The file uses something of PEFT's that is not here, such as DoRA; names it.
            Or it has adapters of layers that the model has not, or the other way round. Or a file
            is missing or damaged.
    """
    state, folder = _world_state(), Path(folder)
    with all_or_none(state):
        rank, alpha, dropout = _read_config(folder / _CONFIG)
        tensors = _read_names(folder / _TENSORS)
        own = {layer.lora.name for layer in _adapted(model)}  # wrappers change the others
        own |= {name for name, _ in model.named_modules()}
        # In a pipeline, what else is in it is another stage's.
        modules = [n for n in _modules_of(tensors) if n in own or state.size("pipeline") == 1]
        missing = sorted(set(modules) - own)
        if not missing and not any(_adapted(model)):
            apply_lora(model, modules, rank, alpha, dropout, seed=0)
        halves = dict(_named_halves(model))
        wanted = {f"{name}.lora_{half}.weight" for name in modules for half in "AB"}
        if odd := missing or sorted(halves.keys() ^ wanted | wanted - tensors.keys()):
            raise ParallelError(
                f"{folder}: {', '.join(odd[:5])} ({len(odd)} in all) are not both in it and in the "
                "model; expected the model that was adapted, with the same adapters or none"
            )
        for layer in _adapted(model):
            if (layer.lora.rank, layer.lora.alpha) != (rank, alpha):
                raise ParallelError(
                    f"{folder}: has rank {rank} and alpha {alpha}; expected {layer.lora.rank} and "
                    f"{layer.lora.alpha}, of the model's adapters, or a model that has none"
                )
        for name, half in halves.items():
            _fill(half, name, tensors[name])


def _fill(half: Any, name: str, stored: Stored) -> None:
    """Copy this rank's part of a tensor in a file into a half of an adapter."""
    shard = _shard_of(half)
    if stored.shape != shard.full_shape:
        raise DegreeError(
            f"{stored.path}: {name} has shape {stored.shape}; expected {shard.full_shape}"
        )
    full = torch.empty(stored.shape, dtype=stored.dtype)
    stored.read(whole(stored.shape), full)
    local, begins = held_part(half.weight)
    held = Piece(begins, tuple(local.shape))
    index, degree = getattr(half, "tp_rank", 0), getattr(half, "tp_size", 1)
    for own, box in shard.boxes(index, degree, held):
        local[own.within(held).slices].copy_(full[box.slices])


def _read_names(file: Path) -> Mapping[str, Stored]:
    tensors, _ = open_safetensors(file)
    for name in tensors:
        if not re.fullmatch(rf"{re.escape(_PREFIX)}.+\.lora_[AB]\.weight", name):
            raise ParallelError(
                f"{file}: has a tensor {name}; expected {_PREFIX}<layer>.lora_A.weight and "
                "lora_B.weight only: adapters of linear layers"
            )
    return {name.removeprefix(_PREFIX): one for name, one in tensors.items()}


# Of PEFT's configuration (peft 0.21, LoraConfig). What these say of the base model's names, layout
# and first values, the tensors say too, or it has no effect on what they mean.
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "layers_pattern", "layers_to_transform", "megatron_config", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "target_modules", "task_type",
}  # fmt: skip
_EXPECTED = {
    "bias": ("none",), "init_lora_weights": (True, False, "gaussian"), "peft_type": ("LORA",),
}  # fmt: skip


def _read_config(file: Path) -> tuple[int, float, float]:
    if not file.is_file():
        raise ParallelError(f"{file}: there is no such file; expected a folder as PEFT saves it")
    said = load_json(file)
    for key, value in said.items():
        if key in _WITHOUT_EFFECT or key in ("r", "lora_alpha", "lora_dropout"):
            continue
        if value not in _EXPECTED[key] if key in _EXPECTED else value:
            raise ParallelError(
                f"{file}: {key} is {value!r}, which ezpz_tp does not have; expected plain LoRA: "
                "merge it with PEFT, and load the merged model"
            )
    try:
        alpha = float(said["lora_alpha"])
        whole_alpha = int(alpha) if alpha.is_integer() else alpha  # written as it was read
        return int(said["r"]), whole_alpha, float(said.get("lora_dropout", 0))
    except (KeyError, TypeError, ValueError) as error:
        raise ParallelError(f"{file}: it does not say what it should: {error!r}") from error
