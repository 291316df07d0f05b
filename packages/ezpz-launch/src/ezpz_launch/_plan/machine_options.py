"""The machine's options that the user selects by name (``[options.NAME]`` of its file)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ezpz_launch._errors import UsageError
from ezpz_launch._plan.kind import Launcher
from ezpz_topo import Machine

BACKEND = "TORCH_BACKEND"  # where ezpz_device reads which backend to use


class SelectedOptions(NamedTuple):
    """The flags, variables and binding of the selected options, together."""

    names: tuple[str, ...] = ()  # in the order requested, each once
    flags: tuple[str, ...] = ()  # for the machine's launcher
    environment: Mapping[str, tuple[str, str]] = {}  # for the ranks: value and source
    cpu_bind: str = ""  # a bind list's name, or `"none"` if the flags bind; empty for any
    cpu_bind_option: str = ""  # the option that brings it
    notes: tuple[str, ...] = ()  # for people


def select_options(machine: Machine, names: Sequence[str], launcher: Launcher) -> SelectedOptions:
    """Merge the options of these names.

    Raises:
        UsageError: The machine has no such option, two of them contradict each other, or one has
            flags for another launcher.
    """
    unique_names = tuple(dict.fromkeys(names))
    flags: list[str] = []
    environment: dict[str, tuple[str, str]] = {}
    cpu_bind = ""
    cpu_bind_option = ""
    notes: list[str] = []
    for name in unique_names:
        _check_option(machine, name, launcher)
        option = machine.options[name]
        if option.cpu_bind and cpu_bind and option.cpu_bind != cpu_bind:
            raise UsageError(
                f"--option {name} binds by {option.cpu_bind}, --option {cpu_bind_option} by "
                f"{cpu_bind}; expected one of them"
            )
        if option.cpu_bind:
            cpu_bind = option.cpu_bind
            cpu_bind_option = name
        flags += option.flags
        variables = dict(option.environment)
        if option.backend:
            variables[BACKEND] = option.backend
        _merge_variables(environment, variables, f"--option {name}")
        if option.modules:
            notes.append(
                f"--option {name}: load its modules before the launch, in place of the machine's: "
                f"module load {' '.join(option.modules)}"
            )
    return SelectedOptions(
        unique_names, tuple(flags), environment, cpu_bind, cpu_bind_option, tuple(notes)
    )


def _check_option(machine: Machine, name: str, launcher: Launcher) -> None:
    if name not in machine.options:
        known = ", ".join(machine.options) or "none"
        raise UsageError(
            f"--option {name}: {machine.name} has no such option; expected one of its own: {known}"
        )
    flags = machine.options[name].flags
    if flags and launcher.kind != machine.launcher:
        raise UsageError(
            f"--option {name}: its flags ({' '.join(flags)}) are for "
            f"{machine.launcher}, and the launcher is {launcher.kind}; expected "
            f"--launcher {machine.launcher}, or no --option {name}"
        )


def _merge_variables(
    environment: dict[str, tuple[str, str]], variables: Mapping[str, str], source: str
) -> None:
    for name, value in variables.items():
        if name in environment:
            other_value, other_source = environment[name]
            if other_value != value:
                raise UsageError(
                    f"{source} sets {name}={value}, {other_source} {other_value}; "
                    "expected one of them"
                )
        environment[name] = (value, source)
