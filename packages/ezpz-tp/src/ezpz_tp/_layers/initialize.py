"""A rank's part of a weight, made without the rest of it.

The full weight is cut into tiles whose size depends on its shape alone. Each tile is drawn
from its own stream, seeded by the layer's seed and the tile's number, by whichever ranks hold
some of it: so the full weight is the same at every degree, and no rank ever holds it.
"""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ezpz_tp._errors import DegreeError
from ezpz_tp._regions.collectives import broadcast_

from .boxes import Box, common, elements, shifted, slices, stretches, tiles, within
from .tile import NoOtherNumbers, NotElementwiseError, Tile

InitMethod = Callable[[Tensor], object]
"""Fills a tensor in place, as the functions of ``torch.nn.init`` do."""

Init = Literal["blocks", "whole"]
"""How a weight is drawn: in blocks, of which no rank makes more than it holds; or whole, from
torch's default generator, as fairscale and torch's own layers do."""

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

    ``init_method`` is called once a tile of the weight that this rank holds some of, with a
    stand-in that has the full weight's shape (fans are those of the full weight) and this tile's
    values. Whatever acts on each element alone can be done so: all of ``torch.nn.init`` but
    ``orthogonal_``, ``eye_``, ``dirac_`` and ``sparse_``. For those, for an ``init_method`` that
    copies data, reads values or brings its own generator, the full weight is made on every rank,
    by one call, and cut: right, but slow and large, and a large one is warned of.

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

    A shard may be larger than its part, where the degree does not divide the dim: each rank then
    holds as many rows as the first, and what lies past the end of the full weight is zero.

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
                    _fill(local[slices(at)], full, full_shape, dim, init_method, seed=seed)
                if not held:
                    _draw_first(local, full_shape, dim, init_method, seed)
        except NotElementwiseError as error:
            weight = _whole(local, full_shape, init_method, seed, error)
            for at, full in held:
                local[slices(at)].copy_(weight[slices(full)])


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
    """Fill this rank's part of a weight that is made whole, from torch's default generator.

    As fairscale and, with ``dtype`` float32, Megatron-LM on the CPU do. The ranks must agree on
    where their generators are (`one_generator`). The weight is made on the shard's device, and of
    its dtype, unless said otherwise.

    Returns:
        The full weight.
    """
    weight = torch.empty(
        tuple(full_shape), dtype=dtype or shard.dtype, device=device or shard.device
    )
    with torch.no_grad():
        local, held = _held(shard, tuple(full_shape), partition_dim, index, degree, stride)
        init_method(weight)
        for at, full in held:
            local[slices(at)].copy_(weight[slices(full)])
    return weight


def _held(
    shard: Tensor,
    full_shape: tuple[int, ...],
    partition_dim: int | None,
    index: int,
    degree: int,
    stride: int | Sequence[int],
) -> tuple[Tensor, list[tuple[Box, Box]]]:
    """Return what this process holds, zero past the end of the full weight, and where it lies."""
    parts = stretches(
        tuple(shard.shape), full_shape, partition_dim, index=index, degree=degree, stride=stride
    )
    local, offsets = local_part(shard)
    held = [within(s, offsets, tuple(local.shape)) for s in parts]
    if sum(elements(full) for _, full in held) < local.numel():
        local.zero_()
    return local, [(at, full) for at, full in held if elements(full)]


def check_init(layer: str, init: str) -> Init:
    """Return ``init``, if it is one.

    Raises:
        ValueError: It is not.
    """
    if init not in get_args(Init):
        raise ValueError(
            f"{layer}: init={init!r}; expected {' or '.join(map(repr, get_args(Init)))}"
        )
    return init  # type: ignore[return-value]


