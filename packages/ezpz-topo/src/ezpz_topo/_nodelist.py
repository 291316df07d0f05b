"""Names of hosts, and Slurm's short notation for many of them."""

from __future__ import annotations

import itertools
import operator
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ._errors import InvalidVariableError, NodelistError, shorten

# Host names: this host's own, and when two names mean the same host.

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_][A-Za-z0-9_-]*)*\.?"
_MAX_SHOWN = 60  # characters of a nodelist in an error
_MAX_NAME = 254  # DNS: 253 characters, and the final dot
_OCTETS = frozenset(str(number) for number in range(256))
_NUMERIC = r"(?:0[xX][0-9a-fA-F]*|[0-9]+)(?:\.(?:0[xX][0-9a-fA-F]*|[0-9]+))*\.?"
# Of RFC 6761, and of the /etc/hosts of Debian, Fedora and SUSE; without what follows the first dot.
_LOOPBACK = frozenset({
    "0.0.0.0",  # noqa: S104 - connecting to it is to connect to this host
    "localhost", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback", "ipv6-localhost",
    "ipv6-loopback",
})  # fmt: skip


def get_hostname() -> str:
    """Return this host's name as the kernel has it (what ``hostname`` prints)."""
    return os.uname().nodename


def short_name(host: str) -> str:
    """Return the part before the first dot: the suffix differs between PBS and ``hostname``.

    An address has no suffix and stays whole.

    >>> short_name("x1n0.hsn.example"), short_name("10.0.0.1"), short_name("fe80::1")
    ('x1n0', '10.0.0.1', 'fe80::1')
    """
    if ":" in host or host.replace(".", "").isdigit():
        return host
    return host.partition(".")[0]


def same_host(a: str, b: str) -> bool:
    """Return whether two names mean the same host: by short name, whatever the case.

    Addresses are compared whole, and never with a name: nothing is looked up. All loopback
    addresses and names are one host: that on which they are used.

    >>> same_host("x1n0", "X1N0.hsn.example"), same_host("10.0.0.1", "10.0.0.2")
    (True, False)
    >>> same_host("localhost", "127.0.1.1"), same_host("::1", "ip6-localhost")
    (True, True)
    """
    return host_key(a) == host_key(b)


def host_key(host: str) -> str:
    """Return one key for all spellings of a host; ``localhost`` for the loopback ones."""
    name = host.lower()
    if ":" in name:
        name = _ipv6(name.removeprefix("[").removesuffix("]")) or name
        is_loopback = name in ("::", "::1")
    elif name.endswith((".localhost", ".localhost.")):
        is_loopback = True
    else:
        name = short_name(name)
        is_loopback = name in _LOOPBACK
    if name.startswith("127.") and name.replace(".", "").isdigit():
        is_loopback = True
    if is_loopback:
        return "localhost"
    return name


def is_own_address(host: str) -> bool:
    """Return whether a host is named by an address that an interface of this host has.

    A name is no address: nothing is looked up.

    >>> is_own_address("127.0.0.1"), is_own_address("localhost")
    (True, False)
    """
    import socket  # noqa: PLC0415 - few hosts are named by addresses

    host = host.removeprefix("[").removesuffix("]")
    if not is_host(host):
        return False
    if ":" in host:
        family = socket.AF_INET6
        setting = "/proc/sys/net/ipv6/ip_nonlocal_bind"
    elif host.replace(".", "").isdigit():
        family = socket.AF_INET
        setting = "/proc/sys/net/ipv4/ip_nonlocal_bind"
    else:
        return False
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    # Where this is set, every address can be bound.
    try:
        with open(setting, encoding="ascii") as file:
            return file.read().strip() == "0"
    except OSError:
        return True


def find_host(host: str, hosts: Sequence[str]) -> str | None:
    """Return the first of these names that means this host, unchanged."""
    key = host_key(host)
    # Few of ten thousand begin alike, and only those are compared. Addresses and loopback names
    # have several spellings.
    start = key
    if ":" in key or key[:1].isdigit() or key == "localhost":
        start = ""
    for each in hosts:
        if each.lower().startswith(start) and host_key(each) == key:
            return each
    return None


def is_host(text: str) -> bool:
    """Return whether this is a host's name, an IPv4 or an IPv6 address (without brackets)."""
    if ":" in text:
        return _ipv6(text) is not None
    if text.replace(".", "").isdigit() or re.fullmatch(_NUMERIC, text):
        # The resolver would take "12" for 0.0.0.12, and "0x7f.1" for 127.0.0.1; "010" is 8 to some
        # and 10 to others.
        octets = text.split(".")
        return len(octets) == 4 and all(octet in _OCTETS for octet in octets)
    return len(text) <= _MAX_NAME and re.fullmatch(_NAME, text) is not None


