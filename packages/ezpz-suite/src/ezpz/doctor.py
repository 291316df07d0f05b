"""``ezpz doctor``: what works here, what does not, and what to do about it.

Packages contribute the checks, by entry points of the group ``ezpz.checks``; each runs in a process
of its own, so that one that crashes or hangs is a result too, and the others go on.
"""

from ezpz_topo import CheckResult

from ._doctor import GROUP, TIMEOUT, Check, DoctorError, find_checks, main, run_checks

__all__ = [
    "GROUP", "TIMEOUT", "Check", "CheckResult", "DoctorError", "find_checks", "main", "run_checks",
]  # fmt: skip
