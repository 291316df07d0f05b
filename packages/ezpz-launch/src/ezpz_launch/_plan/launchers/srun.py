"""Slurm's srun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ezpz_launch._errors import LaunchError, UsageError
from ezpz_launch._plan.kind import Env, FittedFlags, FittedHosts, Kind, Words
from ezpz_launch._plan.options import parse_core_ranges
from ezpz_launch._plan.placement import Arrangement, Placement, abbreviate, match_hosts
from ezpz_topo import Machine, Topology, fold_nodelist

if TYPE_CHECKING:
    from ezpz_launch._plan.plan import LaunchPlan

_LONGEST_WORD = 100_000
"""Bytes of one word of a command line, with room to spare (Linux: MAX_ARG_STRLEN, 131,072)."""

_MISLEADING = ("SLURM_HOSTFILE", "SLURM_STDOUTMODE", "SLURM_STDERRMODE", "SLURM_LABELIO")


class Srun(Kind):
    """It knows the job's hosts by Slurm's names, and binds by masks."""

    name = "srun"
    program = "srun"
    separator = ":"
    accepts_core_list = True
    binding_prefixes = ("--cpu-bind", "--depth")

    def build_argv(self, plan: LaunchPlan) -> list[str]:
        words = [plan.launcher.path, f"--ntasks={plan.nproc}"]
        if "-u" not in plan.flags and "--unbuffered" not in plan.flags:
            words.append("--unbuffered")
        # Each of these has a variable or a line of slurm.conf that would override the default.
        # ezpz-launch ends the survivors of a failure, with its grace; srun would give none.
        words += ["--export=ALL", "--kill-on-bad-exit=0", "--wait=0"]
        survives_lost_node = plan.request.spares or plan.request.min_nodes
        if survives_lost_node:
            words.append("--no-kill")  # a lost node is ours to handle
        if plan.in_step or survives_lost_node:
            # The step that we are in holds the cores, or one that lost a node and is not cleared
            # away: without it this one would wait for its end.
            words.append("--overlap")
        words += _build_layout(plan)
        if plan.devices:
            words.append(f"--gpus-per-node={plan.devices}")
        words += plan.flags
        if plan.unbound:
            words.append("--cpu-bind=none")
        elif plan.cpu_bind:
            masks = ",".join(map(_build_mask, plan.cpu_bind))
            words.append(f"--cpu-bind=mask_cpu:{masks}")
        words += plan.launcher_args
        words += self.build_rank_command(plan)
        return words

    def build_hostfile(self, placement: Placement) -> list[str]:
        lines: list[str] = []
        for host, count in zip(placement.hosts, placement.ranks, strict=True):
            lines += [host] * count
        return lines

    def fit_hosts(self, topology: Topology, arrangement: Arrangement) -> FittedHosts:
        job = topology.allocation
        if job.scheduler != "slurm":
            raise LaunchError(
                f"srun starts ranks in a Slurm job, and there is none here ({job.sources['hosts']})"
                "; expected to be inside one; salloc or sbatch first, or choose another --launcher"
            )
        placement = arrangement.placement
        names = placement.hosts
        if names != job.hosts[: len(names)]:
            placement = placement._replace(hosts=_find_job_hosts(topology, arrangement))
            arrangement = arrangement._replace(placement=placement)
        used = set(placement.hosts)
        in_order = tuple(host for host in job.hosts if host in used)
        is_even = placement.ranks[-1] == placement.ppn
        if not is_even or placement.hosts != in_order:
            return FittedHosts(arrangement, by_rank=True)
        if len(used) == len(job.hosts):
            return FittedHosts(arrangement)
        nodelist = fold_nodelist(placement.hosts)
        return FittedHosts(arrangement, nodelist, by_rank=len(nodelist) > _LONGEST_WORD)

    def fit_flags(
        self, flags: Words, machine: Machine, arrangement: Arrangement, env: Env, *, unbound: bool
    ) -> FittedFlags:
        """Fit the cores of a task to the ranks of a host; without a flag srun gives one core."""
        ppn = arrangement.placement.ppn
        index = _find_cores_flag(flags)
        if index is not None:
            return _fit_cores_flag(flags, index, machine, ppn, unbound=unbound)
        return _add_cores_flag(flags, arrangement.cores // ppn, env)

    def list_misleading(self, user_env: Env) -> Words:
        """List the variables by which srun moves output, hosts or binding, whatever the plan."""
        # With them ranks would write into separate files, or run on other hosts than MASTER_ADDR.
        names = [name for name in _MISLEADING if name in user_env]
        if "SLURM_STEP_ID" in user_env:
            # Of the step that we are in: its ranks' cores are not ours.
            names += [name for name in user_env if name.startswith("SLURM_CPU_BIND")]
        return tuple(names)


def _build_layout(plan: LaunchPlan) -> list[str]:
    if plan.by_rank:
        # By default srun would even the hosts out, or sort them: the file has one for each rank.
        # srun takes it for a file because of the slash.
        return ["--distribution=arbitrary", f"--nodelist={plan.hostfile}"]
    placement = plan.placement
    words = [f"--nodes={len(placement.hosts)}", f"--ntasks-per-node={placement.ppn}"]
    words.append("--distribution=block")
    if plan.nodelist:
        words.append(f"--nodelist={plan.nodelist}")
    return words


def _build_mask(ranges: str) -> str:
    mask = 0
    for core in parse_core_ranges(ranges):
        mask |= 1 << core
    return hex(mask)


def _find_job_hosts(topology: Topology, arrangement: Arrangement) -> tuple[str, ...]:
    """Find the hosts in use among the job's, by Slurm's names."""
    job = topology.allocation
    names = arrangement.placement.hosts
    hosts, unknown = match_hosts(names, job.hosts)
    if unknown:
        raise UsageError(
            f"{abbreviate(unknown)} ({arrangement.source}): not in Slurm job {job.job_id}, "
            f"which has {abbreviate(job.hosts)}; expected hosts of the job, srun reaches no "
            "others"
        )
    if len(hosts) < len(names):
        raise UsageError(
            f"{abbreviate(names)} ({arrangement.source}): two of these are one node of Slurm "
            f"job {job.job_id}; expected each once"
        )
    return tuple(hosts)


def _find_cores_flag(flags: Sequence[str]) -> int | None:
    """Return the index of the word that has the cores per task; None if there is none."""
    for index, flag in enumerate(flags):
        name, _, value = flag.partition("=")
        if name == "--cpus-per-task" and value.isdecimal():
            return index
        is_value = index > 0 and flags[index - 1] in ("-c", "--cpus-per-task")
        if is_value and flag.isdecimal():
            return index
    return None


def _fit_cores_flag(
    flags: Words, index: int, machine: Machine, ppn: int, *, unbound: bool
) -> FittedFlags:
    text = flags[index].rpartition("=")[2]
    cores = int(text)
    source = ""
    devices = machine.devices_per_node or 0
    if devices and ppn != devices:
        cores = max(1, cores * devices // ppn)
        source = f"{machine.name}.toml has {int(text)} for {devices} ranks a host; there are {ppn}"
    word = flags[index].removesuffix(text) + str(cores)
    fitted = (*flags[:index], word, *flags[index + 1 :])
    if unbound:
        return FittedFlags(fitted, source)
    return FittedFlags(fitted, source, cores)


def _add_cores_flag(flags: Words, cores_per_rank: int, env: Env) -> FittedFlags:
    text = env.get("SLURM_CPUS_PER_TASK", "")
    if not text.isdecimal() or int(text) == 0:
        return FittedFlags(flags)
    requested = int(text)
    cores = requested
    source = "SLURM_CPUS_PER_TASK, which srun itself ignores from 22.05 on"
    if cores_per_rank and cores_per_rank < requested:
        cores = cores_per_rank
        source += f", less: {cores_per_rank} a rank are there"
    return FittedFlags((*flags, f"--cpus-per-task={cores}"), source, cores)


KIND = Srun()
