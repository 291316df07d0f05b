"""How ranks are bound to cores, and which of the machine's flags its launcher is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ezpz_launch._errors import UsageError
from ezpz_launch._request import Request
from ezpz_topo import Machine

from .arrange import Arrangement
from .cores import count_cores, read_cores
from .identify import Launcher
from .machine_options import Chosen


class Binding(NamedTuple):
    """Flags and cores.

    Attributes:
        flags: The machine's flags, and those of its options, for this launcher.
        cores: Cores of each rank of a host; empty for no list.
        depth: Cores for each rank where the machine binds in order; 0 where it does not.
        cores_each: Cores that each rank is bound to, the fewest of any; 0 where it is not.
        unbound: Whether the user wants no binding, and the launcher is to be told so.
        source: Why the ranks are bound so.
        flags_source: Why a flag is not the file's own; empty where all are.
    """

    flags: tuple[str, ...]
    cores: tuple[str, ...]
    depth: int
    cores_each: int
    unbound: bool
    source: str
    flags_source: str


def bind(
    machine: Machine,
    request: Request,
    arrangement: Arrangement,
    launcher: Launcher,
    chosen: Chosen,
) -> Binding:
    """Decide the launcher's flags and the cores of each rank.

    Raises:
        UsageError: What was asked for is no binding, or this launcher cannot do it.
    """
    ppn = arrangement.placement.ppn
    flags: tuple[str, ...] = ()
    if launcher.kind == machine.launcher:
        flags = machine.launcher_flags + chosen.flags
    if request.cpu_bind:
        # All of it goes: a depth without its binding would mean something else.
        flags = tuple(flag for flag in flags if not flag.startswith(("--cpu-bind", "--depth")))
    flags, flags_source = _cpus_per_task(flags, machine, ppn)
    cores, source = _cores_of_ranks(machine, request, ppn, launcher, chosen)
    bound = [flag for flag in flags if flag.startswith("--cpu-bind")]
    depth = 0
    if bound:
        source = f"launcher_flags of {machine.name}.toml"
        if chosen.flags and bound[-1] in chosen.flags:
            source = f"--option {chosen.cpu_bind_option or ' '.join(chosen.names)}"
    if "--cpu-bind=depth" in flags and not any(flag.startswith("--depth") for flag in flags):
        depth = max(1, arrangement.cores // ppn)
    unbound = request.cpu_bind == "none"
    each = 0 if unbound else depth or _cores_of_flags(flags)
    if cores:
        each = min(map(count_cores, cores))
    return Binding(flags, cores, depth, each, unbound, source, flags_source)


def with_cpus_of_the_job(
    binding: Binding, arrangement: Arrangement, env: Mapping[str, str]
) -> Binding:
    """Return the binding with the cores a task that the job was submitted with.

    From Slurm 22.05 on srun does not take them from the job by itself: without a word each rank
    gets one core.
    """
    text = env.get("SLURM_CPUS_PER_TASK", "")
    if not text.isdecimal() or _place_of_cpus(binding.flags) >= 0:
        return binding
    asked, room = int(text), arrangement.cores // arrangement.placement.ppn
    cpus = min(asked, room) if room else asked
    if cpus < 1:
        return binding
    source = "SLURM_CPUS_PER_TASK, which srun itself ignores from 22.05 on"
    return binding._replace(
        flags=(*binding.flags, f"--cpus-per-task={cpus}"),
        cores_each=binding.cores_each or cpus,
        flags_source=source if cpus == asked else f"{source}, less: {room} a rank are there",
    )


def _cores_of_ranks(
    machine: Machine, request: Request, ppn: int, launcher: Launcher, chosen: Chosen
) -> tuple[tuple[str, ...], str]:
    name, why = request.cpu_bind, "--cpu-bind"
    if not name and chosen.cpu_bind:
        name, why = chosen.cpu_bind, f"--option {chosen.cpu_bind_option}"
    if not name:
        name, why = machine.default_cpu_bind, f"default_cpu_bind of {machine.name}.toml"
    if name in ("", "none"):
        return (), why if name else "nobody asked for it"
    listed = machine.cpu_bind.get(name) or tuple(name.split(":"))
    if name not in machine.cpu_bind and not name[:1].isdigit():
        known = ", ".join(machine.cpu_bind) or "none"
        raise UsageError(
            f"--cpu-bind {name}: expected none, one of {machine.name}'s lists ({known}), or cores "
            "such as 0-7:8-15"
        )
    for ranges in listed:
        read_cores(ranges)
    if launcher.kind not in ("pals", "srun"):
        if request.cpu_bind:
            raise UsageError(
                f"--cpu-bind {name}: {launcher.kind} takes no list of cores; expected none, or its "
                "own words in --launcher-args"
            )
        return (), f"{launcher.kind} takes no list of cores"
    if ppn > len(listed):
        if request.cpu_bind:
            raise UsageError(
                f"--cpu-bind {name}: {len(listed)} ranges for {ppn} ranks a host; "
                "expected one a rank"
            )
        return (), f"{ppn} ranks a host are more than the {len(listed)} ranges of {name}"
    return listed[:ppn], f"{name}: {why}"


def _cpus_per_task(
    flags: tuple[str, ...], machine: Machine, ppn: int
) -> tuple[tuple[str, ...], str]:
    """Give srun's ``-c`` for as many ranks as there are.

    The file's number is for one rank a device: that many together are the cores that a node has
    to give.
    """
    devices = machine.devices_per_node or 0
    place = _place_of_cpus(flags)
    if machine.launcher != "srun" or place < 0 or not devices or ppn == devices:
        return flags, ""
    each = int(flags[place].rpartition("=")[2])
    fitting = max(1, each * devices // ppn)
    new = flags[place].replace(str(each), str(fitting))
    why = f"{machine.name}.toml has {each} for {devices} ranks a host; there are {ppn}"
    return (*flags[:place], new, *flags[place + 1 :]), why


def _cores_of_flags(flags: Sequence[str]) -> int:
    """Return the cores of each rank that flags bind it to; 0 where they bind to none."""
    depth = [flag.partition("=")[2] for flag in flags if flag.startswith("--depth=")]
    place = _place_of_cpus(flags)
    text = depth[-1] if depth else flags[place].rpartition("=")[2] if place >= 0 else ""
    return int(text) if text.isdecimal() else 0


def _place_of_cpus(flags: Sequence[str]) -> int:
    """Return the place of the word that has srun's cores per task; -1 where there is none."""
    for place, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        if name == "--cpus-per-task" and equals and value.isdecimal():
            return place
        if place and flags[place - 1] in ("-c", "--cpus-per-task") and flag.isdecimal():
            return place
    return -1
