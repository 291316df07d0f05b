"""How each rank comes by its data: a broadcast batch, and its own tokens of a sequence."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ._current import context_group, tensor_group
from ._errors import DegreeError, ParallelError
from ._groups import member
from ._init import as_dtype
from ._mappings import _Gather, applied, broadcast_

_HEADER = 64
"""Numbers in the first message: a status, and the shapes if they fit."""
_FIXED = 5
_FINE, _MISSING, _NOT_A_TENSOR, _WRONG_DTYPE = range(4)
_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
"""What a wrong dtype is told as; the order is part of the message."""


@torch.no_grad()
def broadcast_data(
    keys: Sequence[str],
    data: Mapping[str, Tensor] | None,
    datatype: torch.dtype | str,
    tp_group: ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """Return the tensors of the group's first rank on every rank of the tensor-parallel group.

    Two broadcasts: the shapes, then all values in one buffer, of which the results are views.
    (A third if the shapes need more than 59 numbers.) With one rank, none: the tensors themselves,
    on ``device``. Collective: every rank of the group calls this with the same ``keys`` and
    ``datatype``.

    Args:
        keys: Names of the tensors to send; others in ``data`` are left out.
        data: The tensors, of any shape and on any device. Only the group's first rank's is looked
            at; the others may pass None.
        datatype: The dtype of all of them.
        tp_group: Default: the tensor-parallel group.
        device: Where the results are. Default: the current device of the group's backend (CUDA
            for NCCL, XPU for XCCL, CPU for gloo and MPI).

    Raises:
        ValueError: On every rank: a key is missing on the first rank, or is not a tensor of
            ``datatype``. Or ``datatype`` is no dtype.
        ParallelError: This rank's ``keys`` or ``datatype`` differ from the first rank's.
    """
    datatype = as_dtype(datatype, "datatype")
    group = tensor_group(tp_group)
    place = _backend_device(group) if device is None else torch.device(device)
    first = group is None or group.rank() == 0
    problem = (_FINE, 0, 0)
    tensors: list[Tensor] = []
    if first:
        problem, tensors = _collect_tensors(keys, data or {}, datatype)
    if group is None:
        _raise_problem(problem, keys, datatype)
        return {key: tensor.to(place) for key, tensor in zip(keys, tensors, strict=True)}
    asked = zlib.crc32(repr((tuple(keys), str(datatype))).encode())
    shapes: list[int] = []
    for tensor in tensors:
        shapes += (tensor.dim(), *tensor.shape)
    header = [*problem, asked, len(shapes), *shapes[: _HEADER - _FIXED]]
    message = torch.tensor(header + [0] * (_HEADER - len(header)), device=place)
    header = broadcast_(message, 0, group).tolist()
    sent, count = header[3:_FIXED]
    if sent != asked:
        raise ParallelError(
            f"broadcast_data: rank {group.rank()} of the group asks for {list(keys)} of "
            f"{datatype}, and its first rank sends others; pass the same on every rank"
        )
    _raise_problem(header[:3], keys, datatype)
    if count > _HEADER - _FIXED:
        rest = torch.tensor(shapes or [0] * count, device=place)
        shapes = broadcast_(rest, 0, group).tolist()
    else:
        shapes = header[_FIXED : _FIXED + count]
    sizes = _unpack_shapes(shapes)
    lengths = [torch.Size(size).numel() for size in sizes]
    buffer = torch.empty(sum(lengths), dtype=datatype, device=place)
    parts = [part.view(size) for part, size in zip(buffer.split(lengths), sizes, strict=True)]
    for part, tensor in zip(parts, tensors, strict=False):
        part.copy_(tensor)
    if len(buffer):
        # As bytes, because not every backend knows every dtype.
        broadcast_(buffer.view(torch.uint8), 0, group)
    return dict(zip(keys, parts, strict=True))


def _collect_tensors(
    keys: Sequence[str], data: Mapping[str, object], datatype: torch.dtype
) -> tuple[tuple[int, int, int], list[Tensor]]:
    tensors: list[Tensor] = []
    for position, key in enumerate(keys):
        if key not in data:
            return (_MISSING, position, 0), []
        tensor = data[key]
        if not isinstance(tensor, Tensor):
            return (_NOT_A_TENSOR, position, 0), []
        if tensor.dtype != datatype:
            known = _DTYPES.index(tensor.dtype) if tensor.dtype in _DTYPES else len(_DTYPES)
            return (_WRONG_DTYPE, position, known), []
        tensors.append(tensor)
    return (_FINE, 0, 0), tensors


def _raise_problem(status: Sequence[int], keys: Sequence[str], datatype: torch.dtype) -> None:
    what, position, dtype = status
    if what == _FINE:
        return
    found = {
        _MISSING: "is missing from the data",
        _NOT_A_TENSOR: "is not a tensor",
        _WRONG_DTYPE: f"has dtype {(*_DTYPES, 'unknown')[dtype]}",
    }[what]
    raise ValueError(
        f"broadcast_data: {keys[position]!r} {found} on the first rank of the group; expected a "
        f"tensor of {datatype}. Send tensors of another dtype by a call of their own"
    )


def _unpack_shapes(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    sizes = []
    start = 0
    while start < len(numbers):
        end = start + 1 + numbers[start]
        sizes.append(tuple(numbers[start + 1 : end]))
        start = end
    return sizes


def _backend_device(group: ProcessGroup | None) -> torch.device:
    """The current accelerator, where the group's backend sends from one; else the CPU."""
    # gloo takes CUDA tensors too, but copies them to the host first, so it counts as the CPU's.
    cpu = torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return cpu
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if group is None:
        return torch.device(accelerator.type)
    # A group made without torch.distributed is a backend itself.
    get_backend = getattr(group, "_get_backend", None)
    try:
        backend = group
        if get_backend is not None:
            backend = get_backend(accelerator)
    except RuntimeError:
        return cpu  # the group has no backend for the accelerator
    if backend.name() in ("gloo", "mpi"):
        return cpu
    return torch.device(accelerator.type)


