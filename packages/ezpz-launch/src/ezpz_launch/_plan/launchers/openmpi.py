"""Open MPI's mpiexec."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ezpz_topo import Machine

from . import Env, Kind, Launcher, Words, is_sh_name, pack_env

if TYPE_CHECKING:
    from ezpz_launch._plan.plan import LaunchPlan

_OF_A_HOST = ("HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_", "DISPLAY", "TMPDIR", "XDG_RUNTIME_DIR")
_OF_A_LOGIN = ("HOME", "USER", "LOGNAME", "SHELL", "MAIL", "TERM")
_OF_OTHERS = ("SSH_", "OMPI_", "PMIX_", "PRTE_", "PMI_", "SLURM_", "PBS_", "EZPZ_CONTROL")


class OpenMPI(Kind):
    """It takes a hostfile, and exports to other hosts what is named only."""

    name = "openmpi"
    program = "mpirun"
    versions = {"Open MPI": "", "OpenRTE": ""}
    separator = ":"
    tells = ("OMPI_", "PMIX_", "PRTE_")
    settings = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_")
    other_mpis = ("MPICH", "MVAPICH", "Intel")

    def argv(self, plan: LaunchPlan) -> list[str]:
        placement = plan.placement
        words = [plan.launcher.path, "-n", str(placement.nproc)]
        if not plan.on_this_host:
            words += ["-N", str(placement.ppn), "--hostfile", plan.hostfile]
        words += self._anywhere(as_root=plan.as_root)
        if not plan.on_this_host:
            # Elsewhere it starts ranks with what a login there has, and what is named.
            for name in dict.fromkeys((*plan.exported, *plan.control)):
                if name not in plan.flags:
                    words += ["-x", name]
        words += plan.flags
        return [*words, *plan.launcher_args, *self.shim(plan)]

    def two_ranks(self, launcher: Launcher) -> list[str]:
        return self._anywhere(as_root=os.geteuid() == 0)

    def _anywhere(self, *, as_root: bool) -> list[str]:
        # More ranks than cores is what a laptop asks for; root is what a container is. Two ranks
        # or fewer it would bind to one core each, with all our threads on it.
        words = ["--oversubscribe", "--bind-to", "none"]
        return [*words, "--allow-run-as-root"] if as_root else words

    def exported(self, machine: Machine, environment: Env, user_env: Env) -> Words:
        """Return all of the user's variables, as other launchers bring them, and what is added."""
        left_out = {*_OF_A_HOST, *_OF_A_LOGIN} - machine.environment.keys()
        own = [
            name
            for name in sorted(user_env)
            if is_sh_name(name) and name not in left_out and not name.startswith(_OF_OTHERS)
        ]
        added = [*filter(is_sh_name, environment), *pack_env(environment)]
        return tuple(dict.fromkeys(["PATH", *own, *added]))


KIND = OpenMPI()
