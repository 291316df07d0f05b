"""The error tree of ezpz_dist."""

from __future__ import annotations


class DistError(Exception):
    """Base of every error that ezpz_dist raises on purpose."""


class SetupError(DistError):
    """The ranks could not be brought together, or set-up was called in contradiction."""


class NotSetUpError(DistError):
    """A collective was called in a world of several ranks before `setup_torch`."""


class WrapError(DistError):
    """A model cannot be wrapped as asked."""
