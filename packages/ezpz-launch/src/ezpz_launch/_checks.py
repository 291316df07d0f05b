"""What `ezpz doctor` checks of launching."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence

from ezpz_launch._errors import CommandNotFoundError, LaunchError
from ezpz_launch._nodes.preflight import Ended, run
from ezpz_launch._plan.choose import find_launcher
from ezpz_launch._plan.environment import strip_launcher_env
from ezpz_launch._plan.executables import env_with_python_on_path
from ezpz_launch._plan.identify import find_mpiexec
from ezpz_launch._plan.kind import Launcher
from ezpz_launch._plan.launchers import LAUNCHERS
from ezpz_launch._run.record import records_folder, why_not_written
from ezpz_topo import CheckResult, TopoError, get_allocation

# The check ``mpi``: the library that mpi4py loads belongs to the mpiexec that starts the ranks.

_NO_MPI4PY, _NO_LIBRARY = 81, 82
_BEGUN = "-->"  # a rank's first line: without a letter, it is no one's last words

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
_PATIENCE = 45.0
"""Seconds after which an import that is not done is an error; ``--timeout=60`` gives more."""

_COLD = 30.0
"""Seconds for the first import of mpi4py, which the doctor counts as one of the check's own."""

_NO_OUTPUT = 141
"""Hydra's exit status, without any output, once in 200 starts of ranks that end at once."""


def check_mpi(seconds: float, env: Mapping[str, str] | None = None) -> CheckResult:
    """Start two ranks of mpi4py by the mpiexec that ezpz-launch would use."""
    env = strip_launcher_env(os.environ if env is None else env)
    try:
        job = get_allocation(env, ask=False)
        nodes = len(job.hosts) if job.scheduler != "none" and job.on_node else 0
    except TopoError:
        nodes = 0  # the check "scheduler" says so
    try:
        launcher = find_mpiexec(env_with_python_on_path(env))
        kind = LAUNCHERS[launcher.kind]
        # What a launch on all nodes of the job would do.
        reached = kind.prepare_remote_start(launcher, env, ()) if nodes > 1 else launcher
    except CommandNotFoundError as error:
        return _without_mpiexec(error, env, seconds, in_job=nodes > 0)
    except LaunchError as error:
        return CheckResult.of(error)
    is_alone = kind.needs_job and not nodes
    words = [] if is_alone else [launcher.path, "-n", "2", *kind.build_trial_flags(launcher)]
    ended = _try(words, env, seconds)
    if ended.status == _NO_OUTPUT and not ended.stdout:
        ended = _try(words, env, seconds)
    return _without_mpi4py(ended, seconds) or _judged(
        launcher, ended, seconds, reached.source.removeprefix(launcher.source), is_alone=is_alone
    )


def _import_mpi4py() -> None:
    """Import it once before the check's time begins, so that its ranks find the files in memory."""
    program = "import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI"
    run([sys.executable, "-P", "-c", program], os.environ, _COLD)


check_mpi.prepare = _import_mpi4py  # type: ignore[attr-defined]  # for the doctor


def _try(words: Sequence[str], env: Mapping[str, str], seconds: float) -> Ended:
    return run([*words, sys.executable, "-P", "-c", _PROGRAM], env, 0.8 * seconds)


def _without_mpi4py(ended: Ended, seconds: float) -> CheckResult | None:
    """Return that mpi4py is not there, loads no library, or is not imported yet."""
    if ended.status == _NO_MPI4PY:
        return CheckResult.ok("mpi4py is not installed: no rank of this environment needs MPI")
    if ended.status == _NO_LIBRARY:
        return CheckResult.error(
            f"mpi4py cannot load an MPI library: {ended.last_words}",
            "load the site's MPI module, or: pip install mpich",
        )
    if ended.status is not None or _LIBRARY.search(ended.stdout) or _BEGUN not in ended.stdout:
        return None
    # The ranks run: a slow file system.
    message = f"not done in {0.8 * seconds:.1f} s: still importing mpi4py and its MPI library"
    if seconds < _PATIENCE:
        remedy = "ask again with more time: ezpz doctor --timeout=60 --only=mpi"
        return CheckResult.warning(message, remedy)
    return CheckResult.error(
        message, f"see what takes so long: {sys.executable} -X importtime -c 'import mpi4py.MPI'"
    )


