"""A rank's part of a weight, made without the rest of it.

The full weight is cut into tiles whose size depends on its shape alone. Each tile is drawn
from its own stream, seeded by the layer's seed and the tile's number, by whichever ranks hold
some of it: so the full weight is the same at every degree, and no rank ever holds it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import init
from torch.overrides import TorchFunctionMode

from ._errors import DegreeError
from ._mappings import broadcast_
from ._shard import Piece, Shard, whole

# What a weight is of.

_SHORT_NAMES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64,
}  # fmt: skip


def as_dtype(dtype: str | torch.dtype, what: str = "dtype") -> torch.dtype:
    """Return the torch dtype of a name such as ``"bf16"`` or ``"torch.float32"``."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
        found = _SHORT_NAMES.get(name, getattr(torch, name, None))
        if isinstance(found, torch.dtype):
            return found
    raise ValueError(
        f"{what} {dtype!r}; expected one of {', '.join(_SHORT_NAMES)}, another name of torch's "
        "such as 'int32', or a torch.dtype"
    )


# The tiles that a weight is drawn in.

TILE = 1 << 18
"""Elements in a tile. Large enough that drawing one outweighs starting to (about 2 ms on a CPU),
small enough that what a shard draws of its neighbors' does not matter."""

_NARROWEST = 64
"""Columns in a tile of a weight split along a later dim: its copies then fill cache lines."""


