"""What ezpz-launch knows of launchers: each kind is a file of this folder, and no other place.

And which of them starts the ranks: what is installed, what it is, which one is taken.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from ezpz_launch._errors import (
    CommandNotExecutableError,
    CommandNotFoundError,
    LaunchError,
    UsageError,
)
from ezpz_launch._plan.options import KINDS, PYTHON, Request
from ezpz_launch._plan.placement import Arrangement, Placement, match_hosts
from ezpz_topo import FAMILIES, Family, Machine, Topology, family

if TYPE_CHECKING:
    from ezpz_launch._plan.plan import LaunchPlan

Words = tuple[str, ...]
Env = Mapping[str, str]

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAMS = os.path.join(PACKAGE, "_run")  # the folder of the programs that run beside the ranks

SHIM = os.path.join(PROGRAMS, "rank_shim.sh")  # what every rank starts with
_ESCAPE = "+"  # put before every word of a command that holds a launcher's own separator


class Launcher(NamedTuple):
    """One launcher: where it is, whose it is, and by what that is known."""

    path: str  # its executable
    kind: str  # a name of `LAUNCHERS`
    source: str  # by what it was found and recognised
    notes: Words = ()  # what people should know, such as another one that it shadows
    flavour: str = ""  # a variant of its kind, as `Kind.versions` has it
    pbs_tmrsh: str = ""
    """What starts Hydra's proxies on a PBS job's other nodes; empty for its own way."""


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


# The ranks' environment: the shim is a sh, which does not pass every variable on.

_SET_BY_SH = (
    "BASHOPTS", "IFS", "LINENO", "OPTERR", "OPTIND", "PPID", "PS1", "PS2", "PS4", "SHELLOPTS",
)  # fmt: skip
"""Variables that dash 0.5.12, or bash 5.2 as sh, sets or drops whatever its environment has."""


def is_sh_name(name: str) -> bool:
    """Return whether sh can hold a variable of this name; dash drops all others."""
    return re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) is not None


def pack_env(env: Env) -> dict[str, str]:
    """Return variables from which `rank_shim.sh` restores those that sh does not pass on."""
    names = [name for name in sorted(env) if name and (not is_sh_name(name) or name in _SET_BY_SH)]
    # One for each: Linux takes no more than 128 KiB in one.
    return {f"EZPZ_CONTROL_{n}": f"{name}={env[name]}" for n, name in enumerate(names, 1)}


def beside_python(env: Env) -> dict[str, str]:
    """Return the environment with this Python's folder at the end of PATH: it may not be active."""
    return {**env, "PATH": os.pathsep.join([env.get("PATH", ""), os.path.dirname(sys.executable)])}


def find_command(name: str, kind: str, env: Env) -> Launcher:
    """Find a program that goes by one name only."""
    if found := _on_path(name, env):
        return Launcher(found[0], kind, f"{name} on PATH")
    raise CommandNotFoundError(
        f"no {name} on PATH; expected it here; load the site's module, or choose another --launcher"
    )


def _on_path(name: str, env: Env) -> list[str]:
    folders = filter(None, env.get("PATH", "").split(os.pathsep))
    paths = dict.fromkeys(os.path.join(folder, name) for folder in folders)
    return [path for path in paths if os.access(path, os.X_OK) and not os.path.isdir(path)]


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


# Which launcher to use: the user's word, else the machine's, else what is here.

_NO_MPI = (
    "no mpiexec here: the ranks are started as plain processes, and a program that uses MPI itself "
    "would be a world of one in each; for such a one load the site's MPI, or: pip install mpich"
)


def choose_launcher(
    arrangement: Arrangement, *, topology: Topology, request: Request, env: Env
) -> Launcher:
    here, asked = arrangement.on_this_host, request.launcher
    if asked == "auto":
        found = _auto(topology, env, here=here)
    elif asked == "mpiexec" or LAUNCHERS[asked].is_mpiexec:
        found = find_mpiexec(env)
        if asked not in ("mpiexec", found.kind):
            raise LaunchError(
                f"--launcher {asked}: {found.path} is {found.kind} ({found.source}); expected "
                f"{asked} first on PATH; load its module"
            )
    else:
        found = _by_name(asked, f"--launcher {asked}", env)
    if here or match_hosts(arrangement.placement.hosts, topology.allocation.hosts)[1]:
        return found
    return LAUNCHERS[found.kind].reach(found, env, request.launcher_args)


