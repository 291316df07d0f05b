"""The machine's options that the user selected by name (``[options.NAME]`` of its file)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ezpz_launch._errors import UsageError
from ezpz_topo import Machine

from .identify import Launcher

BACKEND = "TORCH_BACKEND"
"""Where ezpz_device reads which backend to use."""


class Chosen(NamedTuple):
    """What the selected options bring, together.

    Attributes:
        names: Their names, in the order asked for, each once.
        flags: For the machine's launcher.
        environment: For the ranks.
        sources: For each variable, the option that brings it.
        cpu_bind: A bind list's name, or ``"none"`` where the flags bind; ``""`` for any.
        cpu_bind_option: The option that brings it.
        notes: What people should know.
    """

    names: tuple[str, ...]
    flags: tuple[str, ...]
    environment: Mapping[str, str]
    sources: Mapping[str, str]
    cpu_bind: str
    cpu_bind_option: str
    notes: tuple[str, ...]


def choose_options(machine: Machine, names: Sequence[str], launcher: Launcher) -> Chosen:
    """Return what these options of the machine bring, together.

    Raises:
        UsageError: The machine has no such option, two of them contradict each other, or its
            flags are for another launcher.
    """
    flags: list[str] = []
    environment: dict[str, str] = {}
    sources: dict[str, str] = {}
    bind, binder = "", ""
    notes: list[str] = []
    for name in dict.fromkeys(names):
        if name not in machine.options:
            known = ", ".join(machine.options) or "none"
            raise UsageError(
                f"--option {name}: {machine.name} has no such option; expected one of its own: "
                f"{known}"
            )
        option = machine.options[name]
        if option.flags and launcher.kind != machine.launcher:
            raise UsageError(
                f"--option {name}: its flags ({' '.join(option.flags)}) are for "
                f"{machine.launcher}, and the launcher is {launcher.kind}; expected "
                f"--launcher {machine.launcher}, or no --option {name}"
            )
        if option.cpu_bind and bind and option.cpu_bind != bind:
            raise UsageError(
                f"--option {name} binds by {option.cpu_bind}, --option {binder} by {bind}; "
                "expected one of them"
            )
        if option.cpu_bind:
            bind, binder = option.cpu_bind, name
        flags += option.flags
        added = {**option.environment, **({BACKEND: option.backend} if option.backend else {})}
        for variable, value in added.items():
            if environment.get(variable, value) != value:
                other = sources[variable].removeprefix("--option ")
                raise UsageError(
                    f"--option {name} sets {variable}={value}, --option {other} "
                    f"{environment[variable]}; expected one of them"
                )
            environment[variable], sources[variable] = value, f"--option {name}"
        if option.modules:
            notes.append(
                f"--option {name}: load its modules before the launch, in place of the machine's: "
                f"module load {' '.join(option.modules)}"
            )
    return Chosen(
        tuple(dict.fromkeys(names)), tuple(flags), environment, sources, bind, binder, tuple(notes)
    )
