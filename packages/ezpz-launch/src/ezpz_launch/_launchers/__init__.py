"""What ezpz-launch knows of launchers: each kind is a file of this folder, and no other place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from ezpz_launch._errors import CommandNotFoundError
from ezpz_launch._options import KINDS
from ezpz_topo import FAMILIES, Family

if TYPE_CHECKING:
    from ezpz_launch._placement import Arrangement, Placement
    from ezpz_launch._plan import LaunchPlan
    from ezpz_topo import Machine, Topology

Words = tuple[str, ...]
Env = Mapping[str, str]

PROGRAMS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""The folder of the programs that run beside the ranks."""

SHIM = os.path.join(PROGRAMS, "rank_shim.sh")
"""What every rank starts with."""

_ESCAPE = "+"
"""Put before every word of a command that holds a launcher's own separator."""


class Launcher(NamedTuple):
    """One launcher: where it is, whose it is, and by what that is known."""

    path: str  # its executable
    kind: str  # a name of `LAUNCHERS`
    source: str  # by what it was found and recognised
    notes: Words = ()  # what people should know, such as another one that it shadows
    flavour: str = ""  # a variant of its kind, as `Kind.versions` has it
    pbs_tmrsh: str = ""
    """What starts Hydra's proxies on a PBS job's other nodes; empty for its own way."""

    def is_of(self, launcher: str) -> bool:
        """Whether it is the one that a machine's file names (``"mpiexec"``: any MPI's)."""
        kind = LAUNCHERS[self.kind]
        return self.kind == launcher or (launcher == "mpiexec" and kind.is_mpiexec)


class Flags(NamedTuple):
    """A machine's flags, fitted to a launch."""

    words: Words
    source: str = ""  # why one is not the file's own; empty where all are
    cores: int = 0  # the cores that they bind each rank to; 0 where they bind to none
    depth: int = 0  # cores for each rank where they bind in order and do not say how many; else 0


class Kind:
    """One kind of launcher: what its file does not say is as it is here."""

    name: str
    tells_size = True  # whether these always have the number of ranks
    program = "mpiexec"  # its command
    versions: Env = {}  # what `mpiexec --version` says -> flavour
    folder = ""  # where an mpiexec lies that is known by that
    separator = ""  # a word that it would take for the start of another program
    takes_cores = False  # whether it binds each rank to cores of its own by a list
    binding_words: Words = ()  # beginnings of its flags that bind
    tells: Words = ()
    """Beginnings of what it tells its ranks besides who they are: an inner MPI would join it."""
    settings: Words = ()
    """Beginnings of those of these that the user or the site sets: as true inside."""
    needs_job = False  # whether it starts ranks in a scheduler's job only
    other_mpis: Words = ()  # libraries whose ranks it cannot start

    @property
    def family(self) -> Family:
        """The variables by which it tells a rank who it is: a row of ezpz_topo's table."""
        return next(each for each in FAMILIES if each.launcher == self.name)

    @property
    def is_mpiexec(self) -> bool:
        return bool(self.versions or self.folder)

    def argv(self, plan: LaunchPlan) -> list[str]:
        """Return the command line that starts a plan's ranks."""
        raise NotImplementedError

    def hostfile(self, placement: Placement) -> list[str]:
        """Return the lines of the hostfile that it reads."""
        return list(placement.hosts)

    def two_ranks(self, launcher: Launcher) -> list[str]:
        """Return the words after ``mpiexec -n 2`` that start two ranks here, for the doctor."""
        raise NotImplementedError

    def fit_hosts(
        self, topology: Topology, arrangement: Arrangement
    ) -> tuple[Arrangement, str, bool]:
        """Return the hosts in its own names, its nodelist, and whether by rank."""
        return arrangement, "", False

    def fit_flags(
        self, flags: Words, machine: Machine, arrangement: Arrangement, env: Env, *, unbound: bool
    ) -> Flags:
        """Return the machine's flags, fitted to the ranks of a host."""
        return Flags(flags)

    def reach(self, launcher: Launcher, env: Env, launcher_args: Words) -> Launcher:
        """Return the launcher with what it needs to reach the other hosts of a job."""
        return launcher

    def environment(self, launcher: Launcher, *, here: bool) -> dict[str, tuple[str, str]]:
        """Return variables for its own sake, and for each why."""
        return {}

    def exported(self, machine: Machine, environment: Env, user_env: Env) -> Words:
        """Return the variables to name to it, where it exports none by itself."""
        return ()

    def removed(self, user_env: Env) -> Words:
        """Return the user's variables that would lead it astray."""
        return ()

    def shim(self, plan: LaunchPlan) -> list[str]:
        """Return the words that run the plan's command as one rank."""
        names = self.family
        size = names.world_size[0] if self.tells_size else "-"
        words = ["sh", SHIM, names.name, str(plan.placement.nproc), str(plan.placement.ppn)]
        words += [names.rank[0], size, names.local_rank[0]]
        if self.separator and self.separator in plan.command:
            return [*words, "--escaped", *(_ESCAPE + word for word in plan.command)]
        return [*words, "--", *plan.command]


def find_command(name: str, kind: str, env: Env, *, beside: str = "") -> Launcher:
    """Find a program that goes by one name only, on PATH or ``beside`` this Python."""
    for directory in (*env.get("PATH", "").split(os.pathsep), beside):
        path = os.path.join(directory, name)
        if directory and is_executable(path):
            return Launcher(path, kind, f"{name} on PATH")
    raise CommandNotFoundError(
        f"no {name} on PATH; expected it here; load the site's module, or choose another --launcher"
    )


def is_executable(path: str) -> bool:
    return os.access(path, os.X_OK) and not os.path.isdir(path)


def argv(plan: LaunchPlan) -> list[str]:
    return LAUNCHERS[plan.launcher.kind].argv(plan)


def hostfile_of(plan: LaunchPlan) -> list[str]:
    return LAUNCHERS[plan.launcher.kind].hostfile(plan.placement)


def needs_hostfile(plan: LaunchPlan) -> bool:
    """Whether the plan's launcher reads a hostfile, or wants a folder in its place (torchrun)."""
    words = argv(plan)
    ours = words[: len(words) - len(plan.command)]
    return any(plan.hostfile in (word, word.partition("=")[2]) for word in ours)


LAUNCHERS: dict[str, Kind] = {name: import_module(f".{name}", __name__).KIND for name in KINDS}
