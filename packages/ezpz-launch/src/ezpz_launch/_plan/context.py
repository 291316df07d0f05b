"""Where a launch starts from, and the plan that follows from it and from the request."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ezpz_launch._errors import UsageError, say
from ezpz_launch._plan.choose import choose_launcher, imagine_launcher
from ezpz_launch._plan.command import require_command
from ezpz_launch._plan.environment import strip_launcher_env
from ezpz_launch._plan.executables import env_with_python_on_path
from ezpz_launch._plan.kind import Launcher
from ezpz_launch._plan.options import Request
from ezpz_launch._plan.placement import Arrangement
from ezpz_launch._plan.plan import LaunchPlan, plan
from ezpz_launch._plan.ports import reserve_port
from ezpz_topo import TopoError, Topology, detect, fold_nodelist, get_allocation, get_hosts, imagine

HOSTFILE = "HOSTFILE"
"""Stands in a dry run for the file that a launch would write."""

IMAGINED_PORT = 29500
"""Stands in a dry run of another machine for a port that is free there: torch's default."""


class Context(NamedTuple):
    """Where a launch starts from."""

    topology: Topology
    env: Mapping[str, str]  # for the launcher and the ranks; nothing of an outer launch
    hosts: tuple[str, ...]  # that there are
    slots: tuple[int, ...]  # ranks that are foreseen on each of them; 0 if unknown
    hosts_source: str
    is_imagined: bool = False  # whether the machine is another one


def find_context(request: Request, env: Mapping[str, str]) -> Context:
    """Detect where we are, and find the hosts that a request may use.

    Raises:
        UsageError: The working directory is gone, or this process is a rank already.
        LaunchError: The command does not exist.
    """
    _require_working_directory()
    detection_env = dict(env)
    if request.machine:
        detection_env["EZPZ_MACHINE"] = request.machine
    topology = detect(detection_env)
    _refuse_nested_launch(request, topology)
    if topology.rank.launcher != "none":
        # Also in a world of one: an inner MPI would join it.
        env = strip_launcher_env(env)
    own = dict(pair.split("=", 1) for pair in request.env)
    require_command(request.command[0], {**env, **own})
    return build_context(topology, request, env)


def imagine_context(request: Request, env: Mapping[str, str]) -> Context:
    """Return the context on a machine that is not here, for a dry run."""
    if request.hostfile:
        raise UsageError("--dry-run --machine: its hosts are hypothetical; expected no --hostfile")
    topology = imagine(request.machine, (request.nodes or 1) + request.spares, env)
    return build_context(topology, request, {}, is_imagined=True)


def build_context(
    topology: Topology, request: Request, env: Mapping[str, str], *, is_imagined: bool = False
) -> Context:
    """Build the context of a request from a topology."""
    job = topology.allocation
    slots: Sequence[int]
    if request.hostfile or env.get("HOSTFILE"):
        found = get_hosts(request.hostfile or None, env)
        hosts = [entry.host for entry in found.entries]
        slots = [entry.slots or 0 for entry in found.entries]
        source = found.source
    elif request.nested and topology.rank.world_size > 1 and not request.include:
        # Every rank launches, each on its own host.
        hosts = [job.node_name or topology.hostname]
        slots = [0]
        source = "--nested: this host"
    else:
        hosts = list(job.hosts)
        slots = job.slots or [0] * len(hosts)
        source = job.sources["hosts"]
    return Context(topology, env, tuple(hosts), tuple(slots), source, is_imagined)


def make_plan(
    context: Context, request: Request, *, bad_hosts: Collection[str] = (),
    notes: Sequence[str] = (),
) -> LaunchPlan:  # fmt: skip
    """Plan a launch on the hosts of a context, less those that are known to be bad."""
    good = [host for host in context.hosts if host not in bad_hosts]
    slots = dict(zip(context.hosts, context.slots, strict=True))
    source = context.hosts_source
    spares = request.spares
    if bad_hosts:
        source += f", less {len(bad_hosts)} found bad"
        spares = max(0, request.spares - len(bad_hosts))
    planned = _plan(context, replace(request, spares=spares), good, slots, source)
    return replace(planned, request=request, warnings=(*planned.warnings, *notes))


