"""The blocks that ``hatch run bench:tp`` measures, and what they can be made of.

A block is written once, over layers that a variant gives: as they are unsharded, as this rank's
shard without communication, in ezpz_tp, in plain Megatron style, over functional collectives,
or by DTensor.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import ezpz_tp

Layer = Callable[[int, int], nn.Module]
HEADS = 8


class Mlp(nn.Module):
    """H -> 4H -> H with ReLU between."""

    plan: ClassVar = {"up": ColwiseParallel, "down": RowwiseParallel}

    def __init__(self, hidden: int, column: Layer, row: Layer) -> None:
        super().__init__()
        self.up, self.down = column(hidden, 4 * hidden), row(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return ``[..., hidden]``."""
        return self.down(torch.relu(self.up(x)))


class LlamaBlock(nn.Module):
    """Attention with rotary positions and a gated MLP, each after an RMSNorm."""

    plan: ClassVar = {
        **dict.fromkeys(("query", "key", "value", "gate", "up"), ColwiseParallel),
        **dict.fromkeys(("output", "down"), RowwiseParallel),
    }

    def __init__(self, hidden: int, column: Layer, row: Layer) -> None:
        super().__init__()
        self.width = hidden // HEADS
        inner = math.ceil(hidden * 8 / 3 / 64) * 64
        self.before, self.between = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.query, self.key, self.value = (column(hidden, hidden) for _ in range(3))
        self.output = row(hidden, hidden)
        self.gate, self.up = column(hidden, inner), column(hidden, inner)
        self.down = row(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return ``[batch, sequence, hidden]``."""
        batch, sequence, _ = x.shape
        h = self.before(x)
        query, key, value = (
            layer(h).view(batch, sequence, -1, self.width).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        query, key = self.rotate(query), self.rotate(key)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, sequence, -1))
        h = self.between(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))

    def rotate(self, x: Tensor) -> Tensor:
        """Turn each pair of a head's channels by its position's angle."""
        positions = torch.arange(x.shape[2], device=x.device, dtype=x.dtype)
        scale = torch.arange(self.width // 2, device=x.device, dtype=x.dtype) / (self.width // 2)
        angle = torch.outer(positions, 10_000.0**-scale)
        cos, sin = angle.cos(), angle.sin()
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


BLOCKS = {"mlp": (Mlp, (8,)), "llama": (LlamaBlock, (1, 64))}
"""Each block, and the shape of its input before the hidden dim."""


class Copy(torch.autograd.Function):
    """Plain Megatron style: identity, and an all-reduce of the gradient in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return ``x`` itself."""
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the sum of the gradient over the ranks."""
        # Without a copy: the linear layer behind has just made it, for nobody else.
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Reduce(torch.autograd.Function):
    """Plain Megatron style: an all-reduce in place of what the linear layer just made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Sum ``x`` over the ranks."""
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient itself."""
        return grad, None


class FunctionalCopy(Copy):
    """As `Copy`, by a functional collective."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the sum of the gradient over the ranks."""
        return functional.wait_tensor(functional.all_reduce(grad, "sum", ctx.group)), None


class FunctionalReduce(Reduce):
    """As `Reduce`, by a functional collective."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the sum of ``x`` over the ranks."""
        return functional.wait_tensor(functional.all_reduce(x, "sum", group))


class Column(nn.Linear):
    """A column-parallel layer of one function and one product."""

    def __init__(self, size: int, group: dist.ProcessGroup, copy: type, sizes: Any) -> None:
        super().__init__(sizes[0], sizes[1] // size, bias=sizes[2], device="meta")
        self.group, self.copy = group, copy

    def forward(self, x: Tensor) -> Tensor:
        """Take ``[..., in]`` and return ``[..., out/tp]``."""
        return nn.functional.linear(self.copy.apply(x, self.group), self.weight, self.bias)


class Row(nn.Linear):
    """A row-parallel layer: the bias comes after the reduction."""

    def __init__(self, size: int, group: dist.ProcessGroup, reduce: type, sizes: Any) -> None:
        super().__init__(sizes[0] // size, sizes[1], bias=sizes[2], device="meta")
        self.group, self.reduce = group, reduce

    def forward(self, x: Tensor) -> Tensor:
        """Take ``[..., in/tp]`` and return ``[..., out]``."""
        y = self.reduce.apply(nn.functional.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


def build(variant: str, block: str, hidden: int, device: str, bias: bool) -> nn.Module:
    """Make a block; the process group of the whole world is its tensor-parallel group."""
    size, world = dist.get_world_size(), dist.group.WORLD
    # Each layer: from the sizes that the unsharded one has.
    layers: dict[str, tuple[Layer, Layer]] = {
        "unsharded": (
            lambda i, o: nn.Linear(i, o, bias, "meta"),
            lambda i, o: nn.Linear(i, o, bias, "meta"),
        ),
        "shard": (
            lambda i, o: nn.Linear(i, o // size, bias, "meta"),
            lambda i, o: nn.Linear(i // size, o, bias, "meta"),
        ),
        "ezpz": (
            lambda i, o: ezpz_tp.ColumnParallelLinear(
                i, o, bias, gather_output=False, tp_group=world, device="meta"
            ),
            lambda i, o: ezpz_tp.RowParallelLinear(
                i, o, bias, input_is_parallel=True, tp_group=world, device="meta"
            ),
        ),
        "plain": (
            lambda i, o: Column(size, world, Copy, (i, o, bias)),
            lambda i, o: Row(size, world, Reduce, (i, o, bias)),
        ),
        "functional": (
            lambda i, o: Column(size, world, FunctionalCopy, (i, o, bias)),
            lambda i, o: Row(size, world, FunctionalReduce, (i, o, bias)),
        ),
    }
    layers["dtensor"] = layers["unsharded"]
    kind, _ = BLOCKS[block]
    module = kind(hidden, *layers[variant]).to_empty(device=device)
    with torch.no_grad():
        for parameter in module.parameters():
            # Any numbers will do, and these are quick to write.
            parameter.fill_(1 / hidden)
    if variant == "dtensor":
        mesh = init_device_mesh(device, (size,))
        parallelize_module(module, mesh, {name: style() for name, style in kind.plan.items()})
    return module


VARIANTS = ("unsharded", "shard", "ezpz", "plain", "functional", "dtensor")
