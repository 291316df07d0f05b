"""What a parameter is a part of, kept in attributes beside Megatron-LM's."""

from __future__ import annotations

from torch import Tensor

from ezpz_tp._errors import DegreeError
from ezpz_tp._layers.attributes import set_whole

from .spec import Shard


def shard_of(parameter: Tensor, degree: int | None = None) -> Shard | None:
    """Return what a parameter is a part of.

    The layers of this package say it of all of theirs. What nothing is said of is whole on
    every rank.

    Args:
        parameter: This rank's.
        degree: The tensor-parallel degree, for parameters with Megatron-LM's attributes alone,
            which do not say how large the whole is: they are then taken as divided evenly.

    Returns:
        None where a parameter is split, the size of the whole is not said, and neither is
        ``degree``.
    """
    said = hasattr(parameter, "full_shape") or getattr(parameter, "partition_dim", -1) < 0
    if degree is None and not said and getattr(parameter, "tensor_model_parallel", False):
        return None
    return shard_at(parameter, degree or 1)


def shard_at(parameter: Tensor, degree: int) -> Shard:
    """Return what a parameter is a part of, at a degree; see `shard_of`."""
    dim: int = getattr(parameter, "partition_dim", -1)
    full_shape: tuple[int, ...] | None = getattr(parameter, "full_shape", None)
    if full_shape is not None:
        blocks = getattr(parameter, "partition_blocks", ())
        padded = getattr(parameter, "partition_padded", False)
        return Shard(full_shape, dim if dim >= 0 else None, blocks, padded)
    whole = list(parameter.shape)
    if dim < 0:
        return Shard(tuple(whole))
    if getattr(parameter, "tensor_model_parallel", False):
        whole[dim] *= degree
    stride = getattr(parameter, "partition_stride", 1)
    if whole[dim] % stride:
        raise DegreeError(
            f"a parameter of shape {tuple(parameter.shape)} has partition_stride {stride}, which "
            f"does not divide {whole[dim]}, the whole dim {dim}"
        )
    return Shard(tuple(whole), dim, (whole[dim] // stride,) * stride if stride > 1 else ())


def set_shard(parameter: Tensor, shard: Shard, degree: int | None = None) -> None:
    """Say what a parameter of your own is a part of.

    Sets Megatron-LM's attributes too, by which gradient norms and clipping know it.

    Args:
        parameter: This rank's part, of ``shard.local_shape(...)``.
        shard: What it is a part of: say ``Shard((q + k + v, hidden), 0, blocks=(q, k, v))``.
        degree: The tensor-parallel degree, where the shapes do not tell whether it is above 1.

    Raises:
        DegreeError: The parameter has not the shape that it would have.
    """
    shape = tuple(parameter.shape)
    dim = shard.dim
    if degree is None:
        split = shape != shard.full_shape
    else:
        split = degree > 1 and dim is not None
        if shape != shard.local_shape(0, degree):
            raise DegreeError(
                f"a parameter of shape {shape} is no part of {shard} at degree {degree}; expected "
                f"{shard.local_shape(0, degree)}"
            )
    fits = len(shape) == len(shard.full_shape) and all(
        held == full or (split and at == dim)
        for at, (held, full) in enumerate(zip(shape, shard.full_shape, strict=True))
    )
    if not fits:
        raise DegreeError(
            f"a parameter of shape {shape} is no part of {shard}; expected the full shape"
            + ("" if dim is None else f", or less of dim {dim}")
        )
    set_whole(parameter, shard.full_shape, shard.blocks, shard.padded)
    values = {
        "tensor_model_parallel": split,
        "partition_dim": -1 if dim is None else dim,
        "partition_stride": max(1, len(shard.blocks)),
    }
    for name, value in values.items():
        setattr(parameter, name, value)
