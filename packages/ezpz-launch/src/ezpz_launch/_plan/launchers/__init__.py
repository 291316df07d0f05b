"""The kinds of launchers: each is a file of this folder, and is known by no other place."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ezpz_launch._plan.kind import Kind
from ezpz_launch._plan.options import KINDS

if TYPE_CHECKING:
    from ezpz_launch._plan.plan import LaunchPlan

__all__ = ["LAUNCHERS", "Kind", "build_argv", "build_hostfile", "needs_hostfile"]


def _import_kinds() -> dict[str, Kind]:
    kinds: dict[str, Kind] = {}
    for name in KINDS:
        module = import_module(f".{name}", __name__)
        kinds[name] = module.KIND
    return kinds


LAUNCHERS = _import_kinds()


def build_argv(plan: LaunchPlan) -> list[str]:
    """Build the command line that starts a plan's ranks."""
    return LAUNCHERS[plan.launcher.kind].build_argv(plan)


def build_hostfile(plan: LaunchPlan) -> list[str]:
    """Build the lines of the file that a plan's launcher reads."""
    return LAUNCHERS[plan.launcher.kind].build_hostfile(plan.placement)


def needs_hostfile(plan: LaunchPlan) -> bool:
    """True if the plan's launcher reads a hostfile, or wants a folder in its place (torchrun)."""
    words = build_argv(plan)
    before_command = words[: len(words) - len(plan.command)]
    for word in before_command:
        _, _, value = word.partition("=")
        if plan.hostfile in (word, value):
            return True
    return False