def _auto(topology: Topology, env: Env, *, here: bool) -> Launcher:
    machine, in_slurm = topology.machine, topology.allocation.scheduler == "slurm"
    # A named machine's flags and bind lists are srun's.
    is_named = machine.launcher == "srun" and machine.devices_per_node
    if in_slurm and (is_named or not here):
        try:
            return find_command("srun", "srun", env)
        except CommandNotFoundError:
            if not here:
                raise
    kind = LAUNCHERS.get(machine.launcher)
    if kind and not kind.is_mpiexec and kind.name != "srun":
        return _by_name(kind.name, f"{machine.name}.toml", env)
    name = kind.program if kind and kind.is_mpiexec else "mpiexec"
    try:
        return find_mpiexec(env, name)
    except CommandNotFoundError:
        if not here:
            raise
    if in_slurm:
        # srun gives programs that use MPI their world; plain processes cannot.
        with suppress(CommandNotFoundError):
            return find_command("srun", "srun", env)
    why = f"no {name} on PATH or in this environment"
    return Launcher(sys.executable, "spawn", why, (_NO_MPI,))


def _by_name(kind: str, source: str, env: Env) -> Launcher:
    if kind == "spawn":
        return Launcher(sys.executable, kind, source)
    return find_command(LAUNCHERS[kind].program, kind, env)


def imagine_launcher(topology: Topology, request: Request) -> Launcher:
    """Return the launcher that a machine's file names, without looking for it."""
    machine, asked = topology.machine, request.launcher
    kind = machine.launcher if asked == "auto" else asked
    named = f"{machine.name}.toml" if asked == "auto" else f"--launcher {asked}"
    if kind == "mpiexec":
        # The site's own, where the file tells whose it is.
        own = LAUNCHERS.get(machine.launcher)
        kind = own.name if own and own.is_mpiexec else "hydra"
    program = sys.executable if kind == "spawn" else LAUNCHERS[kind].program
    return Launcher(program, kind, f"{named}, not looked for")


# Whose an mpiexec is: told by asking it, never by its name.


def find_mpiexec(env: Env, name: str = "mpiexec") -> Launcher:
    found = _on_path(name, env)
    if not found:
        raise CommandNotFoundError(
            f"no {name} on PATH or in this environment; expected an MPI; "
            "load the site's MPI module, or: pip install mpich"
        )
    wrong: list[LaunchError] = []
    for path in found:
        try:
            chosen = identify(path)
            break
        except LaunchError as error:
            wrong.append(error)
    else:
        raise wrong[0]
    if wrong:
        passed = f"; passed over {', '.join(found[: len(wrong)])}: no MPI's"
        chosen = chosen._replace(source=chosen.source + passed)
    shadowed = next((path for path in found[1:] if _kind_by_folder(path)), None)
    if shadowed is None or LAUNCHERS[chosen.kind].folder:
        return chosen
    note = (
        f"{chosen.path} comes before the site's {shadowed} on PATH: it may not reach the other "
        "nodes; deactivate the environment that brings it, or load the site's module after it"
    )
    return chosen._replace(notes=(*chosen.notes, note))


def identify(path: str) -> Launcher:
    """Ask an mpiexec whose it is: by where it lies, then by ``--version``."""
    if kind := _kind_by_folder(os.path.realpath(path)):
        return Launcher(path, kind, f"it lies under {LAUNCHERS[kind].folder}")
    try:
        answer = subprocess.run(
            [path, "--version"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, errors="replace", timeout=20, check=False,
        ).stdout  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} --version failed ({error}); expected an mpiexec") from error
    for kind, known in LAUNCHERS.items():
        for mark, flavour in known.versions.items():
            if mark in answer:
                bootstraps = answer.partition("Launchers available:")[2].partition("\n")[0]
                found = Launcher(path, kind, f"--version says {mark}", flavour=flavour)
                return found._replace(flavour="tm") if "pbs" in bootstraps.split() else found
    first = answer.strip().partition("\n")[0][:80]
    raise LaunchError(
        f"{path} --version says {first!r}; expected MPICH's Hydra, Intel MPI, Open MPI or PALS; "
        "put one of them first on PATH (pip install mpich), or choose --launcher spawn"
    )