# Which tokens of a sequence are whose, and how each rank comes by its own.
#
# In a balanced sequence of n ranks rank r holds chunks r and 2n - 1 - r of 2n: attention to what
# came before costs as much on every rank (Megatron-LM, megatron/core/utils.py, and torch's
# head-and-tail order). Otherwise rank r holds the r-th of n parts.


def shard_sequence(
    tensor: Tensor,
    dim: int,
    *,
    group: ProcessGroup | None = None,
    ulysses_group: ProcessGroup | None = None,
    balanced: bool = True,
) -> Tensor:
    """Keep this rank's part of a sequence that every rank of the group has. Nothing is sent.

    For tokens, labels and whatever else has the sequence as a dim; `sequence_positions` says
    where the part's tokens lie. `ring_attention`, `ulysses_attention` and `unified_attention`,
    told the same ``balanced``, take the parts.

    **The loss and gradients.** Each rank has the loss of its own tokens only. Sum it and divide by
    the number of tokens in all parts, of all data-parallel ranks:
    ``loss = losses.sum() / tokens_in_all``. Then the ranks' losses add up to the batch's mean, and
    the gradients of every parameter to its gradient. Sum them over data x context, whose group is
    made by ``initialize_tensor_parallel(..., also=[("data", "context")])``. DDP over that group
    takes the mean, so give it ``loss * group.size()``. The same holds for parameters before this
    function, because its own gradient is zero at the tokens of other ranks.

    Args:
        tensor: The whole, the same on every rank.
        dim: That of the sequence.
        group: The ranks that share the sequence; default: the context-parallel group. For
            `unified_attention` the ring.
        ulysses_group: For `unified_attention`: the ranks that share a ring rank's part, each
            holding one stretch of it.
        balanced: Two chunks for each rank, from both ends. False: one.

    Returns:
        A new tensor with ``1 / n`` of the sequence; with one rank the tensor itself.

    Raises:
        DegreeError: The parts would differ in length; names the multiple that is needed.
    """
    ranks = _SequenceRanks("shard_sequence", group, ulysses_group, balanced)
    if ranks.count == 1:
        return tensor
    length = _length(tensor, dim, "shard_sequence")
    parts = [tensor.narrow(dim, at, end - at) for at, end in ranks.spans(length)]
    if len(parts) == 1:  # a copy, so that the whole can be freed
        return parts[0].clone(memory_format=torch.contiguous_format)
    return torch.cat(parts, dim)


