"""MPICH's mpiexec (Hydra), and those of MVAPICH and Intel MPI."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ezpz_launch._errors import LaunchError, UsageError
from ezpz_launch._plan.executables import find_executables
from ezpz_launch._plan.kind import Env, FittedHosts, Kind, Launcher, Words
from ezpz_launch._plan.placement import Arrangement
from ezpz_launch._plan.shim import PROGRAMS
from ezpz_topo import Topology, get_pbs_folder

if TYPE_CHECKING:
    from ezpz_launch._plan.plan import LaunchPlan

_PBS_RSH = os.path.join(PROGRAMS, "pbs_rsh.sh")
"""Starts a proxy as rsh would, by the program that EZPZ_PBS_TMRSH names."""

_REMOTE_START_OPTIONS = ("launcher", "launcher-exec", "bootstrap", "bootstrap-exec", "rmk")
"""Its options about how it reaches other hosts; there are variables of the same names."""


class Hydra(Kind):
    """It takes a hostfile, and starts a proxy on each host: by ssh, or by its options."""

    name = "hydra"
    # Intel MPI's own (developer reference; not run) has Hydra's flags, but not all of MPICH's.
    versions = {"Intel(R) MPI": "intel", "HYDRA": ""}
    separator = ":"
    rank_prefixes = ("PMI_", "PMI2_", "HYDI_", "MPI_LOCAL")
    incompatible_mpis = ("Open MPI",)

    def build_argv(self, plan: LaunchPlan) -> list[str]:
        launcher = plan.launcher
        words = [launcher.path, "-n", str(plan.nproc)]
        if plan.on_this_host:
            words += self.build_trial_flags(launcher)
        else:
            words += ["-ppn", str(plan.placement.ppn)]
            if launcher.flavour != "intel":
                words += ["-rmk", "user"]
            if launcher.pbs_tmrsh:
                words += ["-launcher", "rsh", "-launcher-exec", _PBS_RSH]
            words += ["-hostfile", plan.hostfile]
        words += plan.launcher_args
        words += self.build_rank_command(plan)
        return words

    def fit_hosts(self, topology: Topology, arrangement: Arrangement) -> FittedHosts:
        """Refuse IPv6 addresses: it cuts them at the first colon, and waits for that host."""
        if arrangement.on_this_host:
            return FittedHosts(arrangement)
        for host in (*arrangement.placement.hosts, *arrangement.spares):
            if ":" in host:
                raise UsageError(
                    f"{host} ({arrangement.source}): Hydra's mpiexec takes no IPv6 address; "
                    "expected a host's name, or its IPv4 address; correct the hostfile, or choose "
                    "--launcher openmpi"
                )
        return FittedHosts(arrangement)

    def build_trial_flags(self, launcher: Launcher) -> list[str]:
        # Inside a Slurm step Hydra would start its proxy by another srun, which waits for
        # cores that the step holds, and would take its hosts from the job (MPICH 5.0.2).
        if launcher.flavour == "intel":
            return ["-bootstrap", "fork", "-hosts", "localhost"]
        return ["-launcher", "fork", "-rmk", "user", "-host", "localhost"]

    def prepare_remote_start(self, launcher: Launcher, env: Env, launcher_args: Words) -> Launcher:
        """Start MPICH's proxies on the other nodes of a PBS job by PBS itself, else by ssh."""
        if launcher.flavour or not env.get("PBS_JOBID"):
            return launcher
        if _user_chose_remote_start(env, launcher_args):
            return launcher
        folders = [env.get("PATH", ""), get_pbs_folder(env), env.get("PBS_O_PATH", "")]
        pbs_env = {**env, "PATH": os.pathsep.join(folders)}
        pbs_tmrsh = find_executables("pbs_tmrsh", pbs_env)
        if pbs_tmrsh:
            source = f"{launcher.source}; other nodes by {pbs_tmrsh[0]}"
            return launcher._replace(source=source, pbs_tmrsh=pbs_tmrsh[0])
        ssh = find_executables("ssh", env)
        if ssh:
            return launcher._replace(source=f"{launcher.source}; other nodes by {ssh[0]}")
        raise LaunchError(
            f"{launcher.path} starts nothing on the job's other nodes: neither pbs_tmrsh nor ssh "
            "is here; expected one of them on PATH; add the folder of PBS's commands to PATH, or "
            "load the site's own MPI"
        )

    def build_environment(
        self, launcher: Launcher, *, on_this_host: bool
    ) -> dict[str, tuple[str, str]]:
        added: dict[str, tuple[str, str]] = {}
        if launcher.flavour == "intel" and not on_this_host:
            # Below a scheduler it would otherwise follow that one's layout, against -ppn
            # (Intel MPI developer reference).
            why = "so that Intel MPI heeds -ppn"
            added["I_MPI_JOB_RESPECT_PROCESS_PLACEMENT"] = ("0", why)
        if launcher.pbs_tmrsh:
            why = "starts Hydra's proxies on the other nodes"
            added["EZPZ_PBS_TMRSH"] = (launcher.pbs_tmrsh, why)
        return added


def _user_chose_remote_start(env: Env, launcher_args: Words) -> bool:
    for word in launcher_args:
        if word.lstrip("-") in _REMOTE_START_OPTIONS:
            return True
    for name in _REMOTE_START_OPTIONS:
        variable = f"HYDRA_{name.upper().replace('-', '_')}"
        if env.get(variable):
            return True
    return False


KIND = Hydra()
