"""How ranks are bound to cores, and which of the machine's flags its launcher gets."""

from __future__ import annotations

from typing import NamedTuple

from ezpz_launch._errors import UsageError
from ezpz_launch._plan.kind import Env, FittedFlags, Launcher
from ezpz_launch._plan.launchers import LAUNCHERS
from ezpz_launch._plan.machine_options import SelectedOptions
from ezpz_launch._plan.options import Request, parse_core_ranges
from ezpz_launch._plan.placement import Arrangement
from ezpz_topo import Machine


class Binding(NamedTuple):
    """The cores of the ranks of a host."""

    flags: FittedFlags  # the launcher's, fitted to the ranks
    core_lists: tuple[str, ...]  # for each rank its cores, such as ``0-7``; empty for no list
    cores_per_rank: int  # the fewest that a rank has; 0 if it is not bound
    source: str


def bind_ranks(
    machine: Machine,
    request: Request,
    arrangement: Arrangement,
    launcher: Launcher,
    selected: SelectedOptions,
    *,
    env: Env,
) -> Binding:
    kind = LAUNCHERS[launcher.kind]
    machine_flags: tuple[str, ...] = ()
    if launcher.kind == machine.launcher:
        machine_flags = machine.launcher_flags + selected.flags
    if request.cpu_bind:
        # All binding flags are removed: a depth without its binding means something else.
        machine_flags = _remove_binding(machine_flags, kind.binding_prefixes)
    unbound = request.cpu_bind == "none"
    flags = kind.fit_flags(machine_flags, machine, arrangement, env, unbound=unbound)
    ppn = arrangement.placement.ppn
    core_lists, source = _choose_core_lists(machine, request, ppn, launcher, selected)
    binding_flags = [flag for flag in flags.words if flag.startswith("--cpu-bind")]
    if binding_flags:
        source = f"launcher_flags of {machine.name}.toml"
        if selected.flags and binding_flags[-1] in selected.flags:
            source = f"--option {selected.cpu_bind_option or ' '.join(selected.names)}"
    cores_per_rank = flags.cores
    if core_lists:
        cores_per_rank = min(_count_cores(ranges) for ranges in core_lists)
    return Binding(flags, core_lists, cores_per_rank, source)


def _remove_binding(flags: tuple[str, ...], prefixes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(flag for flag in flags if not flag.startswith(prefixes))


def _count_cores(ranges: str) -> int:
    return len(set(parse_core_ranges(ranges)))


def _choose_core_lists(
    machine: Machine, request: Request, ppn: int, launcher: Launcher, selected: SelectedOptions
) -> tuple[tuple[str, ...], str]:
    """Return the cores of each rank of a host, and the reason."""
    if request.cpu_bind:
        name = request.cpu_bind
        source = "--cpu-bind"
    elif selected.cpu_bind:
        name = selected.cpu_bind
        source = f"--option {selected.cpu_bind_option}"
    else:
        name = machine.default_cpu_bind
        source = f"default_cpu_bind of {machine.name}.toml"
    if not name:
        return (), "not requested"
    if name == "none":
        return (), source
    core_lists = _read_core_lists(machine, name)
    if not LAUNCHERS[launcher.kind].accepts_core_list:
        if request.cpu_bind:
            raise UsageError(
                f"--cpu-bind {name}: {launcher.kind} takes no list of cores; expected none, or its "
                "own words in --launcher-args"
            )
        return (), f"{launcher.kind} takes no list of cores"
    if ppn > len(core_lists):
        if request.cpu_bind:
            raise UsageError(
                f"--cpu-bind {name}: {len(core_lists)} ranges for {ppn} ranks a host; "
                "expected one a rank"
            )
        return (), f"{ppn} ranks a host are more than the {len(core_lists)} ranges of {name}"
    return core_lists[:ppn], f"{name}: {source}"


def _read_core_lists(machine: Machine, name: str) -> tuple[str, ...]:
    """Return the machine's list of this name, or the cores if the name is a list of cores."""
    if name not in machine.cpu_bind and not name[:1].isdigit():
        known = ", ".join(machine.cpu_bind) or "none"
        raise UsageError(
            f"--cpu-bind {name}: expected none, one of {machine.name}'s lists ({known}), or cores "
            "such as 0-7:8-15"
        )
    core_lists = machine.cpu_bind.get(name) or tuple(name.split(":"))
    for ranges in core_lists:
        parse_core_ranges(ranges)
    return core_lists