def unshard_sequence(
    tensor: Tensor,
    dim: int,
    *,
    group: ProcessGroup | None = None,
    ulysses_group: ProcessGroup | None = None,
    balanced: bool = True,
    sum_grads: bool = False,
) -> Tensor:
    """Join the ranks' parts of a sequence, in its order: the inverse of `shard_sequence`.

    Collective: every rank calls this, with the same shape: one all-gather for each group.

    Args:
        tensor: This rank's part.
        dim: That of the sequence.
        group, ulysses_group, balanced: As for `shard_sequence`.
        sum_grads: False where every rank goes on to compute the same, and so has the same
            gradient: each keeps its part of it. True where each computes something else (its
            queries' attention to all keys): the gradients are summed, by a reduce-scatter.

    Raises:
        DegreeError: ``balanced``, and the part is not two chunks of one length.
    """
    ranks = _SequenceRanks("unshard_sequence", group, ulysses_group, balanced)
    if ranks.count == 1:
        return tensor
    ranks.check(_length(tensor, dim, "unshard_sequence") * ranks.count)
    if ranks.ulysses is not None:
        tensor = applied(_Gather, tensor, dim, sum_grads, ranks.ulysses)
    if ranks.ring is not None:
        tensor = applied(_Gather, tensor, dim, sum_grads, ranks.ring)
        if balanced:
            chunks = tensor.chunk(2 * ranks.ring.size(), dim)
            tensor = torch.cat([*chunks[0::2], *chunks[-1::-2]], dim)
    return tensor


def rank_order(tensor: Tensor, dim: int, ranks: int) -> Tensor:
    """Put the chunks of a whole sequence in the order of the ranks that hold them, balanced."""
    chunks = tensor.chunk(2 * ranks, dim)
    ordered: list[Tensor] = []
    for rank in range(ranks):
        ordered += (chunks[rank], chunks[-1 - rank])
    return torch.cat(ordered, dim)


def sequence_positions(
    length: int,
    *,
    group: ProcessGroup | None = None,
    ulysses_group: ProcessGroup | None = None,
    balanced: bool = True,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return where in the whole sequence this rank's tokens lie, for rotary embeddings and masks.

    Args:
        length: Of the whole sequence, in tokens.
        group, ulysses_group, balanced: As for `shard_sequence`.
        device: Of the result; torch's default device if None.

    Returns:
        ``[length / n]``, int64.

    Raises:
        DegreeError: The parts would differ in length; names the multiple that is needed.
    """
    ranks = _SequenceRanks("sequence_positions", group, ulysses_group, balanced)
    spans = ranks.spans(length)
    return torch.cat([torch.arange(at, end, device=device) for at, end in spans])


class _SequenceRanks:
    """Who shares a sequence: a ring, and for each of its ranks those that share the part of it."""

    def __init__(
        self, name: str, group: ProcessGroup | None, ulysses: ProcessGroup | None, balanced: bool
    ) -> None:
        self.name = name
        self.ring = context_group(group)
        given = member(ulysses, "Ulysses")
        self.ulysses: ProcessGroup | None = None
        self._heads = 1
        if given is not None and given.size() > 1:
            self.ulysses = given
            self._heads = given.size()
        self.balanced = balanced and self.ring is not None
        self._rings = 1
        if self.ring is not None:
            self._rings = self.ring.size()
        self.count = self._rings * self._heads

    def check(self, length: int) -> None:
        chunks = 1
        if self.balanced:
            chunks = 2
        multiple = self._rings * math.lcm(chunks, self._heads)
        if length % multiple:
            what = ""
            if self.balanced:
                what = "in two chunks each "
            raise DegreeError(
                f"{self.name}: the sequence has {length} tokens, which {self.count} ranks {what}"
                f"cannot share equally; expected a multiple of {multiple}: pad it to "
                f"{-(-length // multiple) * multiple}, and leave the padding out of the loss"
            )

    def spans(self, length: int) -> list[tuple[int, int]]:
        self.check(length)
        index = 0
        if self.ring is not None:
            index = self.ring.rank()
        if self.balanced:
            size = length // (2 * self._rings)
            starts = [index * size, (2 * self._rings - 1 - index) * size]
        else:
            size = length // self._rings
            starts = [index * size]
        if self.ulysses is None:
            return [(start, start + size) for start in starts]
        stretch = length // self.count
        low = self.ulysses.rank() * stretch
        spans = []
        for number, start in enumerate(starts):
            # What [low, low + stretch) of the part takes from this chunk of it.
            at = max(low - number * size, 0)
            end = min(low + stretch - number * size, size)
            if at < end:
                spans.append((start + at, start + end))
        return spans


def _length(tensor: Tensor, dim: int, name: str) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise DegreeError(
            f"{name}: dim {dim} of a tensor of shape {tuple(tensor.shape)}; expected the dim of "
            f"the sequence, {-tensor.dim()} to {tensor.dim() - 1}"
        )
    return tensor.shape[dim]
