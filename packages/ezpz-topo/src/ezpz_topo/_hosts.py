"""The hosts to use, and files that name them."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._allocation import get_allocation
from ._errors import HostfileError
from ._hostfile import HostSlots, format_hostfile, read_hostfile, write_file
from ._nodelist import get_hostname
from ._rank import get_rank_info

if TYPE_CHECKING:
    from pathlib import Path


_VARIABLES = ("PBS_NODEFILE", "HOSTFILE")


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
    named = [("argument", hostfile), *((name, env.get(name) or None) for name in _VARIABLES)]
    node_file = env.get("PBS_NODEFILE")
    if hostfile is None and env.get("PBS_JOBID") and node_file and not os.path.lexists(node_file):
        # Its server knows the hosts; a HOSTFILE here would give this node other hosts than those
        # that read PBS's file.
        named = []
    for source, path in named:
        if path is not None:
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
    from pathlib import Path  # noqa: PLC0415  # 3 ms

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
    hosts: Iterable[str],
    hostfile: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Path:
    """Write a hostfile, one host a line, each once and in order, and return its path.

    A reader sees the old file or the new one, never half of it.

    Args:
        hosts: Names or addresses.
        hostfile: The file to write; None: one in this user's private folder.
        env: The environment that tells where that folder is; default ``os.environ``.

    Raises:
        HostfileError: There is no host, one is no name or address, or the file cannot be
            written.
    """
    from pathlib import Path  # noqa: PLC0415  # 3 ms

    content = format_hostfile(hosts)
    if hostfile is None:
        return Path(_write_private(content, "list", os.environ if env is None else env))
    write_file(os.fspath(hostfile), content, 0o666)
    return Path(hostfile)


def _write_private(content: bytes, job: str, env: Mapping[str, str]) -> str:
    import zlib  # noqa: PLC0415  # only who writes pays

    # Job ids of arrays have brackets; two steps of one job have different hosts.
    name = re.sub(r"[^A-Za-z0-9.-]", "_", job)[:64]
    path = os.path.join(_private_folder(env), f"hosts-{name}-{zlib.crc32(content):08x}")
    write_file(path, content, 0o600)
    return path


def _private_folder(env: Mapping[str, str]) -> str:
    """Return this user's folder for files that nobody asked for; make it if it is not there."""
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
