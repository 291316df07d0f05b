"""Hostfiles: read, parsed and written."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ._errors import HostfileError
from ._nodelist import MAX_HOSTS, host_key, is_host

MAX_BYTES = 64 << 20
"""A larger file is refused: 10,000 nodes of 100 slots each, a line a slot, are 45 MB."""

_MAX_LINES = 1 << 22  # 10,000 nodes of 100 slots each, a line a slot, are 1,000,000
_MAX_LINE = 4096
_BLANKS = str.maketrans("\t\v\f", "   ")
_NUMBER = r"0*[1-9][0-9]{0,5}"
_IN_BRACKETS = r"\[([^\[\]]*)\](?::(.*))?"
# The words that Open MPI 5 (PRRTE) takes for each; it takes - for _ as well.
_SLOTS = frozenset({"slots", "cpu", "count"})
_MAX_SLOTS = frozenset(f"max_{word}" for word in _SLOTS) | {f"{word}_max" for word in _SLOTS}


@dataclass(frozen=True, slots=True)
class HostSlots:
    """One host of a hostfile, and the ranks that the file foresees on it, if known."""

    host: str
    slots: int | None = None


def read_hostfile(path: str | os.PathLike[str]) -> tuple[HostSlots, ...]:
    """Return the hosts of a hostfile, each once, in order, by short name, with their slots.

    The first spelling of a host stays. Repeats add up, and a line without a number then counts
    one; a host named once and without a number has None.

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


def read_slots(path: str | os.PathLike[str]) -> dict[str, int | None]:
    name = os.fspath(path)
    try:
        text = read_regular(name, MAX_BYTES).decode()
    except (OSError, ValueError) as error:  # a name with a NUL, and undecodable bytes
        raise HostfileError(
            f"hostfile {name!r} cannot be read ({error}); expected a text file with one host a "
            "line; name another, or unset the variable that names it"
        ) from error
    return parse_slots(text, name)


def read_regular(path: str, limit: int) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes, else raise OSError."""
    # A FIFO would wait for its writer, and /dev/zero has no end.
    with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path!r} is not a regular file")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(f"{path!r} has more than {limit} bytes")
    return data


def parse_slots(text: str, path: str) -> dict[str, int | None]:
    """Return the slots of each host, in order; None for one that is named once without any."""
    _check_text(text, path)
    spellings: dict[str, str] = {}  # of each host, the first
    totals: dict[str, int] = {}
    without_number: set[str] = set()  # hosts on one line, without slots
    # Some editors begin a file with a mark of its encoding.
    lines = text.removeprefix("\ufeff").split("\n")
    # Node files repeat a line for each slot: each is parsed once.
    for line, times in Counter(lines).items():
        try:
            entry = _parse_line(line)
        except HostfileError as error:
            number = lines.index(line) + 1
            raise HostfileError(f"hostfile {path!r} line {number}: {error}") from None
        if entry is None:
            continue
        host, slots = entry
        key = host_key(host)
        if key in spellings:
            totals[key] += (slots or 1) * times
            without_number.discard(key)
            continue
        if len(spellings) >= MAX_HOSTS:
            raise HostfileError(
                f"hostfile {path!r}: {host[:40]!r} is host {MAX_HOSTS + 1}; expected at most "
                f"{MAX_HOSTS}; name the job's own hostfile"
            )
        spellings[key] = host
        totals[key] = (slots or 1) * times
        if slots is None and times == 1:
            without_number.add(key)
    if not spellings:
        raise HostfileError(f"hostfile {path!r} names no host; expected one host a line")
    hosts: dict[str, int | None] = {}
    for key, host in spellings.items():
        hosts[host] = None if key in without_number else totals[key]
    return hosts


def _check_text(text: str, path: str) -> None:
    if "\0" in text:
        raise HostfileError(f"hostfile {path!r} holds NUL bytes; expected text, one host a line")
    if text.count("\n") > _MAX_LINES:
        raise HostfileError(
            f"hostfile {path!r} has more than {_MAX_LINES} lines; expected one host a line; "
            "name the job's own hostfile"
        )


def _parse_line(line: str) -> tuple[str, int | None] | None:
    """Return name and slots of the host of one line; None for a line without a host."""
    if is_host(line):
        return line, None  # as most lines, in a fifth of the time
    line = line.removesuffix("\r").partition("#")[0].translate(_BLANKS).strip(" ")
    if not line:
        return None
    if len(line) > _MAX_LINE:
        raise HostfileError(f"{len(line)} characters; expected one host a line")
    # Open MPI takes blanks around the equals sign.
    line = "=".join(part.strip(" ") for part in line.split("="))
    # Not split(): a no-break space from a web page is part of a name, and wrong.
    token, *options = filter(None, line.split(" "))
    host, slots = _parse_host(token)
    most = None
    for option in options:
        word, equals, value = option.replace("-", "_").rpartition("=")
        if word in _MAX_SLOTS and most is None:
            most = _parse_number(value, option)
        elif (word in _SLOTS or not equals) and slots is None:
            slots = _parse_number(value, option)
        else:
            raise _part_error(option, "slots=n and max_slots=m, each once, beside the host")
    if most is not None and most < (slots or 1):
        raise _part_error(f"max_slots={most}", f"at least the {slots} slots of the host")
    # As in Open MPI, max_slots are the slots if these are not given.
    return host, slots or most


def _parse_host(token: str) -> tuple[str, int | None]:
    """Return host and slots of ``host``, ``host:n``, ``[address]:n`` or a bare address."""
    host = token
    number = None
    match = re.fullmatch(_IN_BRACKETS, token)
    if match is not None and ":" in match[1]:
        host = match[1]
        number = match[2]
    elif token.count(":") == 1:
        host, _, number = token.partition(":")
    if is_host(host):
        if number is None:
            return host, None
        return host, _parse_number(number, token)
    if "[" in token or "]" in token:
        raise _part_error(token, "one host a line; expand it first: ezpz-topo expand NODELIST")
    if "@" in token:
        raise _part_error(token, "a host without its user; name the user in ~/.ssh/config")
    raise _part_error(token, "host, host:n or host slots=n; write one host a line")


def _parse_number(text: str, part: str) -> int:
    if not re.fullmatch(_NUMBER, text):
        raise _part_error(
            part, "slots from 1 to 999999, as host:n or host slots=n; correct the number"
        )
    return int(text)


def _part_error(part: str, expected: str) -> HostfileError:
    return HostfileError(f"{part[:40]!r}; expected {expected}")


# Written.


def format_hostfile(hosts: Iterable[str]) -> bytes:
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
