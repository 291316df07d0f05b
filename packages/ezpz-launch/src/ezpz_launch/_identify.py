"""Which launcher starts the ranks: what is installed, what it is, which one is taken."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ezpz_topo import FAMILIES, Machine, Topology, family

from ._errors import CommandNotExecutableError, CommandNotFoundError, LaunchError, UsageError
from ._options import Request
from ._placement import Arrangement, match_hosts

# The user's command: whether it is there, before any rank is started for it.


def require_command(program: str, env: Mapping[str, str]) -> None:
    """Check that the command exists here and can be executed.

    Raises:
        CommandNotFoundError: It is not there.
        CommandNotExecutableError: It cannot be executed.
    """
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


# A launch inside a rank of another: refused, or cut off from the outer one's variables.

_OF_A_LAUNCHER = ("PMI_", "PMIX_", "PMI2_", "HYDI_", "OMPI_", "PRTE_", "PALS_", "MPI_LOCAL")
"""Beginnings of what an outer launcher tells its ranks besides who they are: an inner mpiexec, or
the MPI of its ranks, would join the outer world with it."""

_KEPT = ("PMIX_MCA_", "OMPI_MCA_", "PRTE_MCA_")
"""Settings, of the user or the site, that are as true inside."""


def refuse_nested(topology: Topology) -> None:
    """Refuse to launch in a rank of a launch.

    Raises:
        UsageError: This process is one of several ranks.
    """
    rank = topology.rank
    if rank.world_size > 1:
        raise UsageError(
            f"this process is rank {rank.rank} of {rank.world_size} already "
            f"({rank.sources['rank']}); expected to be started outside of a launch; --nested lets "
            f"every rank launch on its own host; unset {rank.sources['rank']} if it is left over"
        )


def outside_of_launch(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what tells a process that it is a rank."""
    slurm = family("slurm")
    named: set[str] = set()
    for known in FAMILIES:
        if known is not slurm:
            named |= {
                *known.rank,
                *known.world_size,
                *known.local_rank,
                *known.local_world_size,
                *known.node_rank,
                *known.num_nodes,
                *known.proof,
            }
    # The step's own variables tell where the job's cores are; that it has ranks is not said.
    named |= {*slurm.rank, *slurm.local_rank}
    if env.get("EZPZ_LAUNCHER") or env.get("TORCHELASTIC_RUN_ID"):
        # Where the outer ranks meet; of another launcher's rank it is the user's.
        named |= {"MASTER_ADDR", "MASTER_PORT"}
    return {
        name: value
        for name, value in env.items()
        if name not in named and (name.startswith(_KEPT) or not name.startswith(_OF_A_LAUNCHER))
    }


# Which launcher is it: found on PATH, and told apart by asking it, never by its name.

_PALS = "/opt/cray/pals"
"""Where the site's PALS lies; its --version is not among our facts."""

MPIEXEC_KINDS = ("pals", "hydra", "openmpi")

_MARKS = (
    # Intel MPI's own (developer reference; not run) has Hydra's flags, but not all of MPICH's.
    ("Intel(R) MPI", "hydra", "intel"),
    # MPICH's, and MVAPICH's.
    ("HYDRA", "hydra", ""),
    ("Open MPI", "openmpi", ""),
    ("OpenRTE", "openmpi", ""),
)
"""What ``--version`` says, the kind, the flavour."""


class Launcher(NamedTuple):
    """One launcher: where it is, whose it is, and by what that is known.

    Attributes:
        path: Its executable.
        kind: ``"pals"``, ``"hydra"``, ``"openmpi"``, ``"srun"``, ``"torchrun"`` or ``"spawn"``.
        source: By what it was found and recognised.
        notes: What people should know, such as another one that it shadows.
        flavour: ``"intel"`` for Intel MPI's Hydra, whose flags differ; ``"tm"`` for one that knows
            PBS's own interface for tasks; else empty.
        pbs_tmrsh: What starts Hydra's proxies on a PBS job's other nodes; empty for its own way.
    """

    path: str
    kind: str
    source: str
    notes: tuple[str, ...] = ()
    flavour: str = ""
    pbs_tmrsh: str = ""

    def is_of(self, launcher: str) -> bool:
        """Whether it is the one that a machine's file names (``"mpiexec"``: any MPI's)."""
        return self.kind == launcher or (launcher == "mpiexec" and self.kind in MPIEXEC_KINDS)


