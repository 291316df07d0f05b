"""Slurm's srun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ezpz_launch._errors import LaunchError, UsageError
from ezpz_launch._plan.options import read_ranges
from ezpz_launch._plan.placement import Arrangement, Placement, match_hosts, shown
from ezpz_topo import Machine, Topology, fold_nodelist

from . import Env, Flags, Kind, Words

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
    takes_cores = True
    binding_words = ("--cpu-bind", "--depth")

    def argv(self, plan: LaunchPlan) -> list[str]:
        placement = plan.placement
        words = [plan.launcher.path, f"--ntasks={placement.nproc}"]
        if not {"-u", "--unbuffered"} & set(plan.flags):
            words += ["--unbuffered"]
        # Each of these has a variable or a line of slurm.conf that would say otherwise. Survivors
        # of a failure are ours to end, with the grace that was promised; srun gives none.
        words += ["--export=ALL", "--kill-on-bad-exit=0", "--wait=0"]
        survives = plan.request.spares or plan.request.min_nodes
        if survives:
            words += ["--no-kill"]  # what a lost node means is ours to decide
        if plan.in_step or survives:
            # The step that we are in holds the cores, or one that lost a node and is not cleared
            # away: without it this one would wait for its end.
            words += ["--overlap"]
        if plan.by_rank:
            # Left to itself srun would even the hosts out, or sort them: the file names one a rank.
            # The slash tells srun that it is a file.
            words += ["--distribution=arbitrary", f"--nodelist={plan.hostfile}"]
        else:
            words += [f"--nodes={len(placement.hosts)}", f"--ntasks-per-node={placement.ppn}"]
            words += ["--distribution=block"]
            if plan.nodelist:
                words += [f"--nodelist={plan.nodelist}"]
        if plan.devices:
            words += [f"--gpus-per-node={plan.devices}"]
        words += plan.flags
        if plan.unbound:
            words += ["--cpu-bind=none"]
        elif plan.cpu_bind:
            words += [f"--cpu-bind=mask_cpu:{','.join(map(_mask_of, plan.cpu_bind))}"]
        return [*words, *plan.launcher_args, *self.shim(plan)]

    def hostfile(self, placement: Placement) -> list[str]:
        pairs = zip(placement.hosts, placement.ranks, strict=True)
        return [host for host, count in pairs for _ in range(count)]

    def fit_hosts(
        self, topology: Topology, arrangement: Arrangement
    ) -> tuple[Arrangement, str, bool]:
        job, placement = topology.allocation, arrangement.placement
        if job.scheduler != "slurm":
            raise LaunchError(
                f"srun starts ranks in a Slurm job, and there is none here ({job.sources['hosts']})"
                "; expected to be inside one; salloc or sbatch first, or choose another --launcher"
            )
        names = placement.hosts
        if names != job.hosts[: len(names)]:
            found, unknown = match_hosts(names, job.hosts)
            if unknown:
                raise UsageError(
                    f"{shown(unknown)} ({arrangement.source}): not in Slurm job {job.job_id}, "
                    f"which has {shown(job.hosts)}; expected hosts of the job, srun reaches no "
                    "others"
                )
            if len(found) < len(names):
                raise UsageError(
                    f"{shown(names)} ({arrangement.source}): two of these are one node of Slurm "
                    f"job {job.job_id}; expected each once"
                )
            placement = placement._replace(hosts=tuple(found))
            arrangement = arrangement._replace(placement=placement)
        used = set(placement.hosts)
        is_even = placement.ranks[-1] == placement.ppn
        if not is_even or placement.hosts != tuple(h for h in job.hosts if h in used):
            return arrangement, "", True
        nodelist = "" if len(used) == len(job.hosts) else fold_nodelist(placement.hosts)
        return arrangement, nodelist, len(nodelist) > _LONGEST_WORD

    def fit_flags(
        self, flags: Words, machine: Machine, arrangement: Arrangement, env: Env, *, unbound: bool
    ) -> Flags:
        """Give cores a task for as many ranks as there are; without a word srun gives one core."""
        ppn, place = arrangement.placement.ppn, _place_of_cpus(flags)
        if place >= 0:
            devices, each = machine.devices_per_node or 0, int(flags[place].rpartition("=")[2])
            fitting, why = each, ""
            if devices and ppn != devices:
                fitting = max(1, each * devices // ppn)
                why = f"{machine.name}.toml has {each} for {devices} ranks a host; there are {ppn}"
            word = flags[place].replace(str(each), str(fitting))
            flags = (*flags[:place], word, *flags[place + 1 :])
            return Flags(flags, why, 0 if unbound else fitting)
        text, room = env.get("SLURM_CPUS_PER_TASK", ""), arrangement.cores // ppn
        asked = int(text) if text.isdecimal() else 0
        cpus = min(asked, room) if room else asked
        if not cpus:
            return Flags(flags)
        why = "SLURM_CPUS_PER_TASK, which srun itself ignores from 22.05 on"
        if cpus != asked:
            why += f", less: {room} a rank are there"
        return Flags((*flags, f"--cpus-per-task={cpus}"), why, cpus)

    def removed(self, user_env: Env) -> Words:
        """Return the variables by which srun moves output, hosts or binding, whatever the plan."""
        # Ranks would write into files of its own, or lie on other hosts than MASTER_ADDR says.
        names = [name for name in _MISLEADING if name in user_env]
        if "SLURM_STEP_ID" in user_env:
            # Of the step that we are in: its ranks' cores are not ours.
            names += [name for name in user_env if name.startswith("SLURM_CPU_BIND")]
        return tuple(names)


def _place_of_cpus(flags: Sequence[str]) -> int:
    """Return the place of the word that has the cores per task; -1 where there is none."""
    for place, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        if name == "--cpus-per-task" and equals and value.isdecimal():
            return place
        if place and flags[place - 1] in ("-c", "--cpus-per-task") and flag.isdecimal():
            return place
    return -1


def _mask_of(cores: str) -> str:
    return hex(sum(1 << core for core in set(read_ranges(cores))))


KIND = Srun()
