"""What `ezpz doctor` checks of launching."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import cache_from_source, find_spec
from typing import NamedTuple

from ezpz_topo import CheckResult, TopoError, detect, get_allocation, get_rank_info

from ._errors import CommandNotFoundError, LaunchError
from ._launchers import (
    LAUNCHERS,
    Launcher,
    beside_python,
    find_command,
    find_mpiexec,
    outside_of_launch,
)
from ._preflight import Ended, differing, reports_in, run
from ._record import records_folder, type_of, why_not_written

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
    env = outside_of_launch(os.environ if env is None else env)
    try:
        job = get_allocation(env, ask=False)
        nodes = len(job.hosts) if job.scheduler != "none" and job.on_node else 0
    except TopoError:
        nodes = 0  # the check "scheduler" says so
    try:
        launcher = find_mpiexec(beside_python(env))
        kind = LAUNCHERS[launcher.kind]
        # What a launch on all nodes of the job would do.
        reached = kind.reach(launcher, env, ()) if nodes > 1 else launcher
    except CommandNotFoundError as error:
        return _without_mpiexec(error, env, seconds, in_job=nodes > 0)
    except LaunchError as error:
        return CheckResult.of(error)
    is_alone = kind.needs_job and not nodes
    words = [] if is_alone else [launcher.path, "-n", "2", *kind.two_ranks(launcher)]
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
    is_other = any(name in library for name in LAUNCHERS[launcher.kind].other_mpis)
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
        srun = find_command("srun", "srun", beside_python(env))
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


# The check ``environment``: for how long the environment's files keep a job's ranks waiting.

CALLS, MODULES = 17_000, 1_000
"""What a rank does that imports torch: calls that name a file, and modules (docs/scale.md)."""

_SERVER = 50_000
"""Calls a second of a metadata server that all nodes ask: assumed, as in docs/scale.md."""

_SHARED = re.compile(
    r"afs|beegfs|ceph|cifs|dvs|gpfs|kafs|lustre|nfs4?|orangefs|panfs|pvfs2|smb3|virtiofs|wekafs|9p|"
    r"fuse(?!blk|\.(squashfuse(_ll)?|fuse-overlayfs|mergerfs)$)(\..*)?"
)
"""Types of file systems that a node has not for itself; an image (squashfs) is its own."""

_FILES, _OF_A_FOLDER = 512, 8  # so many files are opened, and of a folder at most
_LONG = 60.0  # seconds of waiting that are warned about
_SHORT = 1.0  # seconds of compiling that are not worth a word


class Environment(NamedTuple):
    folder: str
    type: str  # of its file system; empty where /proc does not tell
    opens: float  # a second, by one process
    uncompiled: float  # the part of its modules without bytecode of this Python
    compiles: float  # seconds of CPU that a module takes


def check_environment(seconds: float, env: Mapping[str, str] | None = None) -> CheckResult:
    """Open files of the environment that few have opened yet, and look for their bytecode."""
    env = os.environ if env is None else env
    try:
        topology = detect(env, ask=False)
    except TopoError as error:
        return CheckResult.of(error)
    try:
        seen = look_at(_slowest_folder(), seconds / 2)
    except OSError as error:
        message = f"{error.filename} cannot be read ({error.strerror}); expected this environment"
        return CheckResult.error(message, "make it readable, or make another environment")
    machine, job = topology.machine, topology.allocation
    in_job = job.scheduler != "none" and job.num_nodes
    nodes = job.num_nodes if in_job else machine.nodes or 1
    whose = f"the {nodes:,} nodes of {f'job {job.job_id}' if in_job else machine.name}"
    ranks = nodes * max(1, machine.devices_per_node or topology.accelerators.count)
    return judge_environment(seen, ranks, whose if nodes > 1 else "this node", env)


def _slowest_folder() -> str:
    """Return where torch is, the environment, or the standard library: the first that is shared."""
    torch = find_spec("torch")
    origin = torch.origin if torch else None
    folders = [os.path.dirname(os.path.dirname(origin))] if origin else []
    folders += [sysconfig.get_path("platlib"), sysconfig.get_path("stdlib")]
    return next((each for each in folders if _SHARED.fullmatch(type_of(each))), folders[0])


def look_at(folder: str, seconds: float) -> Environment:
    """Open a sample of a folder's files and compile some of its modules, within so many seconds."""
    files, folders, end = list[str](), [folder], time.monotonic() + seconds / 2
    while folders and len(files) < _FILES and time.monotonic() < end:
        # By chance: the same files would be remembered when someone asks again.
        random.shuffle(folders)
        found: list[tuple[str, bool]] = []
        with contextlib.suppress(PermissionError), os.scandir(folders.pop()) as entries:
            found = [(each.path, each.is_dir(follow_symlinks=False)) for each in entries]
        folders += [path for path, is_folder in found if is_folder]
        own = [path for path, is_folder in found if not is_folder]
        files += random.sample(own, min(len(own), _OF_A_FOLDER))
    if not files:
        raise FileNotFoundError(errno.ENOENT, "no file there", folder)
    began, opened, end = time.monotonic(), 0, time.monotonic() + seconds / 4
    for path in files:
        with contextlib.suppress(OSError):  # a link to nothing
            os.close(os.open(path, os.O_RDONLY))
        opened += 1
        if time.monotonic() > end:
            break
    took = time.monotonic() - began
    modules = [path for path in files if path.endswith(".py")]
    missing = [path for path in modules if not os.path.exists(cache_from_source(path))]
    began, compiled, end = time.process_time(), 0, time.monotonic() + seconds / 4
    for path in missing:
        with open(path, "rb") as file, contextlib.suppress(SyntaxError, ValueError):
            compile(file.read(), path, "exec", dont_inherit=True)
        compiled += 1
        if time.monotonic() > end:
            break
    return Environment(
        folder, type_of(folder), opened / took, len(missing) / max(len(modules), 1),
        (time.process_time() - began) / max(compiled, 1),
    )  # fmt: skip


