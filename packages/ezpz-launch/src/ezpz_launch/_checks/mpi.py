"""The check ``mpi``: the library that mpi4py loads belongs to the mpiexec that starts the ranks.

Where it does not, nothing fails: each of n ranks is rank 0 of a world of one, and trains alone.
Run on MPICH and Open MPI; PALS's part is not run on hardware.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence

from ezpz_launch._errors import CommandNotFoundError, LaunchError
from ezpz_launch._planning.choose import through_pbs
from ezpz_launch._planning.identify import Launcher, find_command, find_mpiexec
from ezpz_launch._planning.launchers import hydra, openmpi
from ezpz_launch._planning.nested import outside_of_launch
from ezpz_topo import CheckResult, TopoError, get_allocation

from .command import Ended, run

_NO_MPI4PY, _NO_LIBRARY = 81, 82
_BEGUN = "-->"
"""A rank's first line: without a letter, it is nobody's last words."""

# One write a rank, so that two lines do not mix.
_PROGRAM = f"""\
import sys
sys.stdout.write("{_BEGUN}\\n")
sys.stdout.flush()
try:
    import mpi4py
except ImportError:
    sys.exit({_NO_MPI4PY})
mpi4py.rc.initialize = False
try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    print(str(error).partition("\\n")[0], file=sys.stderr)
    sys.exit({_NO_LIBRARY})
version = MPI.Get_library_version().splitlines()[0].replace(chr(0), "")
sys.stdout.write("ezpz-library " + " ".join(version.split()) + "\\n")
sys.stdout.flush()
MPI.Init_thread()
world = MPI.COMM_WORLD
total = world.allreduce(world.rank + 1)
sys.stdout.write(f"ezpz-mpi {{world.rank}} {{world.size}} {{total}}\\n")
sys.stdout.flush()
MPI.Finalize()
"""

_SAID = re.compile(r"ezpz-mpi ([0-9]+) ([0-9]+) ([0-9]+)")
_LIBRARY = re.compile(r"ezpz-library (.*)")
_OTHERS = {"hydra": ("Open MPI",), "pals": ("Open MPI",), "openmpi": ("MPICH", "MVAPICH", "Intel")}
"""Kind of launcher to the libraries that are of another MPI."""

_PATIENCE = 45.0
"""Seconds after which an import that is not done is an error; ``--timeout=60`` gives more."""

_RANKS = 2
_NO_OUTPUT = 141
"""Hydra's exit status, without any output, once in 200 starts of ranks that end at once."""


def check(seconds: float, env: Mapping[str, str] | None = None) -> CheckResult:
    """Start two ranks of mpi4py by the mpiexec that ezpz-launch would use.

    Args:
        seconds: How long it may take.
        env: The environment to read, and the ranks'; default ``os.environ``.
    """
    env = outside_of_launch(os.environ if env is None else env)
    beside = os.path.dirname(sys.executable)
    try:
        launcher = find_mpiexec(env, beside=beside)
    except CommandNotFoundError as error:
        return _without_mpiexec(error, env, beside, seconds)
    except LaunchError as error:
        return CheckResult.of(error)
    nodes = len(_nodes(env))
    try:
        # What a launch on all nodes of the job would do.
        reached = through_pbs(launcher, env) if nodes > 1 else launcher
    except LaunchError as error:
        return CheckResult.of(error)
    if launcher.kind == "pals" and not nodes:
        # PALS starts ranks on the nodes of a job only.
        alone = _try([], env, seconds)
        return _importing(alone, seconds) or _alone(launcher, alone)
    ended = _try(_words(launcher), env, seconds)
    if ended.status == _NO_OUTPUT and not ended.stdout:
        ended = _try(_words(launcher), env, seconds)
    return _judged(launcher, ended, seconds, reached.source.removeprefix(launcher.source))


def _words(launcher: Launcher) -> list[str]:
    start = [launcher.path, "-n", str(_RANKS)]
    if launcher.kind == "hydra":
        return [*start, *hydra.on_this_host(launcher)]
    if launcher.kind == "openmpi":
        return [*start, *openmpi.anywhere(as_root=os.geteuid() == 0)]
    return [*start, "--ppn", str(_RANKS), "--envall"]


def _try(words: Sequence[str], env: Mapping[str, str], seconds: float) -> Ended:
    return run([*words, sys.executable, "-P", "-c", _PROGRAM], env, 0.8 * seconds)


