"""Compare a parallel module with an ordinary one: the same numbers, to the last bit.

Sums of floating point numbers depend on their order, and parallel code changes the order. Sums of
small integers do not, as long as they stay below 2 to the number of digits (256 in bfloat16): so
with integers for weights, inputs and incoming gradients, a correct parallel module gives exactly
what the ordinary one gives, and any difference at all is a mistake.
"""

from __future__ import annotations

import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ezpz_tp._current import get_state
from ezpz_tp._grads import finalize_grads, gradient
from ezpz_tp._shard import Shard

from ._ranks import counting, run_ranks

# One rank's part of a tensor, compared with the whole.


class Part(NamedTuple):
    value: Tensor
    shard: Shard
    rank: int


def _split(whole: Tensor, dim: int | None, blocks: tuple[int, ...] = ()) -> Shard:
    """Return how a tensor is split; padded at its end with zeros where the dim is uneven."""
    return Shard(tuple(whole.shape), dim, blocks, padded=dim is not None and not blocks)


def compare(
    name: str, part: Part, whole: Tensor | None, degree: int, tolerance: float | None
) -> None:
    """Raise AssertionError if a part is not what the whole has there."""
    # A part's padding must be zero in a gradient, and is not looked at in an output.
    where = f"tensor degree {degree}, rank {part.rank}: {name}"
    if whole is None:
        raise AssertionError(f"{where} is there, but the unsharded module has none")
    dim, expected = part.shard.dim, part.shard.cut(whole, part.rank, degree)
    found = part.value
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise AssertionError(
            f"{where} is {_form(found)}; expected {_form(expected)}"
            + ("" if dim is None else f", a part of {_form(whole)} along dim {dim}")
        )
    if dim is not None and name.startswith("output"):
        real = sum(length for *_, length in part.shard.pieces(part.rank, degree))
        found, expected = found.narrow(dim, 0, real), expected.narrow(dim, 0, real)
    if tolerance is None:
        wrong = (found != expected) & ~(found.isnan() & expected.isnan())
    else:
        largest = max(1.0, whole.abs().max().item()) if whole.numel() else 1.0
        wrong = ~((found - expected).abs() <= tolerance * largest)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        uneven = whole.is_floating_point() and not whole.equal(whole.round())
        raise AssertionError(
            f"{where} differs in {int(wrong.sum())} of {wrong.numel()} values, first at "
            f"{list(at)}: {found[at].item()!r}, but {expected[at].item()!r} unsharded"
            + (_NOT_INTEGERS if tolerance is None and uneven else "")
        )


_NOT_INTEGERS = (
    "; the unsharded values are not all integers, so that the order of sums may show: "
    "not integer arithmetic: pass tolerance="
)


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def same_on_all(name: str, parts: Sequence[Part], degree: int) -> None:
    """Raise AssertionError if a replicated tensor has not the same bits on every rank."""
    if parts[0].shard.dim is not None:
        return
    first = parts[0].value.contiguous().view(-1).view(torch.uint8)
    for part in parts[1:]:
        other = part.value.contiguous().view(-1).view(torch.uint8)
        if not torch.equal(first, other):
            at = int((first != other).nonzero()[0]) // part.value.element_size()
            raise AssertionError(
                f"tensor degree {degree}: {name} is replicated, but rank {part.rank} has "
                f"{part.value.reshape(-1)[at].item()!r} where rank 0 has "
                f"{parts[0].value.reshape(-1)[at].item()!r} (value {at})"
            )


_DIGITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}