def judge_environment(
    seen: Environment, ranks: int, whose: str, env: Mapping[str, str]
) -> CheckResult:
    """Say what so many ranks would wait for, and what to do about it."""
    is_shared = _SHARED.fullmatch(seen.type) is not None
    alone = CALLS / seen.opens
    wait = max(alone, ranks * CALLS / _SERVER if is_shared else 0.0)
    compiling = MODULES * seen.uncompiled * seen.compiles
    whose_disk = "which nodes share" if is_shared else "this node's own"
    said = (
        f"{seen.folder} is on {seen.type or 'an unknown file system'} ({whose_disk}): one process "
        f"opens {seen.opens:,.0f} files a second"
    )
    remedies = []
    if is_shared and wait > _LONG:
        said += (
            f"; {ranks:,} ranks on {whose} would wait {_duration(wait)} for it: a rank makes "
            f"{CALLS:,} calls, and a metadata server is assumed to take {_SERVER:,} a second of "
            "all ranks together"
        )
        remedies.append(
            "have the environment on every node's own disk: ezpz-launch --stage python train.py"
        )
    if compiling > _SHORT:
        said += (
            f"; {seen.uncompiled:.0%} of its modules have no bytecode of this Python: each rank "
            f"compiles them, {compiling:.1f} s of CPU"
        )
        writes = not env.get("PYTHONDONTWRITEBYTECODE")
        unset = "" if writes else "unset PYTHONDONTWRITEBYTECODE, and "
        remedies.append(f"{unset}once: {sys.executable} -m compileall -q -j 0 {seen.folder}")
    facts = {**seen._asdict(), "shared": is_shared, "ranks": ranks, "wait_s": round(wait, 1),
             "compiling_s": round(compiling, 1)}  # fmt: skip
    if remedies:
        return CheckResult.warning(said, "; ".join(remedies), **facts)
    return CheckResult.ok(said, **facts)


def _duration(seconds: float) -> str:
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


# The check ``versions``: every host of the allocation has the same Python, torch and ezpz.


def check_versions(seconds: float, env: Mapping[str, str] | None = None) -> CheckResult:
    """Start one process on each host of the allocation, and compare what is installed there."""
    env = os.environ if env is None else env
    try:
        job, rank = get_allocation(env, ask=False), get_rank_info(env)
    except TopoError as error:
        return CheckResult.of(error)
    if job.num_nodes < 2:
        return CheckResult.ok("one host: nothing to compare")
    if rank.world_size > 1:
        return CheckResult.ok("not compared: this is one of several ranks", hosts=list(job.hosts))
    words = [sys.executable, "-P", "-m", "ezpz_launch", "--ppn=1", "--grace=0.5", sys.executable,
             "-P", "-m", "ezpz_launch._preflight", "versions"]  # fmt: skip
    # All hosts of the job are asked, whichever a hostfile would choose.
    mine = {name: value for name, value in env.items() if name != "HOSTFILE"}
    with tempfile.TemporaryDirectory(prefix="ezpz-doctor-") as state:
        # The records of launches are the user's own.
        ended = run(words, {**mine, "EZPZ_STATE_DIR": state}, 0.7 * seconds, grace=0.15 * seconds)
    return judge(job.hosts, ended, seconds)


def judge(hosts: tuple[str, ...], ended: Ended, seconds: float) -> CheckResult:
    found = reports_in(ended.stdout, hosts)
    facts = {"hosts": list(hosts), "versions": dict(found)}
    answered = f"{len(found)} of {len(hosts)} hosts"
    if others := [f"{host} has {what}" for host, what in differing(found)]:
        more = f"; and {len(others) - 4} more" if len(others) > 4 else ""
        remedy = (
            "use one environment on all hosts: on a file system that they share, or the same "
            "module or container on each"
        )
        return CheckResult.error(f"{'; '.join(others[:4])}{more}", remedy, **facts)
    if ended.status is None:
        message = f"{answered} answered in {0.7 * seconds:.1f} s"
        remedy = "give them more time: ezpz doctor --timeout=120 --only=versions"
        return CheckResult.warning(message, remedy, **facts)
    if ended.status or len(found) < len(hosts):
        message = (
            f"{answered} told their versions, and ezpz-launch ended with {ended.status}: "
            f"{ended.last_words}"
        )
        remedy = f"see what is wrong there: ezpz-launch --ppn 1 {sys.executable} --version"
        return CheckResult.error(message, remedy, **facts)
    shown = next(iter(found.values()))
    return CheckResult.ok(
        f"Python {shown['python']}, torch {shown['torch']} and ezpz's packages are the same on "
        f"{len(found)} hosts",
        **facts,
    )
