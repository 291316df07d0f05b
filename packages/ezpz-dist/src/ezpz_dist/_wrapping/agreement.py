"""Before anything is wrapped: can it be, and do all ranks wrap the same?"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import torch
from torch import nn

from ezpz_device import as_dtype
from ezpz_dist._collectives.broadcast import broadcast
from ezpz_dist._collectives.call import Call
from ezpz_dist._collectives.exchange import exchange, payload_of
from ezpz_dist._errors import CollectiveError, WrapError

from .replicas import Replicas

Lines = dict[str, str]
"""What all ranks must have in common, by name."""


@contextmanager
def agreed(
    call: str,
    wrapped: nn.Module | Mapping[str, torch.Tensor],
    options: Mapping[str, object],
    replicas: Replicas,
) -> Iterator[Lines]:
    """Refuse on all ranks what one of them refuses inside, or wraps differently.

    torch compares nothing that is quick to compare: it waits until it times out, ends the
    process, or goes on with tensors of other shapes. Here each rank sends a checksum; who
    differs is looked for only if one does. Collective over the replicas.

    Args:
        call: ``"wrap_model_for_ddp()"``.
        wrapped: What this rank wraps: a model, or tensors by name.
        options: What else it was called with; of objects without a lasting text, the type.
        replicas: The ranks.

    Yields:
        Where to add what else must be the same.

    Raises:
        MismatchError: The ranks called different functions, or with other options.
        WrapError: Another rank refuses, or the models differ.
    """
    lines: Lines = {}
    try:
        yield lines
        tensors = _tensors_of(wrapped) if isinstance(wrapped, nn.Module) else wrapped
        lines |= {name: _of_tensor(tensor) for name, tensor in tensors.items()}
    except Exception as error:  # whatever it is, the others wait to hear of it; raised again
        if replicas.size > 1:
            with suppress(CollectiveError):
                exchange(Call(call), replicas, refusal=error)
        raise
    if replicas.size == 1:
        return
    digest = hashlib.sha256(repr(list(lines.items())).encode()).digest()
    try:
        every = exchange(Call(_of_call(call, options)), replicas, digest)
    except CollectiveError as error:
        if type(error) is CollectiveError:  # a rank refuses; it has raised its own
            raise WrapError(str(error)) from None
        raise
    found = [bytes(payload_of(place, every)[: len(digest)]) for place in range(replicas.size)]
    if len(set(found)) > 1:
        raise WrapError(f"{call}: {_difference(lines, found, replicas)}")


def refuse_unmovable(call: str, replicas: Replicas) -> None:
    """Raise if this rank's device has no collectives.

    Raises:
        WrapError: It is Apple's, from which no backend of torch sends.
    """
    if replicas.world.device.type == "mps":
        raise WrapError(
            f"{call} over {replicas.size} rank(s) on mps, from which gloo cannot send; expected "
            "one process, and wrap_model, which leaves the model as it is there; to run several "
            "ranks compute on the CPU: TORCH_DEVICE=cpu"
        )


def refuse_experts(call: str, model: nn.Module) -> None:
    """Raise if a parameter's copies are on other ranks than those of the rest of the model.

    Raises:
        WrapError: ezpz_tp (or Megatron) says so of one: ``allreduce`` is False.
    """
    for name, parameter in model.named_parameters():
        if not getattr(parameter, "allreduce", True):
            raise WrapError(
                f"{call}: {name} is an expert's: its copies are on the ranks of the expert_data "
                "group, not on these; wrap the model without its experts, and average their "
                'gradients over ezpz_tp.get_state().group("expert_data")'
            )


def refuse_options(call: str, options: Mapping[str, object], reserved: Mapping[str, str]) -> None:
    """Raise if an option of torch's is given that is not the caller's to choose.

    Args:
        call: What is called.
        options: What is given.
        reserved: By name, what to do instead.

    Raises:
        WrapError: One is.
    """
    for name in options:
        if name in reserved:
            raise WrapError(f"{call} takes no {name}; {reserved[name]}")


def as_floating(dtype: str | torch.dtype, what: str = "dtype") -> torch.dtype:
    """Return a type to compute or reduce in.

    Raises:
        ValueError: It is not known, or no floating-point type.
    """
    wanted = as_dtype(dtype)
    if not wanted.is_floating_point:
        raise ValueError(f"{what} {wanted}; expected a floating-point type")
    return wanted


def _of_call(call: str, options: Mapping[str, object]) -> str:
    lasting = (str, int, float, bool, torch.dtype)
    said = (
        f"{name}={value!r}" if isinstance(value, lasting) else f"{name}=<{type(value).__name__}>"
        for name, value in sorted(options.items())
        if value is not None  # a message has room for what was given
    )
    return f"{call.removesuffix('()')}({', '.join(said)})"


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = {
        f"parameter {name}": one for name, one in model.named_parameters(remove_duplicate=False)
    }
    return named | {f"buffer {name}": one for name, one in model.named_buffers()}


def _of_tensor(tensor: torch.Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    frozen = ", frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    # Gradients that lie otherwise in memory would be added element by wrong element.
    strides = "" if tensor.is_contiguous() else f", strides {list(tensor.stride())}"
    return f"{kind} {list(tensor.shape)}{strides}{frozen}{' on meta' if tensor.is_meta else ''}"


def _difference(lines: Lines, found: list[bytes], replicas: Replicas) -> str:
    """Say who differs, and in what. Collective: one rank of each party says what it has."""
    # With a tie, the first rank is taken for right: the others would start from its values.
    most = max(Counter(found).items(), key=lambda item: (item[1], item[0] == found[0]))[0]
    right = found.index(most)
    wrong = [place for place, digest in enumerate(found) if digest != most]
    theirs, odd = (
        broadcast(lines if place == replicas.place else None, replicas.ranks[place], replicas.group)
        for place in (right, wrong[0])
    )
    assert theirs is not None
    assert odd is not None
    differ = [name for name in {**theirs, **odd} if theirs.get(name) != odd.get(name)]
    if not differ:
        what = "the parameters are in another order"
    else:
        there, here = (lines.get(differ[0], "missing") for lines in (odd, theirs))
        what = f"{differ[0]} is {there} there, and {here} on {replicas.name([right])}"
        if len(differ) > 1:
            what += f" (and {len(differ) - 1} more differ)"
    return (
        f"not the same on all ranks: {replicas.name(wrong)}: {what}; expected the same model on "
        "every rank; build it from the same arguments everywhere"
    )
