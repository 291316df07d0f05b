"""Slurm's nodelists: ``nid[001-004,9],login1`` to host names and back.

Grammar and order as ``scontrol show hostnames`` has them (Slurm 22.05.8), but what does not
parse is an error here, where Slurm returns rubbish (an unclosed bracket) or less than was
meant (``n[1-]``). Text after a bracket is legal from Slurm 23.02.5.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterable

from ._errors import NodelistError

MAX_HOSTS = 1 << 20
"""More hosts than this are refused before they are made; the largest machines have 10,000."""

_ITEM = r"(?:[^\s,\[\]]|\[[^\[\]]*\])+"
_BRACKET = r"\[([^\[\]]*)\]"
_RANGE = r"([0-9]{1,15})(?:-([0-9]{1,15}))?"


def expand_nodelist(nodelist: str, *, max_hosts: int = MAX_HOSTS) -> list[str]:
    """Return the host names of a Slurm nodelist, in Slurm's order, duplicates kept.

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
    if "[" not in nodelist and "]" not in nodelist:
        names = nodelist.replace(",", " ").split()
        if len(names) > max_hosts:
            raise NodelistError(
                f"nodelist {_shown(nodelist)} has {len(names)} hosts; expected at most "
                f"{max_hosts}; name fewer hosts"
            )
        return names
    hosts: list[str] = []
    for item, at in _items(nodelist):
        literals, ranges = _brackets(item, at, nodelist, len(hosts), max_hosts)
        hosts += _expand(literals, ranges)
    return hosts


def first_host(nodelist: str) -> str:
    """Return the first host of a nodelist without making the others.

    Raises:
        NodelistError: The list is empty, or its first name does not parse.
    """
    for item, at in _items(nodelist):
        literals, ranges = _brackets(item, at, nodelist, 0, float("inf"))
        lows = [f"{low:0{width}d}" for ((low, _, width), *_) in ranges]
        return "".join(part for pair in zip(literals, [*lows, ""], strict=True) for part in pair)
    raise NodelistError(f"nodelist {_shown(nodelist)} names no host")


def fold_nodelist(hosts: Iterable[str]) -> str:
    """Return a nodelist that expands to these hosts, in this order, duplicates kept.

    Neighbours that differ in their last number only are folded into ranges; a name that
    does not end in a number stands for itself, which every version of Slurm reads.

    Raises:
        NodelistError: A name is empty, or holds a comma, a bracket or white space.

    >>> fold_nodelist(["nid001", "nid002", "nid003", "nid7", "login"])
    'nid[001-003,7],login'
    """
    items: list[str] = []
    # A name without a number folds with none, whatever it begins with.
    for (prefix, numbered), group in itertools.groupby(
        map(_split_number, hosts), key=lambda split: (split[0], bool(split[1]))
    ):
        numbers = [number for _, number in group]
        if len(numbers) == 1 or not numbered:
            items += [f"{prefix}{number}" for number in numbers]
        else:
            items.append(f"{prefix}[{','.join(_runs(numbers))}]")
    return ",".join(items)


def _items(nodelist: str) -> Iterable[tuple[str, int]]:
    """Yield each name with its position; whatever is left over is an error."""
    name, at = re.compile(_ITEM), 0
    while at < len(nodelist):
        if nodelist[at] == "," or nodelist[at].isspace():
            at += 1
            continue
        match = name.match(nodelist, at)
        end = at if match is None else match.end()
        if end < len(nodelist) and nodelist[end] in "[]":
            what = "is not closed, or holds another" if nodelist[end] == "[" else "was not opened"
            raise NodelistError(
                f"nodelist {_shown(nodelist)}: the bracket at position {end}, "
                f"{nodelist[end : end + 20]!r}, {what}; expected ranges such as nid[001-004,007]"
            )
        yield nodelist[at:end], at
        at = end


_Pairs = list[tuple[int, int, int]]
"""(low, high, width) of each range of one bracket."""


def _brackets(
    item: str, at: int, nodelist: str, held: int, max_hosts: float
) -> tuple[list[str], list[_Pairs]]:
    """Return the text around the brackets of one name, and their ranges."""
    pieces, span = re.split(_BRACKET, item), re.compile(_RANGE)
    literals, insides = pieces[::2], pieces[1::2]
    ranges: list[_Pairs] = []
    count = 1
    for inside in insides:
        pairs: _Pairs = []
        for part in inside.split(","):
            match = span.fullmatch(part)
            low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if match is None or high < low:
                raise NodelistError(
                    f"nodelist {_shown(nodelist)}: {part[:20]!r} in the bracket [{inside[:20]}] of "
                    f"the name at position {at} is no range; expected low-high in decimal, "
                    "such as nid[001-004,007]"
                )
            pairs.append((low, high, len(match[1])))
        ranges.append(pairs)
        # After each bracket: ten thousand of them make a number that cannot be printed.
        count *= sum(high - low + 1 for low, high, _ in pairs)
        if held + count > max_hosts:
            raise NodelistError(
                f"nodelist {_shown(nodelist)}: {item[:40]!r} at position {at} brings it to "
                f"{held + count} hosts or more; expected at most {max_hosts}; name fewer hosts"
            )
    return literals, ranges


def _expand(literals: list[str], ranges: list[_Pairs]) -> list[str]:
    if not ranges:
        return literals
    if len(ranges) == 1:
        return _names(literals[0], ranges[0], literals[1])
    # The last bracket varies fastest, then the first, the second and so on.
    heads = _names(literals[0], ranges[0], literals[1])
    for pairs, literal in zip(ranges[1:-1], literals[2:-1], strict=True):
        heads = [head + slower for slower in _names("", pairs, literal) for head in heads]
    tails = _names("", ranges[-1], literals[-1])
    return list(itertools.starmap(operator.add, itertools.product(heads, tails)))


def _names(prefix: str, pairs: _Pairs, suffix: str) -> list[str]:
    """Return prefix, number, suffix for each number of one bracket."""
    # One % a name, called by map: half the time of an f-string in a comprehension.
    prefix, suffix = prefix.replace("%", "%%"), suffix.replace("%", "%%")
    names: list[str] = []
    for low, high, width in pairs:
        names += map(f"{prefix}%0{width}d{suffix}".__mod__, range(low, high + 1))
    return names


def _split_number(host: str) -> tuple[str, str]:
    if not host or any(char in ",[]" or char.isspace() for char in host):
        raise NodelistError(
            f"host name {host[:40]!r}; expected one without commas, brackets and white space"
        )
    stem = host.rstrip("0123456789")
    # More digits than a range may have are left as they are.
    return (stem, host[len(stem) :]) if len(host) - len(stem) <= 15 else (host, "")


def _runs(numbers: list[str]) -> Iterable[str]:
    """Yield ``001-003`` and ``7`` for 001, 002, 003, 7."""
    first = last = numbers[0]
    for number in numbers[1:]:
        if number == f"{int(last) + 1:0{len(first)}d}":
            last = number
            continue
        yield first if first == last else f"{first}-{last}"
        first = last = number
    yield first if first == last else f"{first}-{last}"


def _shown(nodelist: str) -> str:
    return repr(nodelist if len(nodelist) <= 60 else f"{nodelist[:57]}...")
