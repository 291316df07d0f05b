"""`Kind`, the base class of the kinds of launchers in the folder ``launchers``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from ezpz_launch._plan.placement import Arrangement, Placement
from ezpz_launch._plan.shim import ESCAPE, SHIM
from ezpz_topo import FAMILIES, Family, Machine, Topology

if TYPE_CHECKING:
    from ezpz_launch._plan.plan import LaunchPlan

Words = tuple[str, ...]
Env = Mapping[str, str]


class Launcher(NamedTuple):
    """One launcher that was found: its path, its kind, and how these are known."""

    path: str  # its executable
    kind: str  # a name of `LAUNCHERS`
    source: str  # how it was found and recognised
    notes: Words = ()  # for people, such as another launcher that it shadows
    flavour: str = ""  # a variant of its kind: a value of `Kind.versions`
    pbs_tmrsh: str = ""
    """The program that starts Hydra's proxies on a PBS job's other nodes; empty for its own way."""


class FittedHosts(NamedTuple):
    """The hosts as a launcher takes them."""

    arrangement: Arrangement  # with hosts in the launcher's own names
    nodelist: str = ""  # for srun, if the hosts are not all of the job's
    by_rank: bool = False  # whether srun reads the host of each rank from the hostfile


class FittedFlags(NamedTuple):
    """A machine's flags, fitted to a launch."""

    words: Words
    source: str = ""  # why one differs from the machine's file; empty if none does
    cores: int = 0  # the cores that they bind each rank to; 0 if they bind to none
    depth: int = 0  # cores for each rank if they bind in order without a number; else 0


class Kind:
    """One kind of launcher, with defaults for all that its file does not set."""

    name: str
    program = "mpiexec"  # its command
    versions: Env = {}  # a part of the output of `mpiexec --version` -> flavour
    folder = ""  # the folder by which an mpiexec is recognised instead
    needs_job = False  # whether it starts ranks in a scheduler's job only
    sets_world_size = True  # whether its ranks always have the variable of their number
    separator = ""  # a word that it would take for the start of another program
    accepts_core_list = False  # whether it takes a list of cores for each rank
    binding_prefixes: Words = ()  # beginnings of its flags that bind
    rank_prefixes: Words = ()
    """Beginnings of more variables that it sets for its ranks: an inner MPI would join it."""
    setting_prefixes: Words = ()
    """Beginnings of those of these that the user or the site sets: as true inside."""
    incompatible_mpis: Words = ()  # libraries that cannot be used under it

    @property
    def family(self) -> Family:
        """The variables of a rank's identity: a row of ezpz_topo's table."""
        for family in FAMILIES:
            if family.launcher == self.name:
                return family
        raise LookupError(f"FAMILIES of ezpz_topo has no row for the launcher {self.name}")

    @property
    def is_mpiexec(self) -> bool:
        return bool(self.versions or self.folder)

    def build_argv(self, plan: LaunchPlan) -> list[str]:
        """Build the command line that starts a plan's ranks."""
        raise NotImplementedError

    def build_hostfile(self, placement: Placement) -> list[str]:
        """Build the lines of the hostfile that it reads."""
        return list(placement.hosts)

    def build_trial_flags(self, launcher: Launcher) -> list[str]:
        """Build the words after ``mpiexec -n 2`` that start two ranks here, for the doctor."""
        raise NotImplementedError

    def fit_hosts(self, topology: Topology, arrangement: Arrangement) -> FittedHosts:
        """Translate the hosts into its own names, or refuse them."""
        return FittedHosts(arrangement)

    def fit_flags(
        self, flags: Words, machine: Machine, arrangement: Arrangement, env: Env, *, unbound: bool
    ) -> FittedFlags:
        """Fit the machine's flags to the number of ranks of a host."""
        return FittedFlags(flags)

    def prepare_remote_start(self, launcher: Launcher, env: Env, launcher_args: Words) -> Launcher:
        """Return the launcher, completed by what it needs to start ranks on other hosts."""
        return launcher

    def build_environment(
        self, launcher: Launcher, *, on_this_host: bool
    ) -> dict[str, tuple[str, str]]:
        """Build variables that it needs: for each its value and the reason."""
        return {}

    def list_exported(self, machine: Machine, environment: Env, user_env: Env) -> Words:
        """List the variables to name to it, if it exports none by itself."""
        return ()

    def list_misleading(self, user_env: Env) -> Words:
        """List the user's variables that would override the plan."""
        return ()

    def build_rank_command(self, plan: LaunchPlan) -> list[str]:
        """Build the words that run the plan's command as one rank."""
        family = self.family
        world_size = "-"
        if self.sets_world_size:
            world_size = family.world_size[0]
        words = ["sh", SHIM, family.name, str(plan.placement.nproc), str(plan.placement.ppn)]
        words += [family.rank[0], world_size, family.local_rank[0]]
        if self.separator and self.separator in plan.command:
            words.append("--escaped")
            for word in plan.command:
                words.append(ESCAPE + word)
        else:
            words.append("--")
            words += plan.command
        return words
