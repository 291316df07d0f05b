"""What goes wrong with groups and degrees: one small tree."""

from __future__ import annotations


class ParallelError(RuntimeError):
    """Something about parallel groups, layers or their use is wrong."""


class NotInitializedError(ParallelError, AssertionError):
    """A group was asked for before it was made. Megatron-LM's code expects an AssertionError."""


class DegreeError(ParallelError, ValueError):
    """A degree or a size does not fit: it does not divide, or it disagrees with another."""


class ReplicaError(ParallelError):
    """Values that should be equal on all ranks of an axis are not, or the other way round."""
