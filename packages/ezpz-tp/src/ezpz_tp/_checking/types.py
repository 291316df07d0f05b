"""The type of a tensor along one axis: what its value is on the ranks, and what its gradient is.

=============  ===================================  ==============================================
type           value on the ranks of the axis       gradient on the ranks of the axis
=============  ===================================  ==============================================
``invariant``  equal                                equal
``replicated`` equal                                partial: the true one is the sum
``varying``    each its own                         each its own
``partial``    the true one is the sum              equal
=============  ===================================  ==============================================

A tensor that no gradient flows to is neither invariant nor replicated: it goes with both.

The four are those of local SPMD, as in Edward Yang's "Global vs Local SPMD" and JAX's typed
``shard_map``: replicated and varying of one operation give varying, and autograd sums what is
partial at the region that made replicated out of invariant.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

INVARIANT, REPLICATED, VARYING, PARTIAL = "invariant", "replicated", "varying", "partial"
TYPES = (INVARIANT, REPLICATED, VARYING, PARTIAL)
EQUAL = frozenset({INVARIANT, REPLICATED})
"""The types of which every rank has the same value."""


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of one tensor.

    Attributes:
        types: Its type along each axis, in the checker's order of axes.
        sharded_dim: The dim that is split over the tensor-parallel ranks, where it is known.
        is_data: Made of nothing but what came from outside: no parameter and no region. The
            user may have cut it, and knows better what it is.
        is_fresh: Zeros, or memory that nobody has written to: it goes with every type.
    """

    types: tuple[str, ...]
    sharded_dim: int | None = None
    is_data: bool = False
    is_fresh: bool = False


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that an operation is given.

    Attributes:
        tensor: The tensor.
        record: What is known of it.
        differentiable: Whether a gradient flows to it.
    """

    tensor: Tensor
    record: Record
    differentiable: bool

    def settled(self, axis: int) -> str | None:
        """Return its type along an axis, or None where it goes with invariant and replicated."""
        kind = self.record.types[axis]
        return None if kind in EQUAL and not self.differentiable else kind