def find_mpiexec(
    env: Mapping[str, str],
    *,
    beside: str = "",
    name: str = "mpiexec",
    meanwhile: Callable[[], None] | None = None,
) -> Launcher:
    """Find an MPI's launcher on PATH, else beside this Python, and identify it.

    One that belongs to no MPI that we know (PBS has an mpiexec of its own) is passed over where
    one that does follows.

    Args:
        env: The environment whose PATH is searched.
        beside: Directory of this environment's commands, for a venv that is not activated.
        name: ``"mpiexec"`` or ``"mpirun"``.
        meanwhile: Called while it is asked whose it is, if it is asked.

    Raises:
        CommandNotFoundError: There is none.
        LaunchError: It is one that this version does not know.
    """
    directories = [d for d in (*env.get("PATH", "").split(os.pathsep), beside) if d]
    here = dict.fromkeys(os.path.join(directory, name) for directory in directories)
    found = [path for path in here if _is_executable(path)]
    if not found:
        raise CommandNotFoundError(
            f"no {name} on PATH or in this environment; expected an MPI; "
            "load the site's MPI module, or: pip install mpich"
        )
    chosen = _first_of_an_mpi(found, meanwhile)
    shadowed = next((path for path in found[1:] if path.startswith(_PALS)), None)
    if shadowed is None or chosen.kind == "pals":
        return chosen
    note = (
        f"{chosen.path} comes before the site's {shadowed} on PATH: it may not reach the other "
        "nodes; deactivate the environment that brings it, or load the site's module after it"
    )
    return chosen._replace(notes=(*chosen.notes, note))


def _first_of_an_mpi(found: Sequence[str], meanwhile: Callable[[], None] | None) -> Launcher:
    wrong: list[LaunchError] = []
    for path in found:
        try:
            chosen = identify(path, meanwhile)
        except LaunchError as error:
            wrong.append(error)
            continue
        passed = f"; passed over {', '.join(found[: len(wrong)])}: no MPI's" if wrong else ""
        return chosen._replace(source=chosen.source + passed)
    raise wrong[0]


def find_command(name: str, kind: str, env: Mapping[str, str], *, beside: str = "") -> Launcher:
    """Find a launcher that goes by one name only (srun, torchrun).

    Raises:
        CommandNotFoundError: It is not there.
    """
    for directory in (*env.get("PATH", "").split(os.pathsep), beside):
        path = os.path.join(directory, name)
        if directory and _is_executable(path):
            return Launcher(path, kind, f"{name} on PATH")
    raise CommandNotFoundError(
        f"no {name} on PATH; expected it here; load the site's module, or choose another --launcher"
    )


def identify(path: str, meanwhile: Callable[[], None] | None = None) -> Launcher:
    """Ask an mpiexec whose it is: by where it lies, then by ``--version``.

    Args:
        path: Its executable.
        meanwhile: Called until it answers, if it is asked.

    Raises:
        LaunchError: It answers like none that we know, or not at all.
    """
    if os.path.realpath(path).startswith(_PALS):
        return Launcher(path, "pals", f"it lies under {_PALS}")
    try:
        answer = _ask(path, meanwhile)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} --version failed ({error}); expected an mpiexec") from error
    for mark, kind, flavour in _MARKS:
        if mark in answer:
            launchers = answer.partition("Launchers available:")[2].partition("\n")[0].split()
            found = Launcher(path, kind, f"--version says {mark}", flavour=flavour)
            return found._replace(flavour="tm") if "pbs" in launchers else found
    first = answer.strip().partition("\n")[0][:80]
    raise LaunchError(
        f"{path} --version says {first!r}; expected MPICH's Hydra, Intel MPI, Open MPI or PALS; "
        "put one of them first on PATH (pip install mpich), or choose --launcher spawn"
    )


def _ask(path: str, meanwhile: Callable[[], None] | None) -> str:
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(
        [path, "--version"], stdin=null, stdout=pipe, stderr=null, text=True, errors="replace"
    ) as process:
        try:
            if meanwhile is not None:
                meanwhile()
            return process.communicate(timeout=20)[0]
        except BaseException:  # also at Ctrl-C: it is not waited for by who leaves; raised again
            process.kill()
            raise


def _is_executable(path: str) -> bool:
    return os.access(path, os.X_OK) and not os.path.isdir(path)


# Which launcher to use: the user's word, else the machine's, else what is here.

_REACHES = ("launcher", "launcher-exec", "bootstrap", "bootstrap-exec", "rmk")
"""Hydra's options about how it reaches other hosts."""

