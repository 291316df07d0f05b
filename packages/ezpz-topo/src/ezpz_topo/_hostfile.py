"""The hostfile: parsed, read and written.

Read are ``host``, ``host:n`` (Hydra), ``host n``, ``host slots=n max_slots=m`` (Open MPI,
DeepSpeed), a line for each slot (PBS), addresses (IPv6 with slots in brackets) and comments.
Open MPI 5 passes over the number of ``host n``; here it means slots, as to LSF. Written is one
host a line, which every launcher reads alike: ranks per node are an option of the launcher.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from ._errors import HostfileError
from ._hosts import host_key, is_host
from ._nodelist import MAX_HOSTS
from ._slots import parse_text, read_slots


@dataclass(frozen=True, slots=True)
class HostSlots:
    """One host of a hostfile, and the ranks that the file foresees on it; None: not told."""

    host: str
    slots: int | None = None


def parse_hostfile(text: str, *, path: str = "<text>") -> tuple[HostSlots, ...]:
    r"""Return the hosts of a hostfile, each once, in order, by short name, with their slots.

    The first spelling of a host stays. Repeats add up, and a line without a number then counts
    one; a host named once and without a number has None.

    Args:
        text: What the file says.
        path: The file's name, for errors.

    Raises:
        HostfileError: A line does not parse, or there is no host, or too many; with the line.

    >>> parse_hostfile("x1n0:2  # login\nx1n1 slots=4\nX1N0.hsn.example\n")
    (HostSlots(host='x1n0', slots=3), HostSlots(host='x1n1', slots=4))
    """
    return tuple(HostSlots(host, slots) for host, slots in parse_text(text, path).items())


def read_hostfile(path: str | os.PathLike[str]) -> tuple[HostSlots, ...]:
    """Return the hosts of a hostfile (see `parse_hostfile`).

    Raises:
        HostfileError: The file cannot be read, is not a regular one, is too large, is not
            UTF-8, or does not parse.
    """
    return tuple(HostSlots(host, slots) for host, slots in read_slots(path).items())


def get_nodes_from_hostfile(hostfile: str | os.PathLike[str]) -> list[str]:
    """Return the host names of a hostfile, in order, each once.

    Raises:
        HostfileError: As `read_hostfile`.
    """
    return list(read_slots(hostfile))


def format_hostfile(hosts: Iterable[str]) -> bytes:
    """Return what a hostfile with these hosts says."""
    if isinstance(hosts, str):
        raise HostfileError(f"hosts={hosts[:40]!r}; expected a list of names; put it in brackets")
    names: dict[str, str] = {}
    for host in hosts:
        # Also what a launcher or ssh would take for an option or for two hosts.
        if not is_host(host):
            raise HostfileError(
                f"host {host[:40]!r}; expected a name of letters, digits, '-', '_' and dots, or "
                "an address; give slots, users and ports to the launcher"
            )
        names.setdefault(host_key(host), host)
        if len(names) > MAX_HOSTS:
            raise HostfileError(
                f"host {host[:40]!r} is one too many; expected at most {MAX_HOSTS} hosts"
            )
    if not names:
        raise HostfileError("the list of hosts is empty; expected one host at least")
    return "".join(f"{host}\n" for host in names.values()).encode("ascii")


def write_file(path: str, content: bytes, mode: int) -> None:
    """Write a file beside its place and move it there."""
    try:
        target = os.path.realpath(path)  # a link stays, and what it leads to is replaced
        beside = os.path.join(os.path.dirname(target), f".ezpz-{os.urandom(8).hex()}")
        if os.path.exists(target) and not os.path.isfile(target):
            # Moved over /dev/null, a file would take its place.
            raise HostfileError(
                f"hostfile {path!r} is not a regular file; expected one, or none yet"
            )
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
            os.replace(beside, target)
        except BaseException:  # also at Ctrl-C: no half file stays behind; raised again
            os.unlink(beside)
            raise
    except (OSError, ValueError) as error:
        raise HostfileError(
            f"hostfile {path!r} cannot be written ({error}); expected a folder that is there and "
            "that you may write to; make it, or name another"
        ) from error
