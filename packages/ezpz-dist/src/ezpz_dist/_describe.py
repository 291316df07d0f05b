"""What a model is wrapped by, and what this rank holds of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ._replicas import find_wrapper

# What was found of a model, and a table of it.


@dataclass(frozen=True, slots=True)
class WrappedUnit:
    """A module that is gathered, or reduced, by itself; or all that is not in another.

    Attributes:
        name: Its path in the model; "" for the model itself.
        kind: Its class.
        wrapper: ``"DDP"``, ``"FSDP1"``, ``"FSDP2"``, ``"DeepSpeed ZeRO-2"``; None: bare.
        parameters: Elements of its parameters over all ranks that share them, each counted once,
            those of units inside aside.
        trainable: How many of these require a gradient.
        held: How many of these are on this rank.
        bytes: What this rank's parameters take.
        buffer_bytes: What its buffers take, on this rank.
        dtype: What most of the parameters are kept in: ``"float32"``; "" without parameters.
        compute_dtype: What is computed in, where it is another.
        reduce_dtype: What gradients are reduced in, where it is another.
        reshards: Whether parameters are freed after forward; None: not sharded, or not known.
        mesh: Over which axes: ``"replicate 2 x shard 4"``; "" where there are none.
    """

    name: str
    kind: str
    wrapper: str | None
    parameters: int
    trainable: int
    held: int
    bytes: int
    buffer_bytes: int
    dtype: str
    compute_dtype: str | None = None
    reduce_dtype: str | None = None
    reshards: bool | None = None
    mesh: str = ""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What `describe` found. ``str()`` is a table of the units.

    Attributes:
        kind: The model's class.
        units: In the order of the model; the first is what is left over.
    """

    kind: str
    units: tuple[WrappedUnit, ...]

    @property
    def wrapper(self) -> str | None:
        """What the model is wrapped by; None: bare."""
        return next((unit.wrapper for unit in self.units if unit.wrapper), None)

    @property
    def parameters(self) -> int:
        """Elements of all parameters, over all ranks that share them."""
        return sum(unit.parameters for unit in self.units)

    @property
    def trainable(self) -> int:
        """Elements of those that require a gradient."""
        return sum(unit.trainable for unit in self.units)

    @property
    def held(self) -> int:
        """Elements of parameters on this rank."""
        return sum(unit.held for unit in self.units)

    @property
    def bytes(self) -> int:
        """Bytes of parameters on this rank, while no unit is gathered."""
        return sum(unit.bytes for unit in self.units)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of buffers on this rank."""
        return sum(unit.buffer_bytes for unit in self.units)

    def __str__(self) -> str:
        rows = [
            ("unit", "class", "by", "parameters", "here", "bytes here", "type", "after forward")
        ]
        for like, names in _alike(self.units):
            first = like.name or "(rest)" if len(self.units) > 1 else like.name or "(all)"
            rows.append(
                (
                    first if len(names) == 1 else f"{first} ... {names[-1]} ({len(names)}x)",
                    like.kind,
                    (like.wrapper or "-") + (f" {like.mesh}" if like.mesh else ""),
                    f"{like.parameters:,}",
                    f"{like.held:,}",
                    _bytes(like.bytes),
                    (like.dtype or "-")
                    + (f", computes in {like.compute_dtype}" if like.compute_dtype else "")
                    + (f", reduces in {like.reduce_dtype}" if like.reduce_dtype else ""),
                    {None: "-", True: "freed", False: "kept"}[like.reshards],
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        right = (3, 4, 5)
        lines = [
            "  ".join(
                cell.rjust(width) if column in right else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        share = f", {self.held / self.parameters:.1%} of it here" if self.parameters else ""
        total = (
            f"{self.kind}: {self.parameters:,} parameters ({self.trainable:,} trainable){share}: "
            f"{_bytes(self.bytes)}, and {_bytes(self.buffer_bytes)} of buffers"
        )
        return "\n".join([total, *lines])


def _alike(units: tuple[WrappedUnit, ...]) -> list[tuple[WrappedUnit, list[str]]]:
    """Put units that differ by name alone in one row, where the first of them is."""
    rows: dict[WrappedUnit, list[str]] = {}
    for unit in units:
        rows.setdefault(replace(unit, name=""), []).append(unit.name)
    return [(replace(like, name=names[0]), names) for like, names in rows.items()]


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


# What a model is wrapped by, and what this rank holds of it.


def describe(model: nn.Module) -> ModelDescription:
    """Say what a model is wrapped by, unit by unit, and what this rank holds of it.

    Nothing is sent. The optimizer's state is not counted, nor are gradients.

    Args:
        model: Bare, or wrapped by DDP, FSDP1, FSDP2 or DeepSpeed; compiled or not.

    >>> print(describe(nn.Linear(2, 3)))
    Linear: 9 parameters (9 trainable), 100.0% of it here: 36 B, and 0 B of buffers
    unit   class   by  parameters  here  bytes here  type     after forward
    (all)  Linear  -            9     9        36 B  float32  -
    """
    modules = dict(model.named_modules())
    around = next(filter(None, map(_around, modules.values())), None)
    units: dict[str, _Held] = {"": _Held(model)}
    seen: set[torch.Tensor] = set()
    for name, module in modules.items():
        if find_wrapper(module) in ("FSDP1", "FSDP2"):
            parent = units[_innermost(name.rpartition(".")[0], units)]
            units[name] = _Held(module, find_wrapper(parent.module) != "FSDP2" or not name)
        unit = units[_innermost(name, units)]
        unit.parameters += [one for one in module.parameters(recurse=False) if one not in seen]
        unit.buffers += [one for one in module.buffers(recurse=False) if one not in seen]
        seen.update(unit.parameters, unit.buffers)
    found = [_unit(name, held, around) for name, held in units.items()]
    kept = tuple(unit for unit in found if unit.parameters or unit.buffer_bytes or len(found) == 1)
    return ModelDescription(_class_of(_inside(model)), kept)


@dataclass(slots=True)
class _Held:
    """What the innermost unit around it holds, each tensor once."""

    module: nn.Module
    is_outermost: bool = True
    parameters: list[torch.Tensor] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)


def _innermost(name: str, units: dict[str, _Held]) -> str:
    while name not in units:
        name = name.rpartition(".")[0]
    return name


def _unit(name: str, held: _Held, around: str | None) -> WrappedUnit:
    module, parameters, buffers = held.module, held.parameters, held.buffers
    wrapper = find_wrapper(module)
    sizes = [(*_sizes(one), one) for one in parameters]
    whole = sum(count for count, _, _ in sizes)
    trainable = sum(count for count, _, one in sizes if one.requires_grad)
    flat = getattr(getattr(module, "_handle", None), "flat_param", None)
    if wrapper == "FSDP1" and flat is not None:
        # What is registered are views of the shard, and what a rank has nothing of is empty.
        counts = flat._numels  # noqa: SLF001 - no public way to ask
        of_each = flat._params or [flat] * len(counts)  # noqa: SLF001
        counted = [(count, one.requires_grad) for count, one in zip(counts, of_each, strict=True)]
        beside = [one for one in parameters if not hasattr(one, "_fsdp_flattened")]
        counted += [(one.numel(), one.requires_grad) for one in beside]
        whole = sum(count for count, _ in counted)
        trainable = sum(count for count, trains in counted if trains)
    dtypes = Counter(str(one.dtype).removeprefix("torch.") for one in parameters)
    dtype = dtypes.most_common(1)[0][0] if dtypes else ""
    mixed, reshards = _policy(module, wrapper, held.is_outermost)
    return WrappedUnit(
        # As the bare model names it.
        name=name.replace("_fsdp_wrapped_module.", "").replace("_orig_mod.", ""),
        kind=_class_of(_inside(module)),
        wrapper=wrapper if wrapper in ("FSDP1", "FSDP2") else around,
        parameters=whole,
        trainable=trainable,
        held=sum(here for _, here, _ in sizes),
        bytes=sum(here * one.element_size() for _, here, one in sizes),
        buffer_bytes=sum(one.numel() * one.element_size() for one in buffers),
        dtype=dtype,
        compute_dtype=_other(getattr(mixed, "param_dtype", None), dtype),
        reduce_dtype=_other(getattr(mixed, "reduce_dtype", None), dtype),
        reshards=reshards,
        mesh=next((_mesh(one) for one in parameters if hasattr(one, "device_mesh")), ""),
    )


def _sizes(parameter: Any) -> tuple[int, int]:
    """Return a parameter's elements over all ranks, and on this one."""
    if hasattr(parameter, "device_mesh"):  # DTensor
        return parameter.numel(), parameter.to_local().numel()
    if hasattr(parameter, "ds_numel"):  # DeepSpeed's ZeRO-3
        partition = getattr(parameter, "ds_tensor", None)
        here = parameter.numel() if partition is None else partition.numel()
        return int(parameter.ds_numel), int(here)
    return parameter.numel(), parameter.numel()