def _nodes(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes of the job that we are on one of."""
    try:
        job = get_allocation(env, ask=False)
    except TopoError:
        return ()  # the check "scheduler" says so
    return job.hosts if job.scheduler != "none" and job.on_node else ()


def _judged(launcher: Launcher, ended: Ended, seconds: float, reach: str) -> CheckResult:
    whose = f"{launcher.path} ({launcher.kind})"
    facts = {"mpiexec": launcher.path, "kind": launcher.kind}
    if failed := _without_mpi4py(ended):
        return failed
    if late := _importing(ended, seconds):
        return late
    if ended.status is None:
        return CheckResult.error(
            f"two ranks of mpi4py by {whose} did not end in {0.8 * seconds:.1f} s",
            f"run it by hand: {launcher.path} -n 2 {sys.executable} -m mpi4py.bench helloworld",
            **facts,
        )
    library = _library(ended)
    facts["library"] = library
    worlds = sorted(tuple(map(int, match.groups())) for match in _SAID.finditer(ended.stdout))
    if worlds == [(0, _RANKS, 3), (1, _RANKS, 3)] and not ended.status:
        return _well(launcher, library, facts, reach)
    if worlds and worlds[0][1] == 1:
        seen = f"each of two is rank 0 of a world of 1, and exit status {ended.status}"
    else:
        seen = f"they end with {ended.status}: {ended.last_words}"
    if worlds or any(name in library for name in _OTHERS[launcher.kind]):
        return CheckResult.error(
            f"mpi4py loads {library}, and {whose} starts ranks of another MPI: {seen}",
            "put the mpiexec of that library first on PATH, or reinstall mpi4py for this one: "
            "pip install --no-cache-dir --no-binary=mpi4py --force-reinstall mpi4py",
            **facts,
        )
    return CheckResult.error(
        f"two ranks of {library} by {whose} fail: {seen}",
        f"run it by hand: {launcher.path} -n 2 {sys.executable} -m mpi4py.bench helloworld",
        **facts,
    )


def _library(ended: Ended) -> str:
    match = _LIBRARY.search(ended.stdout)
    return match[1] if match else "an unknown library"


def _well(launcher: Launcher, library: str, facts: dict[str, str], reach: str) -> CheckResult:
    if launcher.notes:
        note, _, remedy = launcher.notes[-1].rpartition("; ")
        return CheckResult.warning(note, remedy, **facts)
    message = f"two ranks of {library} by {launcher.path} ({launcher.kind}){reach}"
    return CheckResult.ok(message, **facts)


def _without_mpi4py(ended: Ended) -> CheckResult | None:
    if ended.status == _NO_MPI4PY:
        return CheckResult.ok("mpi4py is not installed: no rank of this environment needs MPI")
    if ended.status == _NO_LIBRARY:
        return CheckResult.error(
            f"mpi4py cannot load an MPI library: {ended.last_words}",
            "load the site's MPI module, or: pip install mpich",
        )
    return None


def _importing(ended: Ended, seconds: float) -> CheckResult | None:
    """Return that the ranks run and are not through with their imports: a slow file system."""
    is_loaded = _LIBRARY.search(ended.stdout) is not None
    if ended.status is not None or is_loaded or _BEGUN not in ended.stdout:
        return None
    message = f"not done in {0.8 * seconds:.1f} s: still importing mpi4py and its MPI library"
    if seconds < _PATIENCE:
        remedy = "ask again with more time: ezpz doctor --timeout=60 --only=mpi"
        return CheckResult.warning(message, remedy)
    return CheckResult.error(
        message, f"see what takes so long: {sys.executable} -X importtime -c 'import mpi4py.MPI'"
    )


def _without_mpiexec(
    error: Exception, env: Mapping[str, str], beside: str, seconds: float
) -> CheckResult:
    alone = _try([], env, seconds)
    if alone.status == _NO_LIBRARY:
        # pip brings mpi4py without an MPI: a workstation needs none.
        if not _nodes(env):
            return CheckResult.ok(
                "no MPI here, and ezpz-launch needs none: it starts plain processes", mpiexec=None
            )
        return CheckResult.of(error, "warning")
    if failed := _without_mpi4py(alone):
        return failed
    try:
        srun = find_command("srun", "srun", env, beside=beside)
    except CommandNotFoundError:
        return CheckResult.of(error, "warning")
    return CheckResult.ok(f"no mpiexec; {srun.path} starts the ranks", srun=srun.path)


def _alone(launcher: Launcher, ended: Ended) -> CheckResult:
    """Judge by names alone: PALS goes with the MPICH of its vendor."""
    if failed := _without_mpi4py(ended):
        return failed
    version = _library(ended)
    facts = {"mpiexec": launcher.path, "kind": launcher.kind, "library": version}
    if any(name in version for name in _OTHERS["pals"]):
        return CheckResult.error(
            f"mpi4py loads {version}, and {launcher.path} is PALS, which starts ranks of MPICH",
            "load the modules of the site's MPICH and of an mpi4py for it",
            **facts,
        )
    return CheckResult.ok(f"{version} and PALS; ranks are tried inside a job only", **facts)