def _judged(
    launcher: Launcher, ended: Ended, seconds: float, reach: str, *, is_alone: bool
) -> CheckResult:
    match = _LIBRARY.search(ended.stdout)
    library = match[1] if match else "an unknown library"
    whose = f"{launcher.path} ({launcher.kind})"
    facts = {"mpiexec": launcher.path, "kind": launcher.kind, "library": library}
    is_other = any(name in library for name in LAUNCHERS[launcher.kind].incompatible_mpis)
    if is_alone and not is_other:
        message = f"{library} and {launcher.kind}; ranks are tried inside a job only"
        return CheckResult.ok(message, **facts)
    by_hand = f"{launcher.path} -n 2 {sys.executable} -m mpi4py.bench helloworld"
    if ended.status is None:
        message = f"two ranks of mpi4py by {whose} did not end in {0.8 * seconds:.1f} s"
        return CheckResult.error(message, f"run it by hand: {by_hand}", **facts)
    worlds = sorted(tuple(map(int, match.groups())) for match in _SAID.finditer(ended.stdout))
    if worlds == [(0, 2, 3), (1, 2, 3)] and not ended.status:
        if launcher.notes:
            note, _, remedy = launcher.notes[-1].rpartition("; ")
            return CheckResult.warning(note, remedy, **facts)
        return CheckResult.ok(f"two ranks of {library} by {whose}{reach}", **facts)
    seen = f"they end with {ended.status}: {ended.last_words}"
    if worlds and worlds[0][1] == 1:
        seen = f"each of two is rank 0 of a world of 1, and exit status {ended.status}"
    if is_alone:
        seen = "ranks are tried inside a job only"
    if worlds or is_other:
        return CheckResult.error(
            f"mpi4py loads {library}, and {whose} starts ranks of another MPI: {seen}",
            "put the mpiexec of that library first on PATH, load the modules of one MPI, or "
            "reinstall mpi4py for this one: "
            "pip install --no-cache-dir --no-binary=mpi4py --force-reinstall mpi4py",
            **facts,
        )
    message = f"two ranks of {library} by {whose} fail: {seen}"
    return CheckResult.error(message, f"run it by hand: {by_hand}", **facts)


def _without_mpiexec(
    error: Exception, env: Mapping[str, str], seconds: float, *, in_job: bool
) -> CheckResult:
    alone = _try([], env, seconds)
    if alone.status == _NO_LIBRARY:
        # pip brings mpi4py without an MPI: a workstation needs none.
        if in_job:
            return CheckResult.of(error, "warning")
        return CheckResult.ok(
            "no MPI here, and ezpz-launch needs none: it starts plain processes", mpiexec=None
        )
    if failed := _without_mpi4py(alone, seconds):
        return failed
    try:
        srun = find_launcher("srun", "srun", env_with_python_on_path(env))
    except CommandNotFoundError:
        return CheckResult.of(error, "warning")
    return CheckResult.ok(f"no mpiexec; {srun.path} starts the ranks", srun=srun.path)


# The checks ``disk`` and ``shared-memory``: files can be written, and there is room for more.

_LITTLE = 1 << 30
"""Less room than this is warned about: one checkpoint of 70 million parameters with AdamW."""

_ELSEWHERE = {
    "the working directory": "change to a folder that you may write",
    "TMPDIR": "set TMPDIR to a folder that you may write to",
    "the folder of records": "set EZPZ_STATE_DIR to a folder that you may write to",
}


def disk(_seconds: float, env: Mapping[str, str] | None = None) -> CheckResult:
    """Write into the working directory, ``TMPDIR`` and the folder of records, and see their room.

    What is written has no name, and is gone at once.
    """
    env = os.environ if env is None else env
    try:
        records = records_folder(env)
        while not os.path.isdir(records):
            records = os.path.dirname(records)
        places = {
            "the working directory": os.getcwd(),
            "TMPDIR": env.get("TMPDIR") or "/tmp",  # where ezpz-launch writes
            "the folder of records": records,
        }
    except LaunchError as error:
        return CheckResult.of(error)
    except OSError as error:
        return CheckResult.error(
            f"the working directory is gone ({error.strerror})", "change to a folder that is there"
        )
    for what, folder in places.items():
        if why := why_not_written(folder):
            remedy = f"remove what is old there; or {_ELSEWHERE[what]}"
            message = f"{folder} ({what}) cannot be written: {why}"
            return CheckResult.error(message, remedy, folder=folder)
    rooms = {what: shutil.disk_usage(folder).free for what, folder in places.items()}
    facts = {what: {"folder": places[what], "free_bytes": free} for what, free in rooms.items()}
    least = min(rooms, key=rooms.__getitem__)
    free = rooms[least]
    if free < _LITTLE:
        message = f"{places[least]} ({least}) has {_size(free)} free"
        return CheckResult.warning(message, "remove what is old there, or go elsewhere", **facts)
    return CheckResult.ok(
        f"{_size(free)} free or more in the working directory, TMPDIR and the folder of records",
        **facts,
    )


def shared_memory(_seconds: float, *, folder: str = "/dev/shm") -> CheckResult:
    """Write into the memory that data loaders' workers and NCCL share, and see what is free."""
    if not os.path.isdir(folder):
        system = os.uname().sysname
        if system == "Linux":
            return CheckResult.error(
                f"there is no {folder}: data loaders' workers and NCCL cannot share memory",
                f"mount it: mount -t tmpfs none {folder}, or ask who made this container",
            )
        return CheckResult.ok(f"{system} has no {folder}, and needs none")
    remedy = (
        f"remove what ended runs left in {folder} (ls -l {folder}); in a container: "
        "docker run --shm-size=8g, or --ipc=host"
    )
    if why := why_not_written(folder):
        return CheckResult.error(f"{folder} cannot be written: {why}", remedy, folder=folder)
    free = shutil.disk_usage(folder).free
    facts = {"folder": folder, "free_bytes": free}
    if free < _LITTLE:
        return CheckResult.warning(
            f"{_size(free)} free in {folder}: batches of data loaders' workers, and NCCL's "
            "buffers, may not fit: a bus error then",
            remedy, **facts,
        )  # fmt: skip
    return CheckResult.ok(f"{_size(free)} free in {folder}", **facts)


def _size(count: int) -> str:
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20)):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count >> 10} KiB"
