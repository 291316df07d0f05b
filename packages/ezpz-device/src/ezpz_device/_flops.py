"""Floating-point operations of a model, counted on shapes alone."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode


def count_flops(model: Any, *inputs: Any, backward: bool = True, **keywords: Any) -> int:
    """Return the floating-point operations of one pass of a torch model, on this rank.

    Nothing is computed and no memory taken: tensors are replaced by their shapes. So the model, a
    part of it or the inputs may be on the meta device, and the inputs on another device than the
    model. Matrix products, convolutions and attention count (a causal mask is no discount); what is
    done element by element does not. The layers of ezpz_tp count this rank's share. With as many
    samples on each rank, the whole job's step is the world's size as much.

    >>> count_flops(torch.nn.Linear(64, 32), torch.empty(8, 64), backward=False)  # 2 * 8 * 64 * 32
    32768

    Args:
        model: Bare, before it is wrapped. It is called with ``inputs`` and ``keywords``, and does
            not change.
        backward: Count the gradients of what is trained too. What activation checkpointing repeats
            there counts, although the model does not need it: count before you apply it.

    Raises:
        ValueError: The model is wrapped by FSDP: its parameters are parts.
    """
    if torch.distributed.is_initialized():
        # What collectives return, in shapes.
        from torch.distributed._tools import fake_collectives  # noqa: F401, PLC0415
    state = dict([*model.named_parameters(), *model.named_buffers()])
    for name, tensor in state.items():
        if hasattr(tensor, "device_mesh"):
            raise ValueError(
                f"count_flops: {name} is sharded; expected the model before it is wrapped"
            )
    device = _find_device(list(state.values()), tree_leaves((inputs, keywords)))
    with (
        device or nullcontext(),  # for tensors that the model makes in between
        # With a ShapeEnv, operations whose shape depends on values have one too.
        FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()) as mode,
        FlopCounterMode(display=False) as counter,
        sdpa_kernel(SDPBackend.MATH),  # counted on every device; a CPU's kernel is not
    ):
        state, inputs, keywords = tree_map_only(
            torch.Tensor,
            lambda tensor: _make_fake(tensor, device, mode),
            (state, inputs, keywords),
        )
        leaves = tree_leaves(torch.func.functional_call(model, state, inputs, keywords))
        outputs = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
        if backward and outputs:
            torch.autograd.backward(outputs, list(map(torch.ones_like, outputs)))
    return int(counter.get_total_flops())


def _find_device(state: list[torch.Tensor], inputs: list[Any]) -> torch.device | None:
    """Return the device of all shapes; None where a model is spread over devices."""
    devices = {tensor.device for tensor in state}
    if not state:
        devices = {leaf.device for leaf in inputs if isinstance(leaf, torch.Tensor)}
    if len(devices) > 1:
        devices.discard(torch.device("meta"))
    if len(devices) != 1:
        return None
    return devices.pop()


def _make_fake(
    tensor: torch.Tensor, device: torch.device | None, mode: FakeTensorMode
) -> torch.Tensor:
    fake = mode.from_tensor(tensor, static_shapes=True)
    if device is None or tensor.device == device:
        return fake
    moved = torch.empty_like(fake, device=device)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(moved, requires_grad=tensor.requires_grad)
    return moved.requires_grad_(tensor.requires_grad)
