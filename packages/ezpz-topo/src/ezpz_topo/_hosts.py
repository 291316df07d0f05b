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
from ._allocation import UNREADABLE, Allocation, scheduler_of
from ._errors import HostfileError, NoSchedulerError, SchedulerError, TopoError
from ._hostfile import HostSlots, format_hostfile, read_hostfile, write_file
from ._nodelist import get_hostname
from ._rank import get_rank_info

if TYPE_CHECKING:
    from pathlib import Path

# The allocation: of the scheduler whose job this is, or this host.


def get_allocation(env: Mapping[str, str] | None = None, *, ask: bool | None = None) -> Allocation:
    """Read the allocation from the job's variables and files.

    Args:
        env: The environment to read; default ``os.environ``.
        ask: Whether the scheduler's own commands may be started. None: where the variables do
            not tell the hosts (PBS's node file is missing on some nodes of some sites). True:
            also for the end of the walltime and, without job variables, for the job that this
            host is a node of (a shell opened with ssh). False: never, for functions that every
            rank calls, because ten thousand qstats at once take a server down.

    Raises:
        InvalidVariableError: The job's variables contradict each other.
        HostfileError: The job's node file does not parse.
        NodelistError: The job's nodelist does not parse.
        SchedulerError: Only the scheduler knows the hosts, and it did not answer or may not
            be asked; or several jobs share this host.
    """
    env = os.environ if env is None else env
    scheduler = scheduler_of(env)
    if scheduler == "none":
        if ask and (found := _job_of_this_host(env)):
            return found
        more = ", and no scheduler here has a running job of yours on this host" if ask else ""
        why, host = f"no job variables are set{more}", get_hostname()
        sources = {"scheduler": why, "hosts": f"uname: {why}"}
        return Allocation("none", None, (host,), node_name=host, sources=sources)
    if scheduler in UNREADABLE.values():
        raise SchedulerError(
            f"a job of {scheduler}, whose hosts cannot be read here; expected Slurm or PBS; write "
            "the hosts into a file, one a line, and name it in HOSTFILE, or pass it"
        )
    job: Allocation = module_of(scheduler).allocation(env, commands=ask is not False)
    if not ask or job.ends_at is not None:
        return job
    try:
        ends_at = module_of(scheduler).end_time(job.job_id or "", env)
    except TopoError as error:
        # It is good to know, and no more: hosts and ranks are known without it.
        return replace(job, notes=(*job.notes, f"end of the walltime: {error}"))
    source = "qstat -E -fw" if scheduler == "pbs" else "scontrol show job"
    return replace(job, ends_at=ends_at, sources={**job.sources, "ends_at": source})


def find_schedulers(env: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return which of ``"slurm"`` and ``"pbs"`` have their commands on this host; asks nothing."""
    env = os.environ if env is None else env
    places = {"slurm": ("squeue", ""), "pbs": ("qselect", module_of("pbs").get_pbs_folder(env))}
    return tuple(
        name for name, (command, place) in places.items() if _commands.find(command, env, place)
    )


def module_of(scheduler: str) -> ModuleType:
    return import_module(f"._{scheduler}", __package__)  # most processes need neither


def _job_of_this_host(env: Mapping[str, str]) -> Allocation | None:
    for scheduler in ("pbs", "slurm"):
        try:
            job: Allocation | None = module_of(scheduler).job_of_this_host(env, get_hostname())
        except NoSchedulerError:
            continue
        if job is not None:
            return job
    return None


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
    node_file = env.get("PBS_NODEFILE")
    named = {"argument": hostfile, "PBS_NODEFILE": node_file, "HOSTFILE": env.get("HOSTFILE")}
    if hostfile is None and env.get("PBS_JOBID") and node_file and not os.path.lexists(node_file):
        # Its server knows the hosts; a HOSTFILE here would give this node other hosts than those
        # that read PBS's file.
        named = {}
    for source, path in named.items():
        if path or (source == "argument" and path is not None):
            entries = read_hostfile(path)
            if source == "PBS_NODEFILE":
                # One line a slot, also where no line is repeated.
                entries = tuple(HostSlots(each.host, each.slots or 1) for each in entries)
            return Hosts(entries, source, os.fspath(path))
    rank = get_rank_info(env)
    # Not a command a rank.
    allocation = get_allocation(env, ask=False if rank.world_size > 1 else None)
    if allocation.scheduler == "none":
        if rank.world_size > 1 and rank.local_world_size != rank.world_size:
            raise HostfileError(
                f"{rank.world_size} ranks of {rank.launcher}, not all of them known to be on this "
                "host, and no hostfile; expected the names of their hosts; write them into a "
                "file, one a line, and name it in HOSTFILE"
            )
        return Hosts((HostSlots(get_hostname()),), "no job is running: this host")
    told = allocation.slots or (None,) * len(allocation.hosts)
    return Hosts(
        tuple(HostSlots(host, n) for host, n in zip(allocation.hosts, told, strict=True)),
        allocation.sources.get("hosts", allocation.scheduler),
    )


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
        mine = os.path.isabs(runtime) and os.stat(runtime).st_uid == user
    except (OSError, ValueError):
        mine = False
    # Not tempfile, which would end in the working directory.
    parent = env.get("TMPDIR") or "/tmp"  # noqa: S108  # ours is 0700 in it, and checked
    folder = os.path.join(runtime, "ezpz") if mine else os.path.join(parent, f"ezpz-{user}")
    if not os.path.isabs(folder):
        raise HostfileError(f"TMPDIR={parent!r}; expected an absolute path; set it, or unset it")
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        found = os.lstat(folder)
    except (OSError, ValueError) as error:
        raise HostfileError(
            f"folder {folder!r} cannot be made ({error}); expected a place for a hostfile; set "
            "TMPDIR to a folder that you may write to, or name a hostfile"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o077:
        raise HostfileError(
            f"{folder!r} is {stat.filemode(found.st_mode)} of user {found.st_uid}; expected a "
            f"folder drwx------ of user {user}; remove it, or set TMPDIR to a folder of your own"
        )
    return folder
