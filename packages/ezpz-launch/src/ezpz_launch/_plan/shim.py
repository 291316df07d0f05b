"""The shim that every rank starts with, and the variables that are packed for it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

PROGRAMS = os.path.join(_PACKAGE, "_run")
"""The folder of the programs that run beside the ranks."""

SHIM = os.path.join(PROGRAMS, "rank_shim.sh")

ESCAPE = "+"
"""Put before every word of a command that holds a launcher's own separator."""

_RESET_BY_SH = (
    "BASHOPTS", "IFS", "LINENO", "OPTERR", "OPTIND", "PPID", "PS1", "PS2", "PS4", "SHELLOPTS",
)  # fmt: skip
"""Variables that dash 0.5.12, or bash 5.2 as sh, sets or drops whatever its environment has."""


def is_sh_name(name: str) -> bool:
    """True if sh can hold a variable of this name; dash drops all others."""
    return re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) is not None


def pack_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return variables from which `rank_shim.sh` restores those that sh does not pass on."""
    packed: dict[str, str] = {}
    for name in sorted(env):
        if name and (not is_sh_name(name) or name in _RESET_BY_SH):
            # One for each: Linux takes no more than 128 KiB in one.
            packed[f"EZPZ_CONTROL_{len(packed) + 1}"] = f"{name}={env[name]}"
    return packed
