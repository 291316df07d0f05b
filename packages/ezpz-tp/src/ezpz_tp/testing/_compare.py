"""Compare a parallel module with an ordinary one: the same numbers, to the last bit.

Sums of floating point numbers depend on their order, and parallel code changes the order. Sums of
small integers do not, as long as they stay below 2 to the number of digits (256 in bfloat16): so
with integers for weights, inputs and incoming gradients, a correct parallel module gives exactly
what the ordinary one gives, and any difference at all is a mistake.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ezpz_tp._current import get_state
from ezpz_tp._grads import finalize_grads, gradient
from ezpz_tp._shard import Shard

from ._counting import counting
from ._ranks import run_ranks


def assert_matches_unsharded(
    build_parallel: Callable[[], nn.Module],
    build_unsharded: Callable[[], nn.Module],
    *inputs: Any,
    tensor: int | Iterable[int] = 2,
    split_inputs: int | None = None,
    split_outputs: int | None = None,
    density: float = 0.25,
    tolerance: float | None = None,
    timeout: float = 60.0,
) -> Counter[str]:
    """Assert that a tensor-parallel module computes what an ordinary one does, at some degrees.

    Both are given the same weights (each rank its part), inputs and incoming gradients, all small
    integers. Then all of these must be equal: every output, every input's gradient, and every
    parameter's gradient after `finalize_grads`.

    Args:
        build_parallel: Makes the parallel module; called on every rank. Its parameters have the
            ordinary module's names. They say by the attributes ``tensor_model_parallel``,
            ``partition_dim`` and ``partition_stride`` how they are split; an uneven dim is taken
            to be padded at its end.
        build_unsharded: Makes the ordinary module; called once.
        *inputs: Examples of what both are called with. The values of floating point tensors are
            replaced; everything else, such as token ids, is passed as it is.
        tensor: The degree of tensor parallelism, or several to go through.
        split_inputs: The dim along which each rank is given a part of the tensors in ``inputs``
            (0 for sequence parallel). None: all of them on every rank.
        split_outputs: The dim along which each rank returns a part of the output.
        density: The share of weights that are not zero. Lower it when values become too large.
        tolerance: Random numbers instead of integers, and the largest difference allowed, relative
            to the largest value of each tensor or to 1.
        timeout: See `run_ranks`; of each degree.

    Returns:
        How many collectives a rank started in forward and backward, by name, at the last degree.

    Raises:
        AssertionError: Something differs; says what, on which rank, where and by how much.
        ValueError: An output, or every gradient, is 0 everywhere: no mistake would show. Or
            ``tensor`` is empty.
    """
    degrees = [tensor] if isinstance(tensor, int) else list(tensor)
    if not degrees:
        raise ValueError(f"tensor={tensor!r} names no degree to compare at; expected e.g. (1, 2)")
    case = _compute_unsharded(build_unsharded(), inputs, density, tolerance)
    counts: Counter[str] = Counter()
    for degree in degrees:
        task = (build_parallel, case, split_inputs, split_outputs, tolerance)
        counts_of_ranks = run_ranks(_compare_on_rank, degree, *task, timeout=timeout)
        counts = counts_of_ranks[0]
        if counts_of_ranks != [counts] * degree:
            raise AssertionError(f"ranks start different collectives: {counts_of_ranks}")
    return counts


@dataclass(frozen=True, slots=True)
class _Case:
    """What the ordinary module is given, and what it computes."""

    parameters: dict[str, Tensor]
    inputs: list[Any]
    output_grads: list[Tensor]
    values: dict[str, Tensor]


def _compute_unsharded(
    module: nn.Module, inputs: tuple[Any, ...], density: float, tolerance: float | None
) -> _Case:
    are_integers = tolerance is None
    parameters = {}
    for name, parameter in module.named_parameters():
        parameter.data.copy_(_draw(name, parameter, density, are_integers))
        parameters[name] = parameter.detach()
    drawn_inputs = list(inputs)
    for n, value in enumerate(inputs):
        if _is_float(value):
            drawn_inputs[n] = _draw(f"input {n}", value, 0.5, are_integers)
    leaves, outputs = _forward(module, drawn_inputs)
    output_grads = []
    for n, output in enumerate(outputs):
        grad = _draw(f"output {n}", output, 0.5, are_integers)
        output_grads.append(grad)
    _backward(outputs, output_grads)
    values = _collect_values(module, leaves, outputs)
    _check_not_zero(values)
    return _Case(parameters, leaves, output_grads, values)


def _draw(name: str, like: Tensor, density: float, are_integers: bool) -> Tensor:
    """Return numbers that depend on a name alone: -1, 0 and 1, or normal ones."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    numbers = torch.empty(like.shape, dtype=torch.float64)
    if are_integers:
        numbers.random_(-1, 2, generator=generator)
        # A third of them is 0 already.
        numbers *= torch.rand(like.shape, generator=generator) < density * 1.5
    else:
        numbers.normal_(generator=generator)
    return numbers.to(like)


def _check_not_zero(values: dict[str, Tensor]) -> None:
    zero_outputs = []
    zero_gradients = []
    has_gradient = False
    for name, value in sorted(values.items()):
        is_zero = not value.nan_to_num(0, 0, 0).any()
        if name.startswith("gradient"):
            has_gradient = has_gradient or not is_zero
            zero_gradients.append(name)
        elif is_zero:
            zero_outputs.append(name)
    if has_gradient:
        zero_gradients = []
    if zero_outputs or zero_gradients:
        raise ValueError(
            f"{', '.join(zero_outputs or zero_gradients)} of the unsharded module: no finite value "
            "but 0, in which no mistake would show; raise density= or use larger examples"
        )