def plan_on_hosts(context: Context, hosts: Sequence[str], request: Request) -> LaunchPlan:
    """Plan a launch that uses all of these hosts."""
    slots = dict(zip(context.hosts, context.slots, strict=True))
    every = replace(request, include="", exclude="", nodes=None, spares=0, min_nodes=None)
    return _plan(context, every, hosts, slots, context.hosts_source)


def replan(
    context: Context, request: Request, hosts: Sequence[str], size: tuple[int, int]
) -> LaunchPlan:
    """Plan the same launch on other hosts; ``size`` is its ranks in all and on a host."""
    nproc, ppn = size
    planned = plan_on_hosts(context, hosts, replace(request, nproc=nproc, ppn=ppn))
    return replace(planned, request=request)


def _plan(
    context: Context, request: Request, hosts: Sequence[str], slots: Mapping[str, int], source: str
) -> LaunchPlan:
    topology = context.topology
    launcher: Launcher | Callable[[Arrangement], Launcher]
    if context.is_imagined:
        launcher = imagine_launcher(topology, request)
        port = IMAGINED_PORT
    else:
        env = env_with_python_on_path(context.env)
        launcher = partial(choose_launcher, topology=topology, request=request, env=env)
        port = reserve_port()
    return plan(
        topology, request, launcher, hosts=hosts, hosts_source=source,
        slots=[slots.get(host, 0) for host in hosts], hostfile=HOSTFILE, port=port,
        user_env=context.env, as_root=not context.is_imagined and os.geteuid() == 0,
    )  # fmt: skip


def _require_working_directory() -> None:
    try:
        os.getcwd()
    except OSError as error:
        # Each rank's shell would complain of it.
        raise UsageError(
            f"the current directory cannot be read ({error.strerror}); expected one that is "
            "there; it was deleted, perhaps: cd to another"
        ) from error


def _refuse_nested_launch(request: Request, topology: Topology) -> None:
    rank = topology.rank
    if rank.world_size > 1 and not request.nested:
        source = rank.sources["rank"]
        raise UsageError(
            f"this process is rank {rank.rank} of {rank.world_size} already ({source}); expected "
            "to be started outside of a launch; --nested lets every rank launch on its own host; "
            f"unset {source} if it is left over"
        )


_SCHEDULER_DAEMONS = (b"pbs_mom", b"slurmd")


def warn_if_job_env_missing(context: Context, request: Request) -> None:
    """Name the job that this host is a node of, if this shell has none of its variables."""
    topology = context.topology
    hosts_are_given = request.hostfile or context.env.get("HOSTFILE")
    in_job = topology.allocation.scheduler != "none"
    if in_job or topology.rank.launcher != "none" or hosts_are_given:
        return
    if not _runs_scheduler_daemon():
        return  # nobody pays for a question to a server that is not there
    try:
        job = get_allocation({"EZPZ_SCHEDULER_TIMEOUT": "3", **context.env}, ask=True)
    except TopoError:
        return  # it is a hint, and no more
    if not job.job_id:
        return
    remedy = f"export PBS_JOBID={job.job_id}"
    if job.scheduler == "slurm":
        remedy = f"srun --jobid={job.job_id} --overlap --pty bash"
    say(
        f"this host is a node of your job {job.job_id} ({fold_nodelist(job.hosts)}), whose "
        f"variables this shell does not have: this host alone is used; for the job's: {remedy}"
    )


def _runs_scheduler_daemon() -> bool:
    if not os.path.isdir("/proc"):
        return False
    for process in os.listdir("/proc"):
        with suppress(OSError), open(f"/proc/{process}/comm", "rb") as file:
            if file.read().strip() in _SCHEDULER_DAEMONS:
                return True
    return False
