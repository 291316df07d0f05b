"""PALS' mpiexec, on HPE Cray."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ezpz_launch._plan.kind import Env, FittedFlags, Kind, Launcher, Words
from ezpz_launch._plan.placement import Arrangement
from ezpz_topo import Machine

if TYPE_CHECKING:
    from ezpz_launch._plan.plan import LaunchPlan


class Pals(Kind):
    """It takes a hostfile, flags that export and bind, and a list of cores for each rank."""

    name = "pals"
    # With PMIx it sets none.
    sets_world_size = False
    # The output of its --version is not among our facts.
    folder = "/opt/cray/pals"
    separator = ":"
    accepts_core_list = True
    binding_prefixes = ("--cpu-bind", "--depth")
    needs_job = True
    rank_prefixes = ("PALS_", "PMI_", "PMIX_")
    incompatible_mpis = ("Open MPI",)

    def build_argv(self, plan: LaunchPlan) -> list[str]:
        words = [plan.launcher.path, "-n", str(plan.nproc), "--ppn", str(plan.placement.ppn)]
        words += ["--hostfile", plan.hostfile]
        words += plan.flags or ["--envall"]
        if plan.unbound:
            words.append("--cpu-bind=none")
        elif plan.cpu_bind:
            words.append(f"--cpu-bind=list:{':'.join(plan.cpu_bind)}")
        elif plan.depth:
            words.append(f"--depth={plan.depth}")
        words += plan.launcher_args
        words += self.build_rank_command(plan)
        return words

    def build_trial_flags(self, launcher: Launcher) -> list[str]:
        return ["--ppn", "2", "--envall"]

    def fit_flags(
        self, flags: Words, machine: Machine, arrangement: Arrangement, env: Env, *, unbound: bool
    ) -> FittedFlags:
        """Bind in order, if the machine's flags do, to as many cores as there are."""
        depth_flags = [flag for flag in flags if flag.startswith("--depth")]
        if depth_flags:
            _, _, depth_text = depth_flags[-1].partition("=")
            if depth_text.isdecimal():
                return FittedFlags(flags, cores=int(depth_text))
            return FittedFlags(flags)
        if "--cpu-bind=depth" not in flags:
            return FittedFlags(flags)
        depth = max(1, arrangement.cores // arrangement.placement.ppn)
        return FittedFlags(flags, cores=depth, depth=depth)


KIND = Pals()