def _compare_on_rank(
    build: Callable[[], nn.Module],
    case: _Case,
    split_inputs: int | None,
    split_outputs: int | None,
    tolerance: float | None,
) -> Counter[str]:
    """Compute the same with the parallel module, and compare this rank's parts."""
    index = get_state().index("tensor")
    degree = get_state().size("tensor")
    module = build()
    shards = _load_parts(module, case, index, degree)
    inputs = list(case.inputs)
    for n, value in enumerate(inputs):
        if isinstance(value, Tensor) and value.dim() > 0:
            shard = _split(value, split_inputs)
            inputs[n] = shard.cut(value, index, degree)
            shards[f"gradient of input {n}"] = shard
    output_grads = []
    for n, grad in enumerate(case.output_grads):
        shard = _split(grad, split_outputs)
        output_grads.append(shard.cut(grad, index, degree))
        shards[f"output {n}"] = shard
    with counting() as counts:
        leaves, outputs = _forward(module, inputs)
        _backward(outputs, output_grads)
    finalize_grads(module)
    values = _collect_values(module, leaves, outputs)
    if values.keys() != case.values.keys():
        raise AssertionError(f"rank {index} has {sorted(values)}; expected {sorted(case.values)}")
    for name, value in values.items():
        _compare_part(name, value, case.values[name], shards[name], tolerance)
    return counts


def _load_parts(module: nn.Module, case: _Case, index: int, degree: int) -> dict[str, Shard]:
    """Fill the parameters with this rank's parts; return how their gradients are split."""
    shards = {}
    for name, parameter in module.named_parameters():
        if name not in case.parameters:
            raise AssertionError(
                f"the parallel module has a parameter {name}, the unsharded one only "
                f"{', '.join(case.parameters)}"
            )
        whole = case.parameters[name]
        shard = _find_shard(parameter, whole)
        part = shard.cut(whole, index, degree)
        if part.shape != parameter.shape:
            raise AssertionError(
                f"rank {index}: {name} has shape {tuple(parameter.shape)}, but the part of "
                f"{tuple(whole.shape)} for one rank of {degree} is {tuple(part.shape)} "
                f"(dim {shard.dim}, stride {shard.blocks or 1})"
            )
        parameter.data.copy_(part)
        shards[f"gradient of {name}"] = shard
    return shards


def _compare_part(
    name: str, part: Tensor, whole: Tensor, shard: Shard, tolerance: float | None
) -> None:
    index = get_state().index("tensor")
    degree = get_state().size("tensor")
    expected = shard.cut(whole, index, degree)
    if shard.dim is not None and name.startswith("output") and part.shape == expected.shape:
        # The padding of an output may be anything; that of a gradient is zero.
        length = sum(piece[-1] for piece in shard.pieces(index, degree))
        part = part.narrow(shard.dim, 0, length)
        expected = expected.narrow(shard.dim, 0, length)
    allowed = 0.0
    hint = ""
    if tolerance is None:
        hint = f"\nIf these are no integers that {whole.dtype} holds exactly, pass tolerance="
    else:
        allowed = tolerance * max(1.0, whole.abs().max().item())
    where = f"tensor degree {degree}, rank {index}: {name} differs. "
    torch.testing.assert_close(
        part, expected, rtol=0, atol=allowed, equal_nan=True, msg=lambda text: where + text + hint
    )


def _forward(module: nn.Module, inputs: list[Any]) -> tuple[list[Any], list[Tensor]]:
    """Return the inputs, which want gradients, and the outputs."""
    leaves = list(inputs)
    for n, value in enumerate(inputs):
        if _is_float(value):
            leaves[n] = value.detach().requires_grad_()
    outputs = []
    for output in tree_leaves(module(*leaves)):
        # A bias that is handed on (skip_bias_add) is compared as the parameter that it is.
        is_bias = isinstance(output, nn.Parameter)
        if isinstance(output, Tensor) and not is_bias:
            outputs.append(output)
    return leaves, outputs


def _backward(outputs: list[Tensor], output_grads: list[Tensor]) -> None:
    roots = []
    root_grads = []
    for output, grad in zip(outputs, output_grads, strict=True):
        if output.requires_grad:
            roots.append(output)
            root_grads.append(grad)
    if roots:
        torch.autograd.backward(roots, root_grads)


def _collect_values(
    module: nn.Module, inputs: list[Any], outputs: list[Tensor]
) -> dict[str, Tensor]:
    """Return outputs and gradients by name."""
    values = {f"output {n}": output.detach() for n, output in enumerate(outputs)}
    for n, value in enumerate(inputs):
        if _is_float(value) and value.grad is not None:
            values[f"gradient of input {n}"] = value.grad
    for name, parameter in module.named_parameters():
        grad = gradient(parameter)
        if grad is not None:
            values[f"gradient of {name}"] = grad
    return values


def _find_shard(parameter: nn.Parameter, whole: Tensor) -> Shard:
    if not getattr(parameter, "tensor_model_parallel", False):
        return _split(whole, None)
    dim = getattr(parameter, "partition_dim", 0)
    stride = getattr(parameter, "partition_stride", 1)
    blocks = getattr(parameter, "partition_blocks", ())
    if not blocks and stride > 1:
        blocks = (whole.shape[dim] // stride,) * stride
    return _split(whole, dim, blocks)


def _split(whole: Tensor, dim: int | None, blocks: tuple[int, ...] = ()) -> Shard:
    """Return how a tensor is split; padded at its end with zeros where the dim is uneven."""
    return Shard(tuple(whole.shape), dim, blocks, padded=dim is not None and not blocks)


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
