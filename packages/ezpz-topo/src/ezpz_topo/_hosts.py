"""The hosts to use: those that a scheduler gave us, or that a file names; and files for them."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from . import _commands
from ._allocation import UNREADABLE, Allocation, detect_scheduler
from ._errors import HostfileError, NoSchedulerError, SchedulerError, TopoError
from ._hostfile import HostSlots, format_hostfile, read_hostfile, write_file
from ._nodelist import get_hostname
from ._rank import get_rank_info

if TYPE_CHECKING:
    from pathlib import Path

# The allocation: of this job's scheduler, or this host.


def get_allocation(env: Mapping[str, str] | None = None, *, ask: bool | None = None) -> Allocation:
    """Read the allocation from the job's variables and files.

    Args:
        env: The environment to read; default ``os.environ``.
        ask: Whether the scheduler's own commands may be started. None: where the variables do
            not name the hosts (PBS's node file is missing on some nodes of some sites). True:
            also for the end of the walltime and, without job variables, for the job that this
            host is a node of (a shell opened with ssh). False: never, for functions that every
            rank calls, because ten thousand qstats at once take a server down.

    Raises:
        InvalidVariableError: The job's variables contradict each other.
        HostfileError: The job's node file does not parse.
        NodelistError: The job's nodelist does not parse.
        SchedulerError: Only the scheduler knows the hosts, and it did not answer or may not
            be queried; or several jobs share this host.
    """
    env = os.environ if env is None else env
    scheduler = detect_scheduler(env)
    if scheduler == "none":
        return _find_job_or_host(env, ask=bool(ask))
    if scheduler in UNREADABLE.values():
        raise SchedulerError(
            f"a job of {scheduler}, whose hosts cannot be read here; expected Slurm or PBS; write "
            "the hosts into a file, one a line, and name it in HOSTFILE, or pass it"
        )
    job: Allocation = import_scheduler(scheduler).allocation(env, commands=ask is not False)
    if not ask or job.ends_at is not None:
        return job
    try:
        ends_at = import_scheduler(scheduler).end_time(job.job_id or "", env)
    except TopoError as error:
        # It is good to know, and no more: hosts and ranks are known without it.
        return replace(job, notes=(*job.notes, f"end of the walltime: {error}"))
    source = "scontrol show job"
    if scheduler == "pbs":
        source = "qstat -E -fw"
    return replace(job, ends_at=ends_at, sources={**job.sources, "ends_at": source})


def find_schedulers(env: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return which of ``"slurm"`` and ``"pbs"`` have their commands on this host; runs none."""
    env = os.environ if env is None else env
    schedulers = []
    if _commands.find("squeue", env):
        schedulers.append("slurm")
    if _commands.find("qselect", env, import_scheduler("pbs").get_pbs_folder(env)):
        schedulers.append("pbs")
    return tuple(schedulers)


def import_scheduler(scheduler: str) -> ModuleType:
    return import_module(f"._{scheduler}", __package__)  # most processes need neither


def _find_job_or_host(env: Mapping[str, str], *, ask: bool) -> Allocation:
    """Return the job that has this host, if schedulers may be queried; else this host."""
    reason = "no job variables are set"
    host = get_hostname()
    if ask:
        for scheduler in ("pbs", "slurm"):
            try:
                job: Allocation | None = import_scheduler(scheduler).job_of_this_host(env, host)
            except NoSchedulerError:
                continue
            if job is not None:
                return job
        reason += ", and no scheduler here has a running job of yours on this host"
    sources = {"scheduler": reason, "hosts": f"uname: {reason}"}
    return Allocation("none", None, (host,), node_name=host, sources=sources)


# The hosts to use: of the argument, the variables that name a file, or the allocation.


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts to use.

    Attributes:
        entries: The hosts, each once, in order.
        source: Where they come from: ``"argument"``, ``"PBS_NODEFILE"``, ``"HOSTFILE"``, the
            source of the allocation's hosts, or the rule that leaves this host alone.
        path: The file that they were read from; None where no file named them.
    """

    entries: tuple[HostSlots, ...]
    source: str
    path: str | None = None


def get_hosts(
    hostfile: str | os.PathLike[str] | None = None, env: Mapping[str, str] | None = None
) -> Hosts:
    """Return the hosts to use: of the first that is given, never the next because one fails.

    The order: the argument, ``PBS_NODEFILE``, ``HOSTFILE``, the scheduler, and this host only
    where no job is running. Nothing is written.

    Args:
        hostfile: A hostfile that comes before all others.
        env: The environment to read; default ``os.environ``.

    Raises:
        HostfileError: The file that is named cannot be read or does not parse; or there are
            ranks on other hosts, and nothing names these.
        TopoError: As `get_allocation` and `get_rank_info`.
    """
    env = os.environ if env is None else env
    if hostfile is not None:
        return Hosts(read_hostfile(hostfile), "argument", os.fspath(hostfile))
    node_file = env.get("PBS_NODEFILE")
    # Where PBS's file is missing its server knows the hosts; a HOSTFILE here would give this node
    # other hosts than those that read PBS's file.
    is_missing = bool(env.get("PBS_JOBID") and node_file and not os.path.lexists(node_file))
    if node_file and not is_missing:
        # One line a slot, also where no line is repeated.
        entries = [HostSlots(each.host, each.slots or 1) for each in read_hostfile(node_file)]
        return Hosts(tuple(entries), "PBS_NODEFILE", node_file)
    if env.get("HOSTFILE") and not is_missing:
        return Hosts(read_hostfile(env["HOSTFILE"]), "HOSTFILE", env["HOSTFILE"])
    return _read_allocated_hosts(env)


def _read_allocated_hosts(env: Mapping[str, str]) -> Hosts:
    """Return the job's hosts, or this host where no job is running and all ranks are here."""
    rank = get_rank_info(env)
    may_ask = None
    if rank.world_size > 1:
        may_ask = False  # not a command a rank
    allocation = get_allocation(env, ask=may_ask)
    if allocation.scheduler == "none":
        if rank.world_size > 1 and rank.local_world_size != rank.world_size:
            raise HostfileError(
                f"{rank.world_size} ranks of {rank.launcher}, not all of them known to be on this "
                "host, and no hostfile; expected the names of their hosts; write them into a "
                "file, one a line, and name it in HOSTFILE"
            )
        return Hosts((HostSlots(get_hostname()),), "no job is running: this host")
    slots = allocation.slots or (None,) * len(allocation.hosts)
    entries = [HostSlots(host, n) for host, n in zip(allocation.hosts, slots, strict=True)]
    return Hosts(tuple(entries), allocation.sources.get("hosts", allocation.scheduler))


# Files that name them.


def get_hostfile_with_fallback(
    hostfile: str | os.PathLike[str] | None = None, env: Mapping[str, str] | None = None
) -> Path:
    """Return the path of a hostfile with the hosts that `get_hosts` gives.

    A file that is named stays as it is. Where none is, one is written into this user's private
    folder, under a name that is the same on every rank of the job (in a PBS job: PBS's own).

    Args:
        hostfile: A hostfile that comes before all others.
        env: The environment to read; default ``os.environ``.

    Raises:
        HostfileError: As `get_hosts`, or the file cannot be written.
        TopoError: As `get_hosts`.
    """
    from pathlib import Path  # noqa: PLC0415  # 5 ms of each launch's start

    env = os.environ if env is None else env
    hosts = get_hosts(hostfile, env)
    if hosts.path is not None:
        return Path(hosts.path)
    job = env.get("SLURM_JOB_ID") or env.get("PBS_JOBID") or "local"
    return Path(_write_private(format_hostfile(entry.host for entry in hosts.entries), job, env))


def write_localhost_to_hostfile(hostfile: str | os.PathLike[str]) -> Path:
    """Write a hostfile that names this host only, and return its path.

    Raises:
        HostfileError: The file cannot be written.
    """
    return write_hostfile_from_list_of_hosts([get_hostname()], hostfile)


def write_hostfile_from_list_of_hosts(
    hosts: Iterable[str], hostfile: str | os.PathLike[str] | None = None
) -> Path:
    """Write a hostfile, one host a line, each once and in order, and return its path.

    A reader sees the old file or the new one, never half of it.

    Args:
        hosts: Names or addresses.
        hostfile: The file to write; None: one in this user's private folder.

    Raises:
        HostfileError: There is no host, one is no name or address, or the file cannot be
            written.
    """
    from pathlib import Path  # noqa: PLC0415

    content = format_hostfile(hosts)
    if hostfile is None:
        return Path(_write_private(content, "list", os.environ))
    write_file(os.fspath(hostfile), content, 0o666)
    return Path(hostfile)


def _write_private(content: bytes, job: str, env: Mapping[str, str]) -> str:
    # Job ids of arrays have brackets; two steps of one job have different hosts.
    name = re.sub(r"[^A-Za-z0-9.-]", "_", job)[:64]
    path = os.path.join(_private_folder(env), f"hosts-{name}-{zlib.crc32(content):08x}")
    write_file(path, content, 0o600)
    return path


def _private_folder(env: Mapping[str, str]) -> str:
    user = os.geteuid()
    runtime = env.get("XDG_RUNTIME_DIR", "")
    try:
        # A job often has the variable of the login node, and not the folder.
        is_own = os.path.isabs(runtime) and os.stat(runtime).st_uid == user
    except (OSError, ValueError):
        is_own = False
    # Not tempfile, which would end in the working directory.
    parent = env.get("TMPDIR") or "/tmp"  # noqa: S108  # ours is 0700 in it, and checked
    folder = os.path.join(parent, f"ezpz-{user}")
    if is_own:
        folder = os.path.join(runtime, "ezpz")
    if not os.path.isabs(folder):
        raise HostfileError(f"TMPDIR={parent!r}; expected an absolute path; set it, or unset it")
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        status = os.lstat(folder)
    except (OSError, ValueError) as error:
        raise HostfileError(
            f"folder {folder!r} cannot be made ({error}); expected a place for a hostfile; set "
            "TMPDIR to a folder that you may write to, or name a hostfile"
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != user or status.st_mode & 0o077:
        raise HostfileError(
            f"{folder!r} is {stat.filemode(status.st_mode)} of user {status.st_uid}; expected a "
            f"folder drwx------ of user {user}; remove it, or set TMPDIR to a folder of your own"
        )
    return folder
