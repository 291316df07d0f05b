"""What must be the same on every rank: versions, and the script."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from typing import Any

import torch

_LIBRARIES = (
    "ezpz", "ezpz_device", "ezpz_dist", "ezpz_obs", "ezpz_topo", "ezpz_tp",
    "accelerate", "deepspeed", "lightning", "mpi4py", "numpy", "transformers",
)  # fmt: skip
"""Libraries whose version is compared between those ranks that have imported them already."""


def common_facts(**more: object) -> dict[str, Any]:
    """Return what must be the same on every rank: versions, the script, and what is given."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "packages": _versions(),
        "script": _script(),
        **more,
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = version
    return found


def _script() -> str:
    """Return the main script's name and a hash of its text."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None:
        if sys.argv[:1] != ["-c"]:
            return "no file"  # a notebook, standard input
        name, text = "python -c", sys.orig_argv[-len(sys.argv)].encode()
    else:
        name = os.path.basename(str(path))
        try:
            with open(path, "rb") as file:
                text = file.read()
        except OSError:
            return name  # a zip archive, or removed since
    return f"{name} {hashlib.blake2b(text, digest_size=4).hexdigest()}"