@contextlib.contextmanager
def one_generator(
    seed: int | None, group: ProcessGroup | None, device: torch.device
) -> Iterator[None]:
    """Let torch's default generator of a device be the same on every rank of a group.

    It begins at ``seed`` and comes back after the block; without one it begins where the first
    rank's is, and stays where it was left. Collective in that case.
    """
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
    """Seed torch's default generators for a block. Ranks that are threads take turns."""
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
    """Return one seed on every rank of a group.

    Collective when ``seed`` is None: every rank of the group calls this.

    Args:
        seed: The seed, the same on every rank; or None for one drawn from torch's default
            generator of the device on the group's first rank. Every rank draws, so that their
            generators stay as far as each other's.
        group: The ranks that share the weight; None for a rank alone.
        device: Where the weight will be; the CPU for None and meta.
    """
    if seed is not None:
        return int(seed)
    # Where the weight is, as Megatron-LM's seed is its accelerator's alone; meta has no values.
    place = torch.device("cpu" if device is None or torch.device(device).type == "meta" else device)
    drawn = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=place)
    if group is not None:
        drawn = broadcast_(drawn.to(sending_device(group, device)), 0, group)
    return int(drawn.item())


def sending_device(group: ProcessGroup, device: torch.device | str | None) -> torch.device:
    """Return ``device`` if the group can communicate from there, else where it can."""
    wanted = torch.device("cpu" if device is None else device)
    able = [each.type for each in group._device_types]  # noqa: SLF001 - no public way to ask
    if wanted.type in able:
        return wanted
    return torch.device("cpu" if "cpu" in able or not able else able[0])


def local_part(shard: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return what this process holds of a shard, and where in the shard that begins."""
    begins = [0] * shard.dim()
    mesh = getattr(shard, "device_mesh", None)
    if mesh is None:
        return shard.detach(), tuple(begins)
    sizes = list(shard.shape)  # of what is left at each axis of the mesh
    for axis, placement in enumerate(shard.placements):  # type: ignore[attr-defined]
        if placement.is_shard():
            dim, parts = placement.dim, mesh.size(axis)
            each = -(-sizes[dim] // parts)
            skipped = min(mesh.get_local_rank(axis) * each, sizes[dim])
            begins[dim] += skipped
            sizes[dim] = min(each, sizes[dim] - skipped)
    local: Tensor = shard.detach().to_local()  # type: ignore[attr-defined]
    if tuple(local.shape) != tuple(sizes):
        raise DegreeError(
            f"a DTensor of shape {tuple(shard.shape)} with placements "
            f"{shard.placements} holds {tuple(local.shape)} here; "  # type: ignore[attr-defined]
            f"expected {tuple(sizes)}: initialize it before it is sharded"
        )
    return local, tuple(begins)


def _fill(
    target: Tensor,
    box: Box,
    full_shape: tuple[int, ...],
    dim: int,
    init_method: InitMethod,
    *,
    seed: int,
) -> None:
    """Fill a tensor with a box of the full weight, tile by tile."""
    dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
    generator = torch.Generator(device=target.device)
    for number, tile in tiles(full_shape, dim, box):
        shape = tuple(stop - start for start, stop in tile)
        both = common(tile, box)
        into = target[slices(shifted(both, box))]
        whole = both == tile and into.is_contiguous() and into.dtype == dtype
        values = into if whole else torch.empty(shape, dtype=dtype, device=target.device)
        init_method(Tile.of(values, full_shape, generator.manual_seed(_mixed(seed, number))))
        if not whole:
            into.copy_(values[slices(shifted(both, tile))])


def _draw_first(
    like: Tensor,
    full_shape: tuple[int, ...],
    dim: int,
    init_method: InitMethod,
    seed: int,
) -> None:
    """Draw one element, where this rank's are all padding.

    So that what ``init_method`` keeps to itself, such as a generator, is the same on all ranks.
    """
    first: Box = tuple((0, min(1, size)) for size in full_shape)
    if elements(first):
        into = torch.empty([1] * len(full_shape), dtype=like.dtype, device=like.device)
        _fill(into, first, full_shape, dim, init_method, seed=seed)


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
    """Return a 64-bit seed that has nothing in common with its neighbors' (splitmix64).

    With a plain sum, tile 1 of one layer would be tile 0 of the layer seeded next.
    """
    state = seed % 2**64
    for word in (0, number):
        state = (state + 0x9E3779B97F4A7C15 * (word + 1)) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state
