"""What `check` raises."""

from __future__ import annotations

from ezpz_tp import ParallelError


class ParallelTypeError(ParallelError):
    """Within `check`: an operation whose result or gradient would be wrong on some rank.

    Not a `TypeError`, which Python's operators take for "not supported, try the other operand".
    """