def _kind_by_folder(path: str) -> str:
    kinds = (name for name, kind in LAUNCHERS.items() if kind.folder)
    return next((name for name in kinds if path.startswith(LAUNCHERS[name].folder)), "")


# A launch inside a rank of another is cut off from the outer one's variables.


def outside_of_launch(env: Env) -> dict[str, str]:
    """Return the environment without what tells a process that it is a rank."""
    slurm, named = family("slurm"), set[str]()
    for known in FAMILIES:
        # A step's own variables tell where the job's cores are; that it has ranks is not said.
        parts = [known.rank, known.local_rank]
        if known is not slurm:
            parts += [known.world_size, known.local_world_size]
            parts += [known.node_rank, known.num_nodes, known.proof]
        named = named.union(*parts)
    if env.get("EZPZ_LAUNCHER") or env.get("TORCHELASTIC_RUN_ID"):
        # Where the outer ranks meet; of another launcher's rank it is the user's.
        named |= {"MASTER_ADDR", "MASTER_PORT"}
    told = tuple(start for kind in LAUNCHERS.values() for start in kind.tells)
    kept = tuple(start for kind in LAUNCHERS.values() for start in kind.settings)
    return {
        name: value
        for name, value in env.items()
        if name not in named and (name.startswith(kept) or not name.startswith(told))
    }


# The user's command: whether it is there, before any rank is started for it.


def require_command(program: str, env: Env) -> None:
    has_directory = os.sep in program
    directories = [""] if has_directory else env.get("PATH", "").split(os.pathsep)
    candidates = [os.path.join(directory, program) for directory in directories]
    found = [path for path in candidates if os.path.isfile(path)]
    if any(os.access(path, os.X_OK) for path in found):
        return
    if found:
        hint = (
            f"ezpz-launch python {program}" if program.endswith(".py") else f"chmod +x {found[0]}"
        )
        raise CommandNotExecutableError(f"{found[0]} is not executable; try: {hint}")
    where, hint = "not found on PATH", ""
    if has_directory:
        where = "no such file"
        if not os.path.isabs(program):
            where += f" in {os.getcwd()}"
            # A job of PBS begins in the home.
            folder = env.get("PBS_O_WORKDIR") or env.get("SLURM_SUBMIT_DIR") or ""
            is_there = folder and os.path.isfile(os.path.join(folder, program))
            hint = (
                f"; try: cd {folder}" if is_there else "; give its path from there, or a whole one"
            )
    elif program.endswith(".py") and os.path.isfile(program):
        hint = f"; try: ezpz-launch python {program}"
    elif os.path.isfile(program):
        hint = f"; try: ezpz-launch ./{program}"
    raise CommandNotFoundError(f"{program!r}: {where}{hint}")


# And whether an interpreter has a program: its standard input, the null device, brings none.

_CODE_FLAGS = {
    **dict.fromkeys(("sh", "bash", "dash", "zsh", "ksh"), "-c"),
    **dict.fromkeys(("perl", "ruby", "julia", "R", "Rscript", "node"), "-e"),
}
"""Interpreters that read their program from standard input, and their flag for code."""

_INPUTS = ("-", "-s", "/dev/stdin")


def require_program(command: Sequence[str]) -> None:
    """Refuse an interpreter that would read its program from standard input."""
    name = os.path.basename(command[0])
    flag = "-c" if PYTHON.fullmatch(name) else _CODE_FLAGS.get(name)
    if flag is None:
        return
    words = list(command[1:])
    if words:
        if words.pop() not in _INPUTS:
            return
        has_program = any(not word.startswith("-") or word.startswith(flag) for word in words)
        if has_program:
            return
    raise UsageError(
        f"{' '.join(command)[:80]!r}: {name} without a program; expected one, such as: "
        f"{name} {flag} CODE, or: {name} FILE; every rank reads {os.devnull}, and nothing of "
        "standard input"
    )