_HYDRA_REACHES = tuple(f"HYDRA_{name.upper().replace('-', '_')}" for name in _REACHES)
"""The same as variables."""

_NO_MPI = (
    "no mpiexec here: the ranks are started as plain processes, and a program that uses MPI itself "
    "would be a world of one in each; for such a one load the site's MPI, or: pip install mpich"
)


def choose_launcher(
    topology: Topology,
    request: Request,
    env: Mapping[str, str],
    *,
    beside: str,
    arrangement: Arrangement,
    meanwhile: Callable[[], None] | None = None,
) -> Launcher:
    """Find the launcher and identify it.

    Args:
        topology: Where we are.
        request: What the user asked for.
        env: The environment whose PATH is searched.
        beside: Directory of this environment's commands, for a venv that is not activated.
        arrangement: Which hosts get ranks.
        meanwhile: Called while an mpiexec is asked whose it is, if one is.

    Raises:
        LaunchError: It is not here, or is another one than was asked for.
    """
    found = _chosen(
        topology, request, env, beside=beside, arrangement=arrangement, meanwhile=meanwhile
    )
    names, job = arrangement.placement.hosts, topology.allocation.hosts
    if arrangement.on_this_host or match_hosts(names, job)[1]:
        return found
    return through_pbs(found, env, request.launcher_args)


def through_pbs(
    launcher: Launcher, env: Mapping[str, str], launcher_args: Sequence[str] = ()
) -> Launcher:
    """Return MPICH's Hydra with what starts its proxies on the other nodes of a PBS job.

    Its own way is ssh, which many sites do not have between nodes. What the user says to Hydra
    comes first.

    Raises:
        LaunchError: Nothing here reaches the other nodes.
    """
    is_told = any(env.get(name) for name in _HYDRA_REACHES) or any(
        word.lstrip("-") in _REACHES for word in launcher_args
    )
    if launcher.kind != "hydra" or launcher.flavour or is_told or not env.get("PBS_JOBID"):
        return launcher
    from ezpz_topo import get_pbs_folder  # noqa: PLC0415  # only a job of PBS needs it

    folders = [env.get("PATH", ""), get_pbs_folder(env), env.get("PBS_O_PATH", "")]
    path = {**env, "PATH": os.pathsep.join(folders)}
    for name, found in (("pbs_tmrsh", path), ("ssh", env)):
        with suppress(CommandNotFoundError):
            program = find_command(name, name, found).path
            source = f"{launcher.source}; other nodes by {program}"
            pbs_tmrsh = program if name == "pbs_tmrsh" else ""
            return launcher._replace(source=source, pbs_tmrsh=pbs_tmrsh)
    raise LaunchError(
        f"{launcher.path} starts nothing on the job's other nodes: neither pbs_tmrsh nor ssh is "
        "here; expected one of them on PATH; add the folder of PBS's commands to PATH, or load "
        "the site's own MPI"
    )


def _chosen(
    topology: Topology,
    request: Request,
    env: Mapping[str, str],
    *,
    beside: str,
    arrangement: Arrangement,
    meanwhile: Callable[[], None] | None,
) -> Launcher:
    asked = request.launcher
    if asked == "auto":
        return _auto(topology, env, beside, here=arrangement.on_this_host, meanwhile=meanwhile)
    if asked == "spawn":
        return _spawn("--launcher spawn")
    if asked in ("srun", "torchrun"):
        return find_command(asked, asked, env, beside=beside)
    found = find_mpiexec(env, beside=beside, meanwhile=meanwhile)
    if asked in MPIEXEC_KINDS and found.kind != asked:
        raise LaunchError(
            f"--launcher {asked}: {found.path} is {found.kind} ({found.source}); expected {asked} "
            "first on PATH; load its module"
        )
    return found


def imagine_launcher(topology: Topology, request: Request) -> Launcher:
    """Return the launcher that a machine's file names, without looking for it."""
    kind = topology.machine.launcher if request.launcher == "auto" else request.launcher
    source = f"{topology.machine.name}.toml, not looked for"
    if request.launcher != "auto":
        source = f"--launcher {request.launcher}, not looked for"
    if kind == "spawn":
        return _spawn(source)
    if kind == "mpiexec":
        # The site's own, where the file tells whose it is.
        named = topology.machine.launcher
        kind = named if named in MPIEXEC_KINDS else "hydra"
    program = {"openmpi": "mpirun", "srun": "srun", "torchrun": "torchrun"}.get(kind, "mpiexec")
    return Launcher(program, kind, source)


