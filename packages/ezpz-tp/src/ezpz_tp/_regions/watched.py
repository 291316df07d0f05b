"""Letting `check` see a region as one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function


def watched(
    region: Callable[..., Tensor], input_: Tensor, *arguments: Any, **options: Any
) -> Tensor:
    """Hand a call to torch's function modes, of which `check` is one, as torch's own functions do.

    Called where ``has_torch_function_unary(input_)``, which takes 16 ns, says that one is at work.
    """
    output: Tensor = handle_torch_function(region, (input_,), input_, *arguments, **options)
    return output
