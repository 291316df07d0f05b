"""Slurm's srun. Run on Slurm 22.05.8."""

from __future__ import annotations

from collections.abc import Sequence

from ezpz_launch._cores import mask_of
from ezpz_launch._plan import LaunchPlan
from ezpz_topo import fold_nodelist

from .shim import shim_argv


def argv(plan: LaunchPlan) -> list[str]:
    """Return the command line that starts a plan's ranks."""
    placement = plan.placement
    words = [plan.launcher.path, f"--ntasks={placement.nproc}"]
    if not {"-u", "--unbuffered"} & set(plan.flags):
        words += ["--unbuffered"]
    if placement.is_even:
        words += [f"--nodes={len(placement.hosts)}", f"--ntasks-per-node={placement.ppn}"]
        if len(placement.hosts) < plan.hosts_of_job:
            words += [f"--nodelist={fold_nodelist(placement.hosts)}"]
    else:
        # Left to itself srun would even the hosts out: the file names one a rank. The slash
        # tells srun that it is a file.
        words += ["--distribution=arbitrary", f"--nodelist={plan.hostfile}"]
    if plan.devices:
        words += [f"--gpus-per-node={plan.devices}"]
    words += plan.flags
    if plan.unbound:
        words += ["--cpu-bind=none"]
    elif plan.cpu_bind:
        words += [f"--cpu-bind=mask_cpu:{','.join(map(mask_of, plan.cpu_bind))}"]
    return [*words, *plan.launcher_args, *shim_argv(plan, "slurm")]


def hostfile_lines(hosts: Sequence[str], ranks: Sequence[int]) -> list[str]:
    """Return the lines of an arbitrary distribution's file: the host of each rank."""
    return [host for host, count in zip(hosts, ranks, strict=True) for _ in range(count)]