def assert_matches_unsharded(
    build_parallel: Callable[[], nn.Module],
    build_unsharded: Callable[[], nn.Module],
    *inputs: Any,
    tensor: int | Iterable[int] = 2,
    names: Mapping[str, str] | None = None,
    split_inputs: int | None = None,
    split_outputs: int | None = None,
    density: float = 0.25,
    tolerance: float | None = None,
    seed: int = 0,
    in_processes: bool = False,
    timeout: float = 60.0,
) -> Counter[str]:
    """Assert that a tensor-parallel module computes what an ordinary one does, at some degrees.

    Both are given the same weights (each rank its part), inputs and incoming gradients, all small
    integers. Then all of these must be equal, and bitwise the same on all ranks where they are
    replicated: every output, every input's gradient, and every parameter's gradient after
    `finalize_grads`.

    Args:
        build_parallel: Makes the parallel module; called on every rank. Its parameters say by the
            attributes ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride`` how
            they are split; an uneven dim is taken to be padded at its end.
        build_unsharded: Makes the ordinary module; called once.
        *inputs: Examples of what both are called with. The values of floating point tensors are
            replaced; everything else, such as token ids, is passed as it is.
        tensor: The degree of tensor parallelism, or several to go through.
        names: The ordinary parameter's name for a parallel parameter's name, where they differ.
        split_inputs: The dim along which each rank is given a part of the tensors in ``inputs``
            (0 for sequence parallel). None: all of them on every rank.
        split_outputs: The dim along which each rank returns a part of the output.
        density: The share of weights that are not zero. Lower it when values become too large.
        tolerance: Random numbers instead of integers, and the largest difference allowed, relative
            to the largest value of each tensor or to 1.
        seed: Of the numbers.
        in_processes: See `run_ranks`.
        timeout: See `run_ranks`; of each degree.

    Returns:
        How many collectives a rank started in forward and backward, by name, at the last degree.

    Raises:
        AssertionError: Something differs; says what, on which rank, where and by how much.
        ValueError: A value is too large for its dtype to hold every integer up to it. Or an
            output, or every gradient, is 0 everywhere, which shows nothing (one gradient of 0
            gives a UserWarning). Or ``tensor`` is empty.
    """
    degrees = [tensor] if isinstance(tensor, int) else list(tensor)
    if not degrees:
        raise ValueError(f"tensor={tensor!r} names no degree to compare at; expected e.g. (1, 2)")
    whole = _Whole(build_unsharded(), inputs, seed, density, tolerance is None)
    counts: Counter[str] = Counter()
    for degree in degrees:
        given = whole.parameters, whole.inputs, whole.incoming, dict(names or {})
        task = build_parallel, *given, split_inputs, split_outputs
        ranks = run_ranks(_on_rank, degree, *task, in_processes=in_processes, timeout=timeout)
        for rank, (parts, _) in enumerate(ranks):
            if missing := whole.values.keys() - parts.keys():
                raise AssertionError(
                    f"tensor degree {degree}, rank {rank} has no {', '.join(sorted(missing))}; "
                    "expected what the unsharded module has (names= maps parameters)"
                )
        for name in ranks[0][0]:
            parts_of_name = [parts[name] for parts, _ in ranks]
            for part in parts_of_name:
                compare(name, part, whole.values.get(name), degree, tolerance)
            same_on_all(name, parts_of_name, degree)
        counts = ranks[0][1]
        for rank, (_, others) in enumerate(ranks):
            if others != counts:
                raise AssertionError(
                    f"tensor degree {degree}: rank 0 started the collectives {dict(counts)}, but "
                    f"rank {rank} {dict(others)}; expected the same on every rank"
                )
    return counts


class _Whole:
    """The ordinary module's parameters, and what it computes."""

    def __init__(
        self, module: nn.Module, inputs: tuple[Any, ...], seed: int, density: float, integers: bool
    ) -> None:
        self._seed, self._integers = seed, integers
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(self._numbers(name, parameter, density))
        self.parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
        self.inputs = tuple(
            self._numbers(f"input {n}", value, 0.5) if _is_float(value) else value
            for n, value in enumerate(inputs)
        )
        outputs, given = _forward(module, self.inputs)
        self.incoming = [self._numbers(f"incoming {n}", o, 0.5) for n, o in enumerate(outputs)]
        _backward(outputs, self.incoming)
        self.values = _results(module, outputs, given, {})
        if integers:
            self._assert_exact()
        self._assert_something()

    def _numbers(self, name: str, like: Tensor, density: float) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed + zlib.crc32(name.encode()))
        numbers = torch.empty(like.shape, dtype=torch.float64)
        if self._integers:
            numbers.random_(-1, 2, generator=generator)
            # A third of them is 0 already.
            numbers *= torch.rand(like.shape, generator=generator) < density * 1.5
        else:
            numbers.normal_(generator=generator)
        return numbers.to(like)

    def _assert_exact(self) -> None:
        for name, value in self.values.items():
            largest, exact = value.abs().max().item(), 2 ** _DIGITS.get(value.dtype, 53)
            if value.isfinite().all() and largest > exact:
                raise ValueError(
                    f"{name} of the unsharded module reaches {largest:g}, but {value.dtype} holds "
                    f"every integer only up to {exact}; use smaller examples or a lower density="
                )

    def _assert_something(self) -> None:
        """Refuse what mistakes would not show in."""
        nothing = [name for name, value in self.values.items() if _is_nothing(value)]
        gradients = [name for name in self.values if name.startswith("gradient")]
        outputs = [name for name in nothing if name.startswith("output")]
        text = " of the unsharded module: no finite value but 0, in which no mistake would show; "
        remedy = "raise density= or use larger examples"
        if outputs or (gradients and set(gradients) <= set(nothing)):
            raise ValueError((", ".join(outputs) or "all gradients") + text + remedy)
        if nothing:
            warnings.warn(", ".join(nothing) + text + "unless meant, " + remedy, stacklevel=4)