def _ipv6(text: str) -> str | None:
    """Return the one spelling of an IPv6 address; None if it is none, or has a zone."""
    import ipaddress  # noqa: PLC0415 - 1 ms, and few hosts are named so

    # A zone (fe80::1%eth0) holds on one host only, and may have any character in it.
    if "%" in text:
        return None
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        return None
    # ::ffff:10.0.0.1 is the IPv4 address 10.0.0.1.
    return str(address.ipv4_mapped or address)


# Slurm's nodelists: ``nid[001-004,9],login1`` to host names and back.

MAX_HOSTS = 1 << 20
"""More hosts than this are refused before they are made; the largest machines have 10,000."""

_ITEM = re.compile(r"(?:[^\s,\[\]]|\[[^\[\]]*\])+")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,15})(?:-([0-9]{1,15}))?")


class _Range(NamedTuple):
    """One range of a bracket; its numbers have at least ``width`` digits."""

    low: int
    high: int
    width: int


_Ranges = list[_Range]  # of one bracket


def expand_nodelist(nodelist: str, *, max_hosts: int = MAX_HOSTS) -> list[str]:
    """Return the host names of a Slurm nodelist, in Slurm's order, with duplicates.

    Several brackets in one name are legal: the last varies fastest, then the first, the
    second and so on, so that the last but one is slowest. A range keeps the width of its
    low end: ``[01-100]`` gives 01 to 100, ``[9-11]`` gives 9, 10, 11.

    Args:
        nodelist: Names separated by commas or white space; empty ones are passed over.
        max_hosts: The number of hosts above which a list is refused at once.

    Raises:
        NodelistError: A bracket is unclosed, nested or empty, a range is reversed or no pair
            of decimal numbers, or there are too many hosts; with position and part.

    >>> expand_nodelist("nid[001-003,7],login1")
    ['nid001', 'nid002', 'nid003', 'nid7', 'login1']
    """
    hosts: list[str] = []
    for name, position in _split_names(nodelist):
        literals, brackets = _parse_name(name, position, nodelist, len(hosts), max_hosts)
        hosts += _expand(literals, brackets)
    return hosts


def first_host(nodelist: str) -> str:
    """Return the first host of a nodelist without making the others.

    Raises:
        NodelistError: The list is empty, or its first name does not parse.
    """
    for name, position in _split_names(nodelist):
        literals, brackets = _parse_name(name, position, nodelist, 0, float("inf"))
        host = literals[0]
        for ranges, literal in zip(brackets, literals[1:], strict=True):
            host += f"{ranges[0].low:0{ranges[0].width}d}{literal}"
        return host
    raise NodelistError(f"nodelist {shorten(nodelist, _MAX_SHOWN)} names no host")


def fold_nodelist(hosts: Iterable[str]) -> str:
    """Return a nodelist that expands to these hosts, in this order, with duplicates.

    Neighbours that differ in their last number only are folded into ranges; a name that
    does not end in a number is left as it is, which every version of Slurm reads.

    Raises:
        NodelistError: A name is empty, or holds a comma, a bracket or white space.

    >>> fold_nodelist(["nid001", "nid002", "nid003", "nid7", "login"])
    'nid[001-003,7],login'
    """
    items: list[str] = []
    for (prefix, _), group in itertools.groupby(map(_split_number, hosts), key=_fold_key):
        numbers = [number for _, number in group]
        if len(numbers) > 1 and numbers[0]:
            items.append(f"{prefix}[{','.join(_fold_numbers(numbers))}]")
        else:
            items += [f"{prefix}{number}" for number in numbers]
    return ",".join(items)


def _split_names(nodelist: str) -> Iterable[tuple[str, int]]:
    """Yield each name with its position; whatever is left over is an error."""
    position = 0
    while position < len(nodelist):
        if nodelist[position] == "," or nodelist[position].isspace():
            position += 1
            continue
        match = _ITEM.match(nodelist, position)
        end = position
        if match is not None:
            end = match.end()
        bracket = nodelist[end : end + 1]
        if bracket in ("[", "]"):
            problem = "was not opened"
            if bracket == "[":
                problem = "is not closed, or holds another"
            raise NodelistError(
                f"nodelist {shorten(nodelist, _MAX_SHOWN)}: the bracket at position {end}, "
                f"{nodelist[end : end + 20]!r}, {problem}; expected ranges such as nid[001-004,007]"
            )
        yield nodelist[position:end], position
        position = end


def _parse_name(
    name: str, position: int, nodelist: str, hosts_before: int, max_hosts: float
) -> tuple[list[str], list[_Ranges]]:
    """Return the text around the brackets of one name, and the ranges of each bracket."""
    pieces = _BRACKET.split(name)
    brackets: list[_Ranges] = []
    count = 1
    _check_size(hosts_before + count, name, position, nodelist, max_hosts)
    for text in pieces[1::2]:
        ranges = [_parse_range(part, text, position, nodelist) for part in text.split(",")]
        brackets.append(ranges)
        # After each bracket: ten thousand of them make a number that cannot be printed.
        count *= sum(each.high - each.low + 1 for each in ranges)
        _check_size(hosts_before + count, name, position, nodelist, max_hosts)
    return pieces[::2], brackets


