"""Open MPI's mpiexec."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ezpz_launch._plan.kind import Env, Kind, Launcher, Words
from ezpz_launch._plan.shim import is_sh_name, pack_env
from ezpz_topo import Machine

if TYPE_CHECKING:
    from ezpz_launch._plan.plan import LaunchPlan

_HOST_VARIABLES = (
    "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_", "DISPLAY", "TMPDIR", "XDG_RUNTIME_DIR",
)  # fmt: skip
_LOGIN_VARIABLES = ("HOME", "USER", "LOGNAME", "SHELL", "MAIL", "TERM")
_FOREIGN_PREFIXES = (
    "SSH_", "OMPI_", "PMIX_", "PRTE_", "PMI_", "SLURM_", "PBS_", "EZPZ_CONTROL",
)  # fmt: skip


class OpenMPI(Kind):
    """It takes a hostfile, and exports to other hosts only the variables that are named."""

    name = "openmpi"
    program = "mpirun"
    versions = {"Open MPI": "", "OpenRTE": ""}
    separator = ":"
    rank_prefixes = ("OMPI_", "PMIX_", "PRTE_")
    setting_prefixes = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_")
    incompatible_mpis = ("MPICH", "MVAPICH", "Intel")

    def build_argv(self, plan: LaunchPlan) -> list[str]:
        words = [plan.launcher.path, "-n", str(plan.nproc)]
        if not plan.on_this_host:
            words += ["-N", str(plan.placement.ppn), "--hostfile", plan.hostfile]
        words += self._build_common_flags(as_root=plan.as_root)
        if not plan.on_this_host:
            # Elsewhere it starts ranks with the variables of a login there, and those named.
            for name in dict.fromkeys((*plan.exported, *plan.control)):
                if name not in plan.flags:
                    words += ["-x", name]
        words += plan.flags
        words += plan.launcher_args
        words += self.build_rank_command(plan)
        return words

    def build_trial_flags(self, launcher: Launcher) -> list[str]:
        return self._build_common_flags(as_root=os.geteuid() == 0)

    def _build_common_flags(self, *, as_root: bool) -> list[str]:
        # Laptops need more ranks than cores, and containers run as root. It would bind two ranks
        # or fewer to one core each, with all their threads on it.
        words = ["--oversubscribe", "--bind-to", "none"]
        if as_root:
            words.append("--allow-run-as-root")
        return words

    def list_exported(self, machine: Machine, environment: Env, user_env: Env) -> Words:
        """List all of the user's variables, as other launchers do, and the plan's."""
        local = {*_HOST_VARIABLES, *_LOGIN_VARIABLES} - machine.environment.keys()
        names = ["PATH"]
        for name in filter(is_sh_name, sorted(user_env)):
            if name in local or name.startswith(_FOREIGN_PREFIXES):
                continue
            names.append(name)
        names += filter(is_sh_name, environment)
        names += pack_env(environment)
        return tuple(dict.fromkeys(names))


KIND = OpenMPI()
