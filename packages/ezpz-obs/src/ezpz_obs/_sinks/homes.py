"""Where libraries may keep their own files, where the home cannot be written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def give_home(folder: Path | None, variables: Mapping[str, str]) -> None:
    """Set variables that name folders of a library's own; only for a process of ours.

    Compute nodes of some machines have a home that is read-only, or none.

    Args:
        folder: The run's; None: a temporary one.
        variables: Name to a folder's name in it. Those that are set already stay.
    """
    if _can_write(Path(os.path.expanduser("~"))):
        return
    base = Path(tempfile.mkdtemp(prefix="ezpz-obs-")) if folder is None else folder
    for variable, name in variables.items():
        os.environ.setdefault(variable, str((base / name).absolute()))


def _can_write(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