def _parse_range(part: str, bracket: str, position: int, nodelist: str) -> _Range:
    match = _RANGE.fullmatch(part)
    if match is not None:
        low = int(match[1])
        high = int(match[2] or match[1])
        if low <= high:
            return _Range(low, high, len(match[1]))
    raise NodelistError(
        f"nodelist {shorten(nodelist, _MAX_SHOWN)}: {part[:20]!r} in the bracket "
        f"[{bracket[:20]}] of the name at position {position} is no range; expected "
        "low-high in decimal, such as nid[001-004,007]"
    )


def _check_size(count: int, name: str, position: int, nodelist: str, max_hosts: float) -> None:
    if count > max_hosts:
        raise NodelistError(
            f"nodelist {shorten(nodelist, _MAX_SHOWN)}: {name[:40]!r} at position {position} "
            f"brings it to {count} hosts or more; expected at most {max_hosts}; name fewer hosts"
        )


def _expand(literals: list[str], brackets: list[_Ranges]) -> list[str]:
    if not brackets:
        return literals
    heads = _number_names(literals[0], brackets[0], literals[1])
    if len(brackets) == 1:
        return heads
    # The last bracket varies fastest, then the first, the second and so on.
    for ranges, literal in zip(brackets[1:-1], literals[2:-1], strict=True):
        slower = _number_names("", ranges, literal)
        heads = [head + part for part, head in itertools.product(slower, heads)]
    tails = _number_names("", brackets[-1], literals[-1])
    return list(itertools.starmap(operator.add, itertools.product(heads, tails)))


def _number_names(prefix: str, ranges: _Ranges, suffix: str) -> list[str]:
    """Return prefix, number, suffix for each number of one bracket."""
    names: list[str] = []
    for low, high, width in ranges:
        names += [f"{prefix}{number:0{width}d}{suffix}" for number in range(low, high + 1)]
    return names


def _split_number(host: str) -> tuple[str, str]:
    if not host or re.search(r"[,\[\]\s]", host):
        raise NodelistError(
            f"host name {host[:40]!r}; expected one without commas, brackets and white space"
        )
    prefix = host.rstrip("0123456789")
    if len(host) - len(prefix) > 15:
        # More digits than a range may have are left as they are.
        return host, ""
    return prefix, host[len(prefix) :]


def _fold_key(split: tuple[str, str]) -> tuple[str, bool]:
    """Return what neighbours must share: a name without a number folds with none that has one."""
    prefix, number = split
    return prefix, bool(number)


def _fold_numbers(numbers: list[str]) -> Iterable[str]:
    """Yield ``001-003`` and ``7`` for 001, 002, 003, 7."""
    first = numbers[0]
    last = first
    for number in numbers[1:]:
        if number == f"{int(last) + 1:0{len(first)}d}":
            last = number
            continue
        yield _format_range(first, last)
        first = number
        last = number
    yield _format_range(first, last)


def _format_range(first: str, last: str) -> str:
    if first == last:
        return first
    return f"{first}-{last}"


# Slurm's compressed task counts: ``4(x2),3`` is 4, 4, 3 in the order of the nodelist.

_TASK = r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?"


def get_tasks_on_node(text: str, node_rank: int, *, variable: str) -> int:
    """Return the number of tasks on one node."""
    # Source: slurm's ``srun`` manual, SLURM_TASKS_PER_NODE; checked on Slurm 22.05.8.
    nodes_before = 0
    for tasks, nodes in _parse_task_counts(text, variable):
        nodes_before += nodes
        if node_rank < nodes_before:
            return tasks
    raise InvalidVariableError(
        f"{variable}={text!r} tells of {nodes_before} nodes; expected more than {node_rank}"
    )


def get_tasks_per_node(text: str, num_nodes: int, *, variable: str) -> tuple[int, ...]:
    """Return the number of tasks on each node."""
    counts = list(_parse_task_counts(text, variable))
    listed = sum(nodes for _, nodes in counts)
    # Before they are made: a repeat can have nine digits.
    if listed != num_nodes:
        raise InvalidVariableError(
            f"{variable}={text[:60]!r} tells of {listed} nodes; expected {num_nodes}, as the "
            "nodelist has; unset the variable that is a leftover of another job"
        )
    tasks_per_node: list[int] = []
    for tasks, nodes in counts:
        tasks_per_node += [tasks] * nodes
    return tuple(tasks_per_node)


def _parse_task_counts(text: str, variable: str) -> Iterator[tuple[int, int]]:
    for item in text.split(","):
        match = re.fullmatch(_TASK, item)
        if match is None:
            raise InvalidVariableError(
                f"{variable}={text!r}: {item!r} does not parse; expected counts such as 4(x2),3"
            )
        yield int(match[1]), int(match[2] or 1)
