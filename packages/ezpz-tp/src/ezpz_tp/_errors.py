"""What goes wrong with groups and degrees: one small tree."""

from __future__ import annotations


class ParallelError(RuntimeError):
    """Something about parallel groups, layers or their use is wrong."""


class NotInitializedError(ParallelError):
    """A group was asked for before it was made."""


class DegreeError(ParallelError, ValueError):
    """A degree or a size does not fit: it does not divide, or it disagrees with another."""