def _around(module: nn.Module) -> str | None:
    wrapper = find_wrapper(module)
    if wrapper == "DeepSpeed":
        return f"DeepSpeed ZeRO-{module.zero_optimization_stage()}"  # type: ignore[operator]
    return wrapper if wrapper in ("DDP", "DataParallel") else None


def _policy(module: Any, wrapper: str | None, is_outermost: bool) -> tuple[Any, bool | None]:
    """Return a mixed-precision policy, and whether parameters are freed after forward."""
    if wrapper == "FSDP1":
        strategy = getattr(getattr(module, "sharding_strategy", None), "name", "")
        freed = strategy in ("FULL_SHARD", "HYBRID_SHARD") if strategy else None
        return getattr(module, "mixed_precision", None), freed
    if wrapper != "FSDP2":
        return None, None
    state = module._get_fsdp_state()  # noqa: SLF001
    groups = getattr(state, "_fsdp_param_groups", None) or [
        getattr(state, "_fsdp_param_group", None)
    ]
    group = groups[0] if groups else None
    policy = getattr(state, "_mp_policy", None)
    if group is None or not hasattr(group, "post_forward_mesh_info"):
        return policy, None
    # torch keeps the outermost where nothing else was asked for: from the first forward pass on.
    kept = is_outermost and getattr(state, "_auto_reshard_after_forward", True)
    return policy, group.post_forward_mesh_info is not None and not kept


def _mesh(parameter: Any) -> str:
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    return " x ".join(
        f"{name} {size}".strip() for name, size in zip(names, mesh.shape, strict=True)
    )


def _inside(module: Any) -> nn.Module:
    """Return what a wrapper that is a module of its own, or the compiler, is around of."""
    while True:
        if find_wrapper(module) not in (None, "FSDP2"):
            module = module.module
        elif hasattr(module, "_orig_mod"):
            module = module._orig_mod  # noqa: SLF001 - torch.compile's
        else:
            return module  # type: ignore[no-any-return]


def _class_of(module: nn.Module) -> str:
    if find_wrapper(module) == "FSDP2":  # it has made a class of its own, FSDPLinear
        return type(module).__mro__[2].__name__
    return type(module).__name__


def _other(dtype: torch.dtype | None, than: str) -> str | None:
    name = str(dtype).removeprefix("torch.")
    return None if dtype is None or name == than else name