def _auto(
    topology: Topology,
    env: Mapping[str, str],
    beside: str,
    *,
    here: bool,
    meanwhile: Callable[[], None] | None,
) -> Launcher:
    machine, in_slurm = topology.machine, topology.allocation.scheduler == "slurm"
    if in_slurm and not here:
        return find_command("srun", "srun", env, beside=beside)
    if in_slurm and machine.launcher == "srun" and machine.devices_per_node:
        # A named machine's flags and bind lists are srun's.
        found = _srun_if_here(env, beside)
        if found:
            return found
    if machine.launcher == "spawn":
        return _spawn(f"{machine.name}.toml")
    if machine.launcher == "torchrun":
        return find_command("torchrun", "torchrun", env, beside=beside)
    name = "mpirun" if machine.launcher == "openmpi" else "mpiexec"
    try:
        return find_mpiexec(env, beside=beside, name=name, meanwhile=meanwhile)
    except CommandNotFoundError:
        if not here:
            raise
    # srun gives programs that use MPI their world; plain processes cannot.
    found = _srun_if_here(env, beside) if in_slurm else None
    return found or _spawn(f"no {name} on PATH or in this environment", _NO_MPI)


def _srun_if_here(env: Mapping[str, str], beside: str) -> Launcher | None:
    try:
        return find_command("srun", "srun", env, beside=beside)
    except CommandNotFoundError:
        return None


def _spawn(source: str, *notes: str) -> Launcher:
    return Launcher(sys.executable, "spawn", source, notes)


# The machine's options that the user selected by name (``[options.NAME]`` of its file).

BACKEND = "TORCH_BACKEND"
"""Where ezpz_device reads which backend to use."""


class Chosen(NamedTuple):
    """What the selected options bring, together.

    Attributes:
        names: Their names, in the order asked for, each once.
        flags: For the machine's launcher.
        environment: For the ranks.
        sources: For each variable, the option that brings it.
        cpu_bind: A bind list's name, or ``"none"`` where the flags bind; ``""`` for any.
        cpu_bind_option: The option that brings it.
        notes: What people should know.
    """

    names: tuple[str, ...]
    flags: tuple[str, ...]
    environment: Mapping[str, str]
    sources: Mapping[str, str]
    cpu_bind: str
    cpu_bind_option: str
    notes: tuple[str, ...]


def choose_options(machine: Machine, names: Sequence[str], launcher: Launcher) -> Chosen:
    """Return what these options of the machine bring, together.

    Raises:
        UsageError: The machine has no such option, two of them contradict each other, or its
            flags are for another launcher.
    """
    flags: list[str] = []
    environment: dict[str, str] = {}
    sources: dict[str, str] = {}
    bind, binder = "", ""
    notes: list[str] = []
    for name in dict.fromkeys(names):
        if name not in machine.options:
            known = ", ".join(machine.options) or "none"
            raise UsageError(
                f"--option {name}: {machine.name} has no such option; expected one of its own: "
                f"{known}"
            )
        option = machine.options[name]
        if option.flags and launcher.kind != machine.launcher:
            raise UsageError(
                f"--option {name}: its flags ({' '.join(option.flags)}) are for "
                f"{machine.launcher}, and the launcher is {launcher.kind}; expected "
                f"--launcher {machine.launcher}, or no --option {name}"
            )
        if option.cpu_bind and bind and option.cpu_bind != bind:
            raise UsageError(
                f"--option {name} binds by {option.cpu_bind}, --option {binder} by {bind}; "
                "expected one of them"
            )
        if option.cpu_bind:
            bind, binder = option.cpu_bind, name
        flags += option.flags
        added = {**option.environment, **({BACKEND: option.backend} if option.backend else {})}
        for variable, value in added.items():
            if environment.get(variable, value) != value:
                other = sources[variable].removeprefix("--option ")
                raise UsageError(
                    f"--option {name} sets {variable}={value}, --option {other} "
                    f"{environment[variable]}; expected one of them"
                )
            environment[variable], sources[variable] = value, f"--option {name}"
        if option.modules:
            notes.append(
                f"--option {name}: load its modules before the launch, in place of the machine's: "
                f"module load {' '.join(option.modules)}"
            )
    return Chosen(
        tuple(dict.fromkeys(names)), tuple(flags), environment, sources, bind, binder, tuple(notes)
    )