def _is_nothing(value: Tensor) -> bool:
    return value.is_floating_point() and value.numel() > 0 and not value.nan_to_num(0, 0, 0).any()


def _on_rank(
    build: Callable[[], nn.Module],
    parameters: Mapping[str, Tensor],
    whole_inputs: tuple[Any, ...],
    whole_incoming: Sequence[Tensor],
    names: Mapping[str, str],
    split_inputs: int | None,
    split_outputs: int | None,
) -> tuple[dict[str, Part], Counter[str]]:
    state = get_state()
    place = index, degree = state.index("tensor"), state.size("tensor")
    module = build()
    shards = {f"output {n}": _split(grad, split_outputs) for n, grad in enumerate(whole_incoming)}
    shards |= {
        f"gradient of input {n}": _split(value, split_inputs if value.dim() else None)
        for n, value in enumerate(whole_inputs)
        if isinstance(value, Tensor)
    }
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            owner = names.get(name, name)
            full = parameters.get(owner)
            if full is None:
                raise AssertionError(
                    f"the parallel module has a parameter {name}, the unsharded one no "
                    f"{owner}, only {', '.join(parameters)}; map it by names="
                )
            shards[f"gradient of {owner}"] = shard = _shard_of(parameter, full)
            mine = shard.cut(full, *place)
            if mine.shape != parameter.shape:
                raise AssertionError(
                    f"rank {index}: {name} has shape {tuple(parameter.shape)}, but the part of "
                    f"{owner} {tuple(full.shape)} for one rank of {degree} is "
                    f"{tuple(mine.shape)} (dim {shard.dim}, stride {shard.blocks or 1})"
                )
            parameter.copy_(mine)
    inputs = tuple(
        shards[key].cut(value, *place) if (key := f"gradient of input {n}") in shards else value
        for n, value in enumerate(whole_inputs)
    )
    with counting() as counts:
        outputs, given = _forward(module, inputs)
        pairs = enumerate(whole_incoming)
        _backward(outputs, [shards[f"output {n}"].cut(grad, *place) for n, grad in pairs])
    finalize_grads(module)
    found = _results(module, outputs, given, names)
    return {name: Part(value, shards[name], index) for name, value in found.items()}, counts


def _forward(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[list[Tensor], dict[int, Tensor]]:
    """Return the output's tensors, and the inputs that want a gradient by position."""
    given = {
        n: value.detach().clone().requires_grad_()
        for n, value in enumerate(inputs)
        if _is_float(value)
    }
    leaves = tree_leaves(module(*(given.get(n, value) for n, value in enumerate(inputs))))
    # A bias that is handed on (skip_bias_add) is compared as the parameter that it is.
    return [o for o in leaves if isinstance(o, Tensor) and not isinstance(o, nn.Parameter)], given


def _backward(outputs: list[Tensor], incoming: list[Tensor]) -> None:
    pairs = [(o, g) for o, g in zip(outputs, incoming, strict=True) if o.requires_grad]
    if pairs:
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])


def _results(
    module: nn.Module, outputs: list[Tensor], given: dict[int, Tensor], names: Mapping[str, str]
) -> dict[str, Tensor]:
    found = {f"output {n}": output.detach() for n, output in enumerate(outputs)}
    leaves = {f"input {n}": value for n, value in given.items()}
    leaves |= {names.get(name, name): each for name, each in module.named_parameters()}
    grads = {f"gradient of {name}": gradient(leaf) for name, leaf in leaves.items()}
    return found | {name: grad for name, grad in grads.items() if grad is not None}


def _shard_of(parameter: nn.Parameter, whole: Tensor) -> Shard:
    if not getattr(parameter, "tensor_model_parallel", False):
        return _split(whole, None)
    dim, stride = getattr(parameter, "partition_dim", 0), getattr(parameter, "partition_stride", 1)
    equal = (whole.shape[dim] // stride,) * stride if stride > 1 else ()
    return _split(whole, dim, getattr(parameter, "partition_blocks", ()) or equal)


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
