"""Host names: this host's own, the first of a nodelist, those of a PBS node file."""

from __future__ import annotations

import os

from ._errors import InvalidVariableError


def get_hostname() -> str:
    """Return this host's name as the kernel has it (what ``hostname`` prints)."""
    return os.uname().nodename


def short_name(host: str) -> str:
    """Return the part before the first dot: the suffix differs between PBS and ``hostname``."""
    return host.partition(".")[0]


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm nodelist: ``nid[001-004,9]`` gives ``nid001``.

    Whatever order Slurm expands several brackets in, the first host takes the low end of
    the first range of each.

    Raises:
        InvalidVariableError: The list is empty, or a bracket is unclosed, nested or empty.
    """
    host, rest = "", nodelist
    while rest:
        plain, bracket, rest = _split_at(rest, "[, \t")
        host += plain
        if bracket != "[":
            break
        inside, closed, rest = rest.partition("]")
        low = inside.split(",")[0].split("-")[0]
        if not closed or not low.isdigit():
            raise InvalidVariableError(
                f"nodelist {nodelist[:80]!r}: the bracket after {host!r} does not parse; "
                "expected ranges such as nid[001-004,007]"
            )
        host += low
    if not host:
        raise InvalidVariableError(f"nodelist {nodelist[:80]!r} names no host at its start")
    return host


def _split_at(text: str, stops: str) -> tuple[str, str, str]:
    for index, char in enumerate(text):
        if char in stops:
            return text[:index], char, text[index + 1 :]
    return text, "", ""


def hosts_of_node_file(path: str) -> tuple[str, ...]:
    """Return the hosts of a ``PBS_NODEFILE`` in order, each once.

    The file has one line per MPI slot, so a host can stand there many times.

    Raises:
        InvalidVariableError: The file cannot be read, or names no host.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidVariableError(
            f"PBS_NODEFILE={path!r} cannot be read ({error}); expected the job's node file; "
            "run on a node of the job"
        ) from error
    hosts = tuple(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
    if not hosts:
        raise InvalidVariableError(f"PBS_NODEFILE={path!r} is empty; expected one host a line")
    return hosts
