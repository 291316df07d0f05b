"""Host names: this host's own, and those of a PBS node file."""

from __future__ import annotations

import os

from ._errors import InvalidVariableError


def get_hostname() -> str:
    """Return this host's name as the kernel has it (what ``hostname`` prints)."""
    return os.uname().nodename


def short_name(host: str) -> str:
    """Return the part before the first dot: the suffix differs between PBS and ``hostname``."""
    return host.partition(".")[0]


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