def tiles(full_shape: tuple[int, ...], dim: int, box: Piece) -> Iterator[tuple[int, Piece]]:
    """Yield the number and the place of each tile that shares an element with a box."""
    steps = list(full_shape)
    others = max(1, math.prod(full_shape) // max(1, full_shape[dim]))
    width = max(1, TILE // others)
    if dim > 0:  # also cut the rows, rather than make it a few columns of very many
        width = max(width, _NARROWEST)
        steps[0] = max(1, TILE * full_shape[0] // (others * width))
    steps[dim] = width
    counts = [-(-size // step) for size, step in zip(full_shape, steps, strict=True)]
    touched = (range(a // s, -(-(a + n) // s)) for a, n, s in zip(*box, steps, strict=True))
    for place in itertools.product(*touched):
        number = 0
        for here, count in zip(place, counts, strict=True):
            number = number * count + here
        begins = tuple(map(operator.mul, place, steps))
        left = map(operator.sub, full_shape, begins)
        yield number, Piece(begins, tuple(map(min, steps, left)))


# A tile of a weight that answers for the whole: the shape of all, the values of some.

_RANDOM = frozenset({
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_",
    "uniform_",
})  # fmt: skip
# On anything but a tile they draw from torch's own generators: other numbers on every rank.
_DRAWS = _RANDOM | {
    "bernoulli", "multinomial", "normal", "poisson", "rand", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "randperm",
}  # fmt: skip
_LIKE = {"rand_like": "uniform_", "randn_like": "normal_"}

# Elementwise without torch's tag for it.
_UNTAGGED = frozenset({
    "bfloat16", "clone", "constant_", "copy_", "detach", "double", "empty_like", "fill_", "float",
    "full_like", "half", "masked_fill", "masked_fill_", "ones_like", "requires_grad_", "to",
    "type", "zero_", "zeros_like",
    "__and__", "__invert__", "__or__", "__rdiv__", "__rpow__", "__rsub__", "__xor__",
})  # fmt: skip
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
    """Stands in for a weight while it is initialized, and lets elementwise operations through."""

    # It says that it has the full weight's shape, so fans and such come out right; operations act
    # on the tile, and draw from its generator. (A ``__torch_dispatch__`` would be told the exact
    # operation, but the first one in a process imports another 500 modules, for 0.5 s.)

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


InitMethod = Callable[[Tensor], object]
"""Fills a tensor in place, as the functions of ``torch.nn.init`` do."""

_LARGE = 1 << 28
"""Bytes of a full weight from which making it is worth a warning."""

_default_generators = threading.Lock()


def initialize_shard(
    shard: Tensor,
    full_shape: Sequence[int],
    partition_dim: int | None,
    index: int,
    degree: int,
    init_method: InitMethod,
    *,
    seed: int,
    stride: int | Sequence[int] = 1,
) -> None:
    """Fill this rank's part of a weight so that the full weight is the same at every degree.

    ``init_method`` is called once for each tile of the weight that this rank holds some of. It
    gets a stand-in with the full weight's shape (fans are those of the full weight) and this
    tile's values. That works for all that acts on each element alone, which is all of
    ``torch.nn.init`` but ``orthogonal_``, ``eye_``, ``dirac_`` and ``sparse_``. For those, and for
    an ``init_method`` that copies data, reads values or brings its own generator, every rank makes
    the full weight by one call, and cuts it. That is right, but slow and large, and gives a
    warning for a large weight.

    Half-precision weights are drawn in fp32 and rounded. CPU and accelerators have other random
    streams: the same seed gives the same weight at every degree on one kind of device only.

    Args:
        shard: This rank's part, of any floating dtype, on any device; nothing is done on meta.
            It may be a DTensor, sharded further over data-parallel ranks.
        full_shape: Shape of the weight over all ranks.
        partition_dim: The dim that is split; None when every rank holds the whole.
        index: This rank's place among those that share the weight.
        degree: Number of those ranks.
        init_method: Fills a tensor in place, as the functions of ``torch.nn.init`` do.
        seed: Seed of this weight. The ranks must agree (`agree_on_seed`).
        stride: Stretches of ``partition_dim`` on each rank: the full weight is cut in ``stride
            * degree``, and a rank has stretches ``index``, ``index + degree``, ... Megatron-LM's
            ``partition_stride``, for several matrices stored as one. Or the sizes of these
            matrices, where they are not equal: the degree has to divide each.

    A shard may be larger than its part, where the degree does not divide the dim. Each rank then
    holds as many rows as the first, and rows past the end of the full weight are zero.

    Raises:
        DegreeError: The shard and the full shape do not fit.
    """
    if shard.is_meta:
        return
    full_shape = tuple(full_shape)
    with torch.no_grad():
        local, held = _held(shard, full_shape, partition_dim, index, degree, stride)
        dim = partition_dim or 0
        try:
            with NoOtherNumbers():
                for at, full in held:
                    _fill(local[at.slices], full, full_shape, dim, init_method, seed=seed)
                if not held and 0 not in full_shape:
                    # All padding here: one element is drawn, so that what ``init_method`` keeps
                    # to itself, such as a generator, is the same on all ranks.
                    one = whole([1] * len(full_shape))
                    into = local.new_empty(one.sizes)
                    _fill(into, one, full_shape, dim, init_method, seed=seed)
        except NotElementwiseError as error:
            weight = _whole(local, full_shape, init_method, seed, error)
            for at, full in held:
                local[at.slices].copy_(weight[full.slices])


def initialize_from_whole(
    shard: Tensor,
    full_shape: Sequence[int],
    partition_dim: int | None,
    index: int,
    degree: int,
    init_method: InitMethod,
    *,
    stride: int | Sequence[int] = 1,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Fill this rank's part of a weight that torch's default generator makes whole; return it."""
    # As fairscale and, with ``dtype`` float32, Megatron-LM on the CPU do. The ranks must agree on
    # where their generators are (`one_generator`).
    weight = torch.empty(
        tuple(full_shape), dtype=dtype or shard.dtype, device=device or shard.device
    )
    with torch.no_grad():
        local, held = _held(shard, tuple(full_shape), partition_dim, index, degree, stride)
        init_method(weight)
        for at, full in held:
            local[at.slices].copy_(weight[full.slices])
    return weight


def _held(
    shard: Tensor,
    full_shape: tuple[int, ...],
    partition_dim: int | None,
    index: int,
    degree: int,
    stride: int | Sequence[int],
) -> tuple[Tensor, list[tuple[Piece, Piece]]]:
    """Return what is here of a shard, and its pieces: where each is in that, and in the whole."""
    size = 1 if partition_dim is None else full_shape[partition_dim]
    blocks = (size // stride,) * stride if isinstance(stride, int) else tuple(stride)
    if partition_dim is None or len(blocks) == 1:
        wanted = Shard(full_shape, partition_dim, padded=partition_dim is not None)
    else:
        wanted = Shard(full_shape, partition_dim, blocks)
    if tuple(shard.shape) != (expected := wanted.local_shape(index, degree)):
        raise DegreeError(
            f"a shard of shape {tuple(shard.shape)} is no part of a weight of shape {full_shape}, "
            f"split along dim {partition_dim} over {degree} ranks; expected {expected}"
        )
    local, offsets = held_part(shard)
    here = Piece(offsets, tuple(local.shape))
    boxes = wanted.boxes(index, degree, here)
    held = [(own.within(here), full) for own, full in boxes if 0 not in own.sizes]
    if sum(math.prod(full.sizes) for _, full in held) < local.numel():
        local.zero_()
    return local, held


@contextlib.contextmanager
def one_generator(
    seed: int | None, group: ProcessGroup | None, device: torch.device
) -> Iterator[None]:
    """Let torch's default generator of a device be the same on every rank of a group."""
    # It begins at ``seed`` and comes back after the block; without one it begins where the first
    # rank's is, and stays where it was left. Collective in that case.
    if seed is not None:
        with _seeded(seed, device):
            yield
        return
    kind: Any = torch if device.type == "cpu" else torch.get_device_module(device)
    state: Tensor = kind.get_rng_state()
    if group is not None:
        state = broadcast_(state.to(sending_device(group, device)), 0, group).cpu()
    with _default_generators:
        kind.set_rng_state(state)
        yield


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    on_cpu = device.type == "cpu"
    saved = [] if on_cpu else [device.index or 0]
    with (
        _default_generators,
        torch.random.fork_rng(saved, device_type="cuda" if on_cpu else device.type),
        contextlib.nullcontext() if on_cpu else torch.get_device_module(device).device(device),
    ):
        torch.default_generator.manual_seed(seed)
        if not on_cpu:
            torch.get_device_module(device).manual_seed(seed)
        yield


def agree_on_seed(
    seed: int | None, group: ProcessGroup | None, device: torch.device | str | None = None
) -> int:
    """Return one seed on every rank of a group. Collective when ``seed`` is None."""
    # None draws one from torch's default generator of the device on the group's first rank. Every
    # rank draws, so that their generators stay as far as each other's.
    if seed is not None:
        return int(seed)
    # Where the weight is, as Megatron-LM's seed is its accelerator's alone; meta has no values.
    place = torch.device("cpu" if device is None or torch.device(device).type == "meta" else device)
    drawn = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=place)
    if group is not None:
        drawn = broadcast_(drawn.to(sending_device(group, device)), 0, group)
    return int(drawn.item())


def sending_device(group: ProcessGroup, device: torch.device | str | None) -> torch.device:
    wanted = torch.device("cpu" if device is None else device)
    able = [each.type for each in group._device_types]  # noqa: SLF001 - no public way to ask
    if wanted.type in able:
        return wanted
    return torch.device("cpu" if "cpu" in able or not able else able[0])


def held_part(shard: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return what is here of a shard that may be a DTensor, and where in the shard it begins."""
    mesh = getattr(shard, "device_mesh", None)
    if mesh is None:
        return shard.detach(), (0,) * shard.dim()
    from torch.distributed.tensor._utils import (  # noqa: PLC0415 - only where it is loaded
        compute_local_shape_and_global_offset,
    )

    placements = shard.placements  # type: ignore[attr-defined]
    sizes, begins = compute_local_shape_and_global_offset(shard.shape, mesh, placements)
    local: Tensor = shard.detach().to_local()  # type: ignore[attr-defined]
    if tuple(local.shape) != tuple(sizes):
        raise DegreeError(
            f"a DTensor of shape {tuple(shard.shape)} with placements {placements} holds "
            f"{tuple(local.shape)} here; expected {tuple(sizes)}: initialize it before it is "
            "sharded"
        )
    return local, tuple(begins)


def _fill(
    target: Tensor,
    box: Piece,
    full_shape: tuple[int, ...],
    dim: int,
    init_method: InitMethod,
    *,
    seed: int,
) -> None:
    dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
    generator = torch.Generator(device=target.device)
    for number, tile in tiles(full_shape, dim, box):
        both = tile.overlap(box)
        assert both is not None
        into = target[both.within(box).slices]
        direct = both == tile and into.is_contiguous() and into.dtype == dtype
        values = into if direct else torch.empty(tile.sizes, dtype=dtype, device=target.device)
        init_method(Tile.of(values, full_shape, generator.manual_seed(_mixed(seed, number))))
        if not direct:
            into.copy_(values[both.within(tile).slices])


def _whole(
    like: Tensor,
    full_shape: tuple[int, ...],
    init_method: InitMethod,
    seed: int,
    reason: NotElementwiseError,
) -> Tensor:
    """Return the full weight, made by one call of ``init_method``."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    size = math.prod(full_shape) * dtype.itemsize
    if size >= _LARGE:
        warnings.warn(
            f"initializing a weight of shape {full_shape} needs all of it, {size >> 20} MiB, on "
            f"every rank, as {reason}; an init_method that treats elements alone does not",
            stacklevel=3,
        )
    weight = torch.empty(full_shape, dtype=dtype, device=like.device)
    # The functions of torch.nn.init that come here mostly take no generator.
    with _seeded(_mixed(seed, 0), like.device):
        init_method(weight)
    return weight


def _mixed(seed: int, number: int) -> int:
    """Return a 64-bit seed that has nothing in common with its neighbors' (splitmix64)."""
    # With a plain sum, tile 1 of one layer would be tile 0 of the layer seeded next.
    state = seed % 2**64
    for word in (0, number):
        state = (state + 0x9E3779B97F4A7C15 * (word + 1)) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state
