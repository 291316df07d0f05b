"""Slurm's srun."""

from __future__ import annotations

from collections.abc import Sequence

from ezpz_launch._options import mask_of
from ezpz_launch._plan import LaunchPlan, shim_argv
from ezpz_topo import family


def argv(plan: LaunchPlan) -> list[str]:
    """Return the command line that starts a plan's ranks."""
    placement = plan.placement
    words = [plan.launcher.path, f"--ntasks={placement.nproc}"]
    if not {"-u", "--unbuffered"} & set(plan.flags):
        words += ["--unbuffered"]
    # Each of these has a variable or a line of slurm.conf that would say otherwise. Survivors of
    # a failure are ours to end, with the grace that was promised; srun gives none.
    words += ["--export=ALL", "--kill-on-bad-exit=0", "--wait=0"]
    if plan.in_step:
        # The step that we are in holds the cores: without it this one would wait for its end.
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
        words += [f"--cpu-bind=mask_cpu:{','.join(map(mask_of, plan.cpu_bind))}"]
    return [*words, *plan.launcher_args, *shim_argv(plan, family("slurm"), separator=":")]


def hostfile_lines(hosts: Sequence[str], ranks: Sequence[int]) -> list[str]:
    """Return the lines of an arbitrary distribution's file: the host of each rank."""
    return [host for host, count in zip(hosts, ranks, strict=True) for _ in range(count)]
