"""A tile of a weight that answers for the whole: the shape of all, the values of some."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

_RANDOM = frozenset(
    {
        *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_"),
        *("random_", "uniform_"),
    }
)
# On anything but a tile they draw from torch's own generators: other numbers on every rank.
_DRAWS = _RANDOM | {
    *("bernoulli", "multinomial", "normal", "poisson", "rand", "rand_like", "randint"),
    *("randint_like", "randn", "randn_like", "randperm"),
}
_LIKE = {"rand_like": "uniform_", "randn_like": "normal_"}

# Elementwise without torch's tag for it.
_UNTAGGED = frozenset(
    {
        *("bfloat16", "clone", "constant_", "copy_", "detach", "double", "empty_like", "fill_"),
        *("float", "full_like", "half", "masked_fill", "masked_fill_", "ones_like"),
        *("requires_grad_", "to", "type", "zero_", "zeros_like"),
        *("__and__", "__invert__", "__or__", "__rdiv__", "__rpow__", "__rsub__", "__xor__"),
    }
)
# They only steer: trunc_normal_ draws again while any value is out of bounds, which each tile
# may do as often as it needs.
_SCALAR = frozenset({"any", "new_tensor"})

# True of a tile as of the whole.
_ALIKE = frozenset({"dim", "element_size", "is_complex", "is_floating_point", "ndimension"})
_ALIKE_ATTRIBUTES = frozenset(
    {"device", "dtype", "is_cpu", "is_cuda", "is_meta", "is_xpu", "layout", "ndim", "requires_grad"}
)


class NotElementwiseError(RuntimeError):
    """An operation that a tile cannot stand in for."""


class Tile(Tensor):
    """Stands in for a weight while it is initialized, and lets elementwise operations through.

    It says that it has the full weight's shape, so fans and such come out right; operations act
    on the tile, and draw from its generator. (A ``__torch_dispatch__`` would be told the exact
    operation, but the first one in a process imports another 500 modules, for 0.5 s.)
    """

    part: Tensor
    full_shape: torch.Size
    generator: torch.Generator

    @classmethod
    def of(cls, part: Tensor, full_shape: tuple[int, ...], generator: torch.Generator) -> Tile:
        """Return a stand-in for a weight of that shape; what is done to it is done to ``part``."""
        tile: Tile = part.as_subclass(cls)
        tile.part, tile.full_shape, tile.generator = part, torch.Size(full_shape), generator
        return tile

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer for the whole weight, do an elementwise operation, or refuse."""
        kwargs = kwargs or {}
        name: str = getattr(func, "__name__", "?")
        tiles = [value for value in (*args, *kwargs.values()) if isinstance(value, Tile)]
        if not tiles:
            raise NotElementwiseError(f"it calls {name} with a list")
        tile = tiles[0]
        if name == "__get__":
            return _attribute(tile, func)
        if name == "size":
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            return tile.full_shape if dim is None else tile.full_shape[dim]
        if name in {"numel", "nelement"}:
            return math.prod(tile.full_shape)
        if name == "kaiming_uniform_":  # the one of torch.nn.init that hands over its fans as well
            return _kaiming_uniform(**kwargs)
        return _elementwise(tile, func, name, args, kwargs)


class NoOtherNumbers(TorchFunctionMode):
    """Refuses to draw any random numbers but a tile's, while it is on."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Refuse a draw, and a generator, that has no tile beside it; a tile refuses the rest."""
        kwargs = kwargs or {}
        values = (*args, *kwargs.values())
        if not any(isinstance(value, Tile) for value in values):
            name: str = getattr(func, "__name__", "?")
            if name in _DRAWS or any(isinstance(value, torch.Generator) for value in values):
                raise NotElementwiseError(f"it calls {name}")
        return func(*args, **kwargs)


def _attribute(tile: Tile, getter: Callable[..., Any]) -> Any:
    name: str = getter.__self__.__name__  # type: ignore[attr-defined]
    if name == "shape":
        return tile.full_shape
    if name == "data":
        return tile
    if name not in _ALIKE_ATTRIBUTES:
        raise NotElementwiseError(f"it reads .{name}")
    return getattr(tile.part, name)


def _elementwise(
    tile: Tile, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    values = (*args, *kwargs.values())
    if any(isinstance(value, torch.Generator) for value in values):
        raise NotElementwiseError(f"it calls {name} with a generator of its own")
    if any(isinstance(v, Tensor) and not isinstance(v, Tile) and v.dim() for v in values):
        raise NotElementwiseError(f"it calls {name} with other data")
    alike = name in _ALIKE or name in _SCALAR
    random = name in _RANDOM or name in _LIKE
    if "out" in kwargs or not (
        alike or random or name in _UNTAGGED or _is_pointwise(name.removesuffix("_"))
    ):
        raise NotElementwiseError(f"it calls {name}")
    parts = [value.part if isinstance(value, Tile) else value for value in args]
    named: dict[str, Any] = {key: v.part if isinstance(v, Tile) else v for key, v in kwargs.items()}
    if name in _LIKE:
        draw = getattr(torch.empty_like(*parts, **named), _LIKE[name])
        return Tile.of(draw(generator=tile.generator), tile.full_shape, tile.generator)
    if random:
        named["generator"] = tile.generator
    result = func(*parts, **named)
    if result is tile.part:
        return tile
    if not isinstance(result, Tensor) or (name in _SCALAR and result.dim() == 0):
        return result
    if result.shape != tile.part.shape:
        raise NotElementwiseError(f"{name} returns another shape")
    return Tile.of(result, tile.full_shape, tile.generator)


def _kaiming_uniform(
    tensor: Tile,
    a: float = 0,
    mode: str = "fan_in",
    nonlinearity: Any = "leaky_relu",
    generator: torch.Generator | None = None,
) -> Tensor:
    if generator is not None:
        raise NotElementwiseError("it calls kaiming_uniform_ with a generator of its own")
    fans = init._calculate_fan_in_and_fan_out(tensor)  # noqa: SLF001 - all that gives fans
    fan = fans[0 if mode.lower() == "fan_in" else 1]
    bound = math.sqrt(3.0) * init.calculate_gain(nonlinearity, a) / math.sqrt(fan)
    return tensor.uniform_(-bound, bound)


@functools.cache
def _is_pointwise(name: str) -> bool:
    """Whether torch tags an operation so, in place or not, and it draws nothing (rrelu does)."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):  # noqa: SLF001 - its only name
        return False
    tags = {tag for overload in packet.overloads() for tag in getattr(packet, overload).tags}
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
