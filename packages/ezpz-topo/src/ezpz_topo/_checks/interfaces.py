"""Which interfaces a variable chooses: each library has a form of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

VARIABLES = {
    "NCCL_SOCKET_IFNAME": "prefixes",
    "GLOO_SOCKET_IFNAME": "names",
    "TP_SOCKET_IFNAME": "names",
    "CCL_KVS_IFACE": "names",
    "FI_TCP_IFACE": "names",
}
"""Variable to its form: NCCL's documentation, "Environment variables"; torch.distributed's,
"Common environment variables"; oneCCL's; libfabric's fi_tcp(7)."""


class Choice(NamedTuple):
    """What a variable leaves.

    Attributes:
        names: The interfaces of this host that are chosen.
        missing: What was asked for by name and is not here.
    """

    names: tuple[str, ...]
    missing: tuple[str, ...] = ()


def chosen(form: str, text: str, interfaces: Sequence[str]) -> Choice:
    """Return which of these interfaces a variable's value chooses.

    NCCL's form: a list of prefixes, ``=`` before it for whole names, ``^`` for all but these. The
    first that are here do; so only where none is here, all are missing. The others want each.

    >>> chosen("prefixes", "^lo,docker", ["lo", "eth0"]).names
    ('eth0',)
    """
    if form == "names":
        words = [word.strip() for word in text.split(",") if word.strip()]
        missing = tuple(word for word in words if word not in interfaces)
        return Choice(tuple(word for word in words if word in interfaces), missing)
    excluded, exact = text.startswith("^"), text.lstrip("^").startswith("=")
    words = [word for word in text.lstrip("^=").split(",") if word]
    hit = [
        name
        for name in interfaces
        if any(name == word if exact else name.startswith(word) for word in words)
    ]
    if excluded:
        return Choice(tuple(name for name in interfaces if name not in hit))
    return Choice(tuple(hit), () if hit else tuple(words))
