"""MPICH's mpiexec (Hydra), and those of MVAPICH and Intel MPI."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from ezpz_launch._errors import CommandNotFoundError, LaunchError, UsageError
from ezpz_topo import Topology, get_pbs_folder

from . import PROGRAMS, Env, Kind, Launcher, Words, find_command

if TYPE_CHECKING:
    from ezpz_launch._plan.placement import Arrangement
    from ezpz_launch._plan.plan import LaunchPlan

_PBS_RSH = os.path.join(PROGRAMS, "pbs_rsh.sh")
"""Starts a proxy as rsh would, by the program that EZPZ_PBS_TMRSH names."""

_REACHES = ("launcher", "launcher-exec", "bootstrap", "bootstrap-exec", "rmk")
"""Its options about how it reaches other hosts; there are variables of the same names."""


class Hydra(Kind):
    """It takes a hostfile, and starts a proxy on each host: by ssh, or as it is told."""

    name = "hydra"
    # Intel MPI's own (developer reference; not run) has Hydra's flags, but not all of MPICH's.
    versions = {"Intel(R) MPI": "intel", "HYDRA": ""}
    separator = ":"
    tells = ("PMI_", "PMI2_", "HYDI_", "MPI_LOCAL")
    other_mpis = ("Open MPI",)

    def argv(self, plan: LaunchPlan) -> list[str]:
        placement, launcher = plan.placement, plan.launcher
        words = [launcher.path, "-n", str(placement.nproc)]
        if plan.on_this_host:
            words += self.two_ranks(launcher)
        else:
            words += ["-ppn", str(placement.ppn)]
            words += [] if launcher.flavour == "intel" else ["-rmk", "user"]
            if launcher.pbs_tmrsh:
                words += ["-launcher", "rsh", "-launcher-exec", _PBS_RSH]
            words += ["-hostfile", plan.hostfile]
        return [*words, *plan.launcher_args, *self.shim(plan)]

    def fit_hosts(
        self, topology: Topology, arrangement: Arrangement
    ) -> tuple[Arrangement, str, bool]:
        """Refuse IPv6 addresses: it cuts them at the first colon, and waits for that host."""
        hosts = (*arrangement.placement.hosts, *arrangement.spares)
        address = next((host for host in hosts if ":" in host), None)
        if address is not None and not arrangement.on_this_host:
            raise UsageError(
                f"{address} ({arrangement.source}): Hydra's mpiexec takes no IPv6 address; "
                "expected a host's name, or its IPv4 address; correct the hostfile, or choose "
                "--launcher openmpi"
            )
        return arrangement, "", False

    def two_ranks(self, launcher: Launcher) -> list[str]:
        # Inside a Slurm step Hydra would start its proxy by another srun, which waits for
        # cores that the step holds, and would take its hosts from the job (MPICH 5.0.2).
        if launcher.flavour == "intel":
            return ["-bootstrap", "fork", "-hosts", "localhost"]
        return ["-launcher", "fork", "-rmk", "user", "-host", "localhost"]

    def reach(self, launcher: Launcher, env: Env, launcher_args: Words) -> Launcher:
        """Start MPICH's proxies on the other nodes of a PBS job by PBS itself, else by ssh."""
        is_told = any(word.lstrip("-") in _REACHES for word in launcher_args) or any(
            env.get(f"HYDRA_{name.upper().replace('-', '_')}") for name in _REACHES
        )
        if launcher.flavour or is_told or not env.get("PBS_JOBID"):
            return launcher
        folders = [env.get("PATH", ""), get_pbs_folder(env), env.get("PBS_O_PATH", "")]
        path = {**env, "PATH": os.pathsep.join(folders)}
        for name, found in (("pbs_tmrsh", path), ("ssh", env)):
            with suppress(CommandNotFoundError):
                program = find_command(name, name, found).path
                source = f"{launcher.source}; other nodes by {program}"
                pbs_tmrsh = program if name == "pbs_tmrsh" else ""
                return launcher._replace(source=source, pbs_tmrsh=pbs_tmrsh)
        raise LaunchError(
            f"{launcher.path} starts nothing on the job's other nodes: neither pbs_tmrsh nor ssh "
            "is here; expected one of them on PATH; add the folder of PBS's commands to PATH, or "
            "load the site's own MPI"
        )

    def environment(self, launcher: Launcher, *, here: bool) -> dict[str, tuple[str, str]]:
        added = {}
        if launcher.flavour == "intel" and not here:
            # Below a scheduler it would otherwise follow that one's layout, whatever -ppn says
            # (Intel MPI developer reference).
            added["I_MPI_JOB_RESPECT_PROCESS_PLACEMENT"] = "0", "so that Intel MPI heeds -ppn"
        if launcher.pbs_tmrsh:
            why = "starts Hydra's proxies on the other nodes"
            added["EZPZ_PBS_TMRSH"] = launcher.pbs_tmrsh, why
        return added


KIND = Hydra()
