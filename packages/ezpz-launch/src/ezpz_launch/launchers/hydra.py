"""MPICH's mpiexec (Hydra)."""

from __future__ import annotations

import os

from ezpz_launch._identify import Launcher
from ezpz_launch._plan import PROGRAMS, LaunchPlan, shim_argv
from ezpz_topo import family

_PBS_RSH = os.path.join(PROGRAMS, "pbs_rsh.sh")
"""Starts a proxy as rsh would, by the program that EZPZ_PBS_TMRSH names."""


def argv(plan: LaunchPlan) -> list[str]:
    """Return the command line that starts a plan's ranks."""
    placement, intel = plan.placement, plan.launcher.flavour == "intel"
    words = [plan.launcher.path, "-n", str(placement.nproc)]
    if plan.on_this_host:
        words += on_this_host(plan.launcher)
    else:
        words += ["-ppn", str(placement.ppn)]
        words += [] if intel else ["-rmk", "user"]
        if plan.launcher.pbs_tmrsh:
            words += ["-launcher", "rsh", "-launcher-exec", _PBS_RSH]
        words += ["-hostfile", plan.hostfile]
    return [*words, *plan.launcher_args, *shim_argv(plan, family("pmi"), separator=":")]


def on_this_host(launcher: Launcher) -> list[str]:
    """Return the words that keep the ranks on this host, whatever job it is in."""
    # Inside a Slurm step Hydra would start its proxy by another srun, which waits for
    # cores that the step holds, and would take its hosts from the job (MPICH 5.0.2).
    if launcher.flavour == "intel":
        return ["-bootstrap", "fork", "-hosts", "localhost"]
    return ["-launcher", "fork", "-rmk", "user", "-host", "localhost"]
