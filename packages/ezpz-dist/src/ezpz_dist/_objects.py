"""Objects on their way from rank to rank of the same job: as bytes, tensors as their elements."""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ._errors import CollectiveError
from ._world import find_world


def is_plain(obj: object) -> bool:
    """Return whether an object is a dense tensor whose bytes are all there is to it."""
    if not isinstance(obj, torch.Tensor) or type(obj) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return obj.layout is torch.strided and not obj.is_quantized and not obj.is_meta


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a plain tensor as uint8 [bytes], on its device; copied if need be."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Not reshape: of one element it leaves a stride of 0, of which torch makes no bytes.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def raw_of(tensor: torch.Tensor) -> bytearray:
    """Return the bytes of a plain tensor, on the host."""
    data = as_bytes(tensor)
    raw = bytearray(data.numel())
    if raw:
        torch.frombuffer(raw, dtype=torch.uint8).copy_(data)
    return raw


def as_tensor(data: bytes | bytearray) -> torch.Tensor:
    return torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[: len(data)]


About = tuple[str, tuple[int, ...], bool]
"""A tensor's dtype, its shape, and whether it lies on a device."""


def about(tensor: torch.Tensor) -> About:
    return str(tensor.dtype)[6:], tuple(tensor.shape), tensor.device.type != "cpu"


def empty(dtype: str, shape: tuple[int, ...], on_device: bool) -> torch.Tensor:
    """Return a tensor like another rank's: on this rank's device, or the host."""
    world = find_world()
    where = world.device if on_device and world is not None else torch.device("cpu")
    return torch.empty(shape, dtype=getattr(torch, dtype), device=where)


def dump(obj: object) -> bytes:
    """Return an object's bytes; tensors in it lose their graph, and find their device by `load`."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | {torch.Tensor: _reduced}
    try:
        pickler.dump(obj)
    except Exception as error:  # pickling runs the object's own code
        raise CollectiveError(
            f"{type(obj).__name__} cannot be pickled ({type(error).__name__}: {error}); expected "
            "an object of importable classes, without open files, locks or lambdas"
        ) from error
    return buffer.getvalue()


def load(data: bytes | bytearray, sender: int) -> Any:
    try:
        return pickle.loads(data)  # noqa: S301  # from a rank of this very job
    except Exception as error:  # unpickling runs the object's own code
        raise CollectiveError(
            f"what rank {sender} sent cannot be unpickled here ({type(error).__name__}: {error}); "
            "expected the same modules on every rank",
            [sender],
        ) from error


def _reduced(tensor: torch.Tensor) -> Any:
    """Return a tensor as its bytes: by itself torch would put it on the sender's device."""
    if not is_plain(tensor):
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return _restored, (raw_of(tensor), about(tensor))


def _restored(raw: bytearray, like: About) -> torch.Tensor:
    tensor = empty(*like)
    if raw:
        as_bytes(tensor).copy_(torch.frombuffer(raw, dtype=torch.uint8))
    return tensor


# One object from one rank to another, within a group; who waits for it says so (`waiting`).

_AT_ONCE = 1 << 28  # bytes that are sent at once
Group = dist.ProcessGroup | None


def send_object(
    obj: object, to: int, where: torch.device, group: Group, dumped: bytes | None = None
) -> None:
    """Send an object to a rank of the world; a plain tensor goes as its elements, unpickled."""
    if isinstance(obj, torch.Tensor) and is_plain(obj):
        header, data = dump(about(obj)), as_bytes(obj)
    else:
        header, data = b"", as_tensor(dump(obj) if dumped is None else dumped)
    sizes = torch.tensor([len(header), data.numel()])
    for tensor in (sizes, as_tensor(header), *data.split(_AT_ONCE)):
        if tensor.numel():
            dist.send(tensor.to(where), to, group=group)


def receive_object(sender: int, where: torch.device, group: Group) -> Any:
    def get(tensor: torch.Tensor) -> torch.Tensor:
        for piece in tensor.split(_AT_ONCE):
            if piece.numel():
                staged = piece.to(where)
                dist.recv(staged, sender, group=group)
                if staged is not piece:
                    piece.copy_(staged)
        return tensor

    header, length = get(torch.zeros(2, dtype=torch.int64)).tolist()
    found = load(raw_of(get(torch.empty(header or length, dtype=torch.uint8))), sender)
    if not header:
        return found
    tensor = empty(*found)
    get(as_bytes(tensor))
    return tensor


# A dict of dicts as a row of leaves, in an order that does not depend on insertion.


def unfold(obj: object) -> tuple[list[str], list[Any]]:
    """Return keys in words, and a leaf for each; the key is empty where ``obj`` is no dict."""
    found = list(_leaves(obj, "")) if isinstance(obj, dict) else [("", obj)]
    return [key for key, _ in found], [leaf for _, leaf in found]


def refold(obj: Any, results: Iterator[Any]) -> Any:
    """Return an object like ``obj``, its leaves replaced in `unfold`'s order."""
    if not isinstance(obj, dict):
        return next(results)
    done = dict.fromkeys(obj)
    for key in _order(obj):
        value = obj[key]
        done[key] = refold(value, results) if isinstance(value, dict) and value else next(results)
    return done


def _leaves(mapping: dict[Any, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key in _order(mapping):
        if not isinstance(key, (str, int)):  # others need not look alike on all ranks
            raise TypeError(f"all_reduce of a dict with the key {key!r}; expected strings or ints")
        value = mapping[key]
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{above}{key!r} > ")
        else:
            yield f"{above}{key!r}", value


def _order(mapping: dict[Any, Any]) -> list[Any]:
    try:
        return sorted(mapping)
    except TypeError:  # strings and ints
        return sorted(mapping, key=repr)
