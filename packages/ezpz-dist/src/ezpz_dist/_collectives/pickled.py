"""Objects as bytes, for ranks of the same job."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from ezpz_dist._errors import CollectiveError
from ezpz_dist._world import find_world


def is_plain(obj: object) -> bool:
    """Say whether an object is a dense tensor whose bytes are all there is to it."""
    return (
        isinstance(obj, torch.Tensor)
        and type(obj) in (torch.Tensor, torch.nn.Parameter)
        and obj.layout is torch.strided
        and not obj.is_quantized
        and not obj.is_meta
    )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a plain tensor as uint8 [bytes], on its device; copied if need be."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8)


def place_for(on_device: bool) -> torch.device:
    """Return where a tensor of another rank belongs here: on this rank's device, or the host."""
    world = find_world()
    return world.device if on_device and world is not None else torch.device("cpu")


def dump(obj: object) -> bytes:
    """Return an object's bytes; tensors in it lose their graph, and find their device by `load`.

    Raises:
        CollectiveError: It cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(obj)
    except Exception as error:  # pickling runs the object's own code
        raise CollectiveError(
            f"{type(obj).__name__} cannot be pickled ({type(error).__name__}: {error}); expected "
            "an object of importable classes, without open files, locks or lambdas"
        ) from error
    return buffer.getvalue()


def load(data: bytes | bytearray, sender: int) -> Any:
    """Return the object of `dump`'s bytes.

    Args:
        data: Its bytes.
        sender: The rank that it is from, for the message.

    Raises:
        CollectiveError: It cannot be made here: a class that this rank cannot import.
    """
    try:
        return pickle.loads(data)  # noqa: S301  # from a rank of this very job
    except Exception as error:  # unpickling runs the object's own code
        raise CollectiveError(
            f"what rank {sender} sent cannot be unpickled here ({type(error).__name__}: {error}); "
            "expected the same modules on every rank",
            [sender],
        ) from error


class _Pickler(pickle.Pickler):
    """Writes tensors as their bytes: by itself torch would put them on the sender's device."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or not is_plain(obj):
            return NotImplemented
        data = as_bytes(obj)
        raw = bytearray(data.numel())
        if raw:
            torch.frombuffer(raw, dtype=torch.uint8).copy_(data)
        return _tensor, (raw, str(obj.dtype)[6:], tuple(obj.shape), obj.device.type != "cpu")


def _tensor(raw: bytearray, dtype: str, shape: tuple[int, ...], on_device: bool) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=place_for(on_device))
    if raw:
        as_bytes(tensor).copy_(torch.frombuffer(raw, dtype=torch.uint8))
    return tensor
