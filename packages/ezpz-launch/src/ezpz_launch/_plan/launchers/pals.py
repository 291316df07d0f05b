"""PALS' mpiexec, on HPE Cray."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ezpz_topo import Machine

from . import Env, Flags, Kind, Launcher, Words

if TYPE_CHECKING:
    from ezpz_launch._plan.placement import Arrangement
    from ezpz_launch._plan.plan import LaunchPlan


class Pals(Kind):
    """It takes a hostfile, flags that export and bind, and a list of cores for each rank."""

    name = "pals"
    # With PMIx it tells none.
    tells_size = False
    # What its --version says is not among our facts.
    folder = "/opt/cray/pals"
    separator = ":"
    takes_cores = True
    binding_words = ("--cpu-bind", "--depth")
    needs_job = True
    tells = ("PALS_", "PMI_", "PMIX_")
    other_mpis = ("Open MPI",)

    def argv(self, plan: LaunchPlan) -> list[str]:
        placement = plan.placement
        words = [plan.launcher.path, "-n", str(placement.nproc), "--ppn", str(placement.ppn)]
        words += ["--hostfile", plan.hostfile]
        words += plan.flags or ["--envall"]
        if plan.unbound:
            words += ["--cpu-bind=none"]
        elif plan.cpu_bind:
            words += [f"--cpu-bind=list:{':'.join(plan.cpu_bind)}"]
        elif plan.depth:
            words += [f"--depth={plan.depth}"]
        return [*words, *plan.launcher_args, *self.shim(plan)]

    def two_ranks(self, launcher: Launcher) -> list[str]:
        return ["--ppn", "2", "--envall"]

    def fit_flags(
        self, flags: Words, machine: Machine, arrangement: Arrangement, env: Env, *, unbound: bool
    ) -> Flags:
        """Bind in order, where the machine's file says so, to as many cores as there are."""
        depths = [flag.partition("=")[2] for flag in flags if flag.startswith("--depth")]
        if depths:
            return Flags(flags, cores=int(depths[-1]) if depths[-1].isdecimal() else 0)
        depth = 0
        if "--cpu-bind=depth" in flags:
            depth = max(1, arrangement.cores // arrangement.placement.ppn)
        return Flags(flags, cores=depth, depth=depth)


KIND = Pals()
