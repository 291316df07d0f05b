"""What will be started, decided whole before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ezpz_launch._plan.binding import bind_ranks
from ezpz_launch._plan.environment import build_rank_environment, describe_unused_rendezvous
from ezpz_launch._plan.kind import Launcher
from ezpz_launch._plan.launchers import LAUNCHERS
from ezpz_launch._plan.machine_options import select_options
from ezpz_launch._plan.options import Request
from ezpz_launch._plan.placement import Arrangement, Placement, arrange
from ezpz_topo import Machine, Topology

# Topology + Request -> LaunchPlan: pure, so that every command line can be shown and tested.


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What will be started.

    Attributes:
        request: What the user requested.
        command: The user's words, verbatim.
        launcher: What starts the ranks.
        placement: How many ranks on which hosts.
        machine: The machine's flags and options.
        on_this_host: Whether this host alone has ranks.
        nodelist: The hosts for srun, if they are not all of the job's.
        by_rank: Whether srun reads the host of each rank from the hostfile.
        in_step: Whether we are in a step of the Slurm job, so that the ranks share its cores.
        hostfile: Path of the file that names the hosts, if the launcher reads one.
        device_type: torch's word for the devices of the hosts.
        devices: Devices to request from the scheduler on each host; 0 for none.
        flags: The machine's flags for this launcher.
        unbound: Whether the user wants no binding.
        cpu_bind: Cores of each rank of a host; empty for no list.
        depth: Cores for each rank if the machine binds in order; 0 if it does not.
        launcher_args: The user's words for the launcher.
        environment: The variables that are added to the ranks' environment.
        exported: Variables to name to a launcher that exports none by itself.
        removed: The user's variables that would override the plan.
        as_root: Whether we are root.
        spares: Hosts that replace those that fail.
        control: Variables of ours in the launcher's environment, for the ranks' shims.
        sources: For each decision, by name, the reason.
        notes: For people, in a dry run.
        warnings: For people, in a dry run and when the ranks are started.
    """

    request: Request
    command: tuple[str, ...]
    launcher: Launcher
    placement: Placement
    machine: Machine
    on_this_host: bool
    nodelist: str
    by_rank: bool
    in_step: bool
    hostfile: str
    device_type: str
    devices: int
    flags: tuple[str, ...]
    unbound: bool
    cpu_bind: tuple[str, ...]
    depth: int
    launcher_args: tuple[str, ...]
    environment: Mapping[str, str]
    exported: tuple[str, ...]
    removed: tuple[str, ...] = ()
    as_root: bool = False
    spares: tuple[str, ...] = ()
    control: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def nproc(self) -> int:
        """Number of ranks in all."""
        return self.placement.nproc


def plan(
    topology: Topology,
    request: Request,
    launcher: Launcher | Callable[[Arrangement], Launcher],
    *,
    hosts: Sequence[str],
    hosts_source: str,
    slots: int | Sequence[int] = 0,
    hostfile: str,
    port: int,
    user_env: Mapping[str, str],
    as_root: bool = False,
) -> LaunchPlan:
    """Decide how many ranks run where, by which launcher, and with what environment.

    Args:
        topology: Where we are.
        request: What the user requested.
        launcher: What starts the ranks; or a function that finds it for ranks on hosts.
        hosts: The hosts that can be used.
        hosts_source: Where they come from.
        slots: The ranks foreseen on each of ``hosts``, 0 if unknown; one number for all.
        hostfile: Where a file with the hosts in use will be, if the launcher needs one.
        port: A TCP port for the ranks' rendezvous.
        user_env: The environment we were called with; an OMP_NUM_THREADS there has precedence.
        as_root: Whether we are root.

    Raises:
        LaunchError: The request contradicts itself, or cannot be done here.
    """
    machine = topology.machine
    arrangement = arrange(topology, request, hosts=hosts, hosts_source=hosts_source, slots=slots)
    if not isinstance(launcher, Launcher):
        launcher = launcher(arrangement)
    kind = LAUNCHERS[launcher.kind]
    fitted_hosts = kind.fit_hosts(topology, arrangement)
    arrangement = fitted_hosts.arrangement
    selected = select_options(machine, request.options, launcher)
    binding = bind_ranks(machine, request, arrangement, launcher, selected, env=user_env)
    environment = build_rank_environment(
        topology,
        request,
        arrangement,
        launcher,
        selected,
        cores_per_rank=binding.cores_per_rank,
        port=port,
        user_env=user_env,
    )

    placement = arrangement.placement
    sources = {
        "nproc": placement.source,
        "ppn": placement.source_per_host,
        "hosts": arrangement.source,
        "launcher": launcher.source,
        "cpu_bind": binding.source,
    }
    if binding.flags.source:
        sources["flags"] = binding.flags.source
    for name in selected.names:
        sources[f"--option {name}"] = machine.options[name].why
    sources |= environment.sources

    warnings: list[str] = []
    if arrangement.warning:
        warnings.append(arrangement.warning)
    unused_rendezvous = describe_unused_rendezvous(environment.values, request, user_env)
    if unused_rendezvous:
        warnings.append(unused_rendezvous)

    accelerators = topology.accelerators
    devices = 0
    if accelerators.device_type != "cpu" and machine.devices_per_node:
        devices = accelerators.count
    return LaunchPlan(
        request=request,
        command=request.command,
        launcher=launcher,
        placement=placement,
        machine=machine,
        on_this_host=arrangement.on_this_host,
        nodelist=fitted_hosts.nodelist,
        by_rank=fitted_hosts.by_rank,
        in_step="SLURM_STEP_ID" in user_env,
        hostfile=hostfile,
        device_type=accelerators.device_type,
        devices=devices,
        flags=binding.flags.words,
        unbound=request.cpu_bind == "none",
        cpu_bind=binding.core_lists,
        depth=binding.flags.depth,
        launcher_args=request.launcher_args,
        environment=environment.values,
        exported=kind.list_exported(machine, environment.values, user_env),
        removed=kind.list_misleading(user_env),
        as_root=as_root,
        spares=arrangement.spares,
        sources=sources,
        notes=(*launcher.notes, *selected.notes, *environment.notes),
        warnings=tuple(warnings),
    )
