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
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import init

from ._errors import DegreeError
from ._mappings import broadcast_
from ._shard import Piece, Shard

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
    touched = []
    for start, size, step in zip(box.offsets, box.sizes, steps, strict=True):
        first = start // step
        touched.append(range(first, -(-(start + size) // step)))
    for place in itertools.product(*touched):
        number = 0
        for here, count in zip(place, counts, strict=True):
            number = number * count + here
        begins = tuple(map(operator.mul, place, steps))
        left = map(operator.sub, full_shape, begins)
        yield number, Piece(begins, tuple(map(min, steps, left)))


InitMethod = Callable[[Tensor], object]
"""Fills a tensor in place, as the functions of ``torch.nn.init`` do."""


# How a tile is filled by an initialiser of torch.nn.init that treats every element alone.


class TileMethod(Protocol):
    """Fills a tile in place, from a generator if it draws."""

    def __call__(self, tile: Tensor, *, generator: torch.Generator) -> object: ...


_DRAWING: Any = (init.normal_, init.uniform_, init.trunc_normal_)
_CONSTANT: Any = (init.constant_, init.ones_, init.zeros_)


def find_tile_method(init_method: InitMethod, full_shape: Sequence[int]) -> TileMethod | None:
    """Return what fills a tile as ``init_method`` fills a whole weight; None if only it can."""
    function: Any = init_method
    options: dict[str, Any] = {}
    if isinstance(init_method, functools.partial) and not init_method.args:
        function = init_method.func
        options = dict(init_method.keywords)
    if not isinstance(function, FunctionType) or options.get("generator") is not None:
        return None
    if function in _CONSTANT:
        return _ignore_generator(functools.partial(function, **options))
    options.pop("generator", None)  # the tile's is given instead
    if function in _DRAWING:
        return functools.partial(function, **options)
    if function in _SCALED_BY_FAN:
        stand_in = torch.empty(tuple(full_shape), device="meta")
        fans = init._calculate_fan_in_and_fan_out(stand_in)  # noqa: SLF001 - all that gives fans
        return _SCALED_BY_FAN[function](*fans, **options)
    return None


def _ignore_generator(fill: Callable[[Tensor], object]) -> TileMethod:
    def fill_tile(tile: Tensor, *, generator: torch.Generator) -> None:
        del generator
        fill(tile)

    return fill_tile


def _xavier_normal(fan_in: int, fan_out: int, gain: float = 1.0) -> TileMethod:
    std = gain * math.sqrt(2.0 / (fan_in + fan_out))
    return functools.partial(init.normal_, std=std)


def _xavier_uniform(fan_in: int, fan_out: int, gain: float = 1.0) -> TileMethod:
    std = gain * math.sqrt(2.0 / (fan_in + fan_out))
    return _uniform_with_std(std)


def _kaiming_normal(fan_in: int, fan_out: int, **options: Any) -> TileMethod:
    return functools.partial(init.normal_, std=_kaiming_std(fan_in, fan_out, **options))


def _kaiming_uniform(fan_in: int, fan_out: int, **options: Any) -> TileMethod:
    return _uniform_with_std(_kaiming_std(fan_in, fan_out, **options))


def _kaiming_std(
    fan_in: int, fan_out: int, a: float = 0, mode: str = "fan_in", nonlinearity: Any = "leaky_relu"
) -> float:
    fans = {"fan_in": fan_in, "fan_out": fan_out}
    if mode.lower() not in fans:
        raise ValueError(f"mode {mode!r}; expected 'fan_in' or 'fan_out'")
    return init.calculate_gain(nonlinearity, a) / math.sqrt(fans[mode.lower()])


def _uniform_with_std(std: float) -> TileMethod:
    bound = math.sqrt(3.0) * std
    return functools.partial(init.uniform_, a=-bound, b=bound)


_SCALED_BY_FAN: dict[Any, Callable[..., TileMethod]] = {
    init.xavier_normal_: _xavier_normal,
    init.xavier_uniform_: _xavier_uniform,
    init.kaiming_normal_: _kaiming_normal,
    init.kaiming_uniform_: _kaiming_uniform,
}


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

    ``normal_``, ``uniform_``, ``trunc_normal_``, ``xavier_*``, ``kaiming_*``, ``constant_``,
    ``ones_`` and ``zeros_`` of ``torch.nn.init``, also with keyword arguments bound by
    ``functools.partial``, fill the tiles of the weight that this rank holds some of; fans are those
    of the full weight. With any other ``init_method``, or with a generator of its own, every rank
    makes the full weight by one call, and cuts it. That is right, but slow and large, and gives a
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
        local, held = _find_held_pieces(shard, full_shape, partition_dim, index, degree, stride)
        fill_tile = find_tile_method(init_method, full_shape)
        if fill_tile is not None:
            for at, full in held:
                _fill(local[at.slices], full, full_shape, partition_dim or 0, fill_tile, seed=seed)
            return
        # Also where all is padding: what ``init_method`` keeps, such as a generator, is the same.
        weight = _draw_whole(local, full_shape, init_method, seed)
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
        local, held = _find_held_pieces(
            shard, tuple(full_shape), partition_dim, index, degree, stride
        )
        init_method(weight)
        for at, full in held:
            local[at.slices].copy_(weight[full.slices])
    return weight


def _find_held_pieces(
    shard: Tensor,
    full_shape: tuple[int, ...],
    partition_dim: int | None,
    index: int,
    degree: int,
    stride: int | Sequence[int],
) -> tuple[Tensor, list[tuple[Piece, Piece]]]:
    """Return what is here of a shard, and its pieces: where each is in that, and in the whole."""
    size = 1
    if partition_dim is not None:
        size = full_shape[partition_dim]
    blocks = (size // stride,) * stride if isinstance(stride, int) else tuple(stride)
    if partition_dim is None or len(blocks) == 1:
        wanted = Shard(full_shape, partition_dim, padded=partition_dim is not None)
    else:
        wanted = Shard(full_shape, partition_dim, blocks)
    expected = wanted.local_shape(index, degree)
    if tuple(shard.shape) != expected:
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
    saved = []
    if not on_cpu:
        saved = [device.index or 0]
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
    fill_tile: TileMethod,
    *,
    seed: int,
) -> None:
    dtype = _drawn_dtype(target)
    generator = torch.Generator(device=target.device)
    for number, tile in tiles(full_shape, dim, box):
        both = tile.overlap(box)
        assert both is not None
        into = target[both.within(box).slices]
        direct = both == tile and into.is_contiguous() and into.dtype == dtype
        values = into
        if not direct:
            values = torch.empty(tile.sizes, dtype=dtype, device=target.device)
        fill_tile(values, generator=generator.manual_seed(derive_tile_seed(seed, number)))
        if not direct:
            into.copy_(values[both.within(tile).slices])


def _draw_whole(
    like: Tensor, full_shape: tuple[int, ...], init_method: InitMethod, seed: int
) -> Tensor:
    """Return the full weight, made by one call of ``init_method``."""
    dtype = _drawn_dtype(like)
    size = math.prod(full_shape) * dtype.itemsize
    if size >= _LARGE:
        # By its name, so that Python shows one warning for all layers of a shape.
        name = getattr(init_method, "__qualname__", repr(init_method))
        warnings.warn(
            f"initializing a weight of shape {full_shape} draws all of it, {size >> 20} MiB, on "
            f"every rank, as {name} is not one of torch.nn.init's that fill it in tiles "
            "(normal_, uniform_, trunc_normal_, xavier_*, kaiming_* and constants)",
            stacklevel=3,
        )
    weight = torch.empty(full_shape, dtype=dtype, device=like.device)
    with _seeded(derive_tile_seed(seed, 0), like.device):
        init_method(weight)
    return weight


def _drawn_dtype(target: Tensor) -> torch.dtype:
    if target.dtype == torch.float64:
        return torch.float64
    return torch.float32


def derive_tile_seed(seed: int, number: int) -> int:
    """Return a 64-bit seed that has nothing in common with its neighbors' (splitmix64)."""
    # With a plain sum, tile 1 of one layer would be tile 0 of the layer seeded next.
    state = seed % 2**64
    for word in (0, number):
        state = (state + 0x9E3779B97F4A7C15 * (word + 1)) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state
