"""Programs on PATH."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping


def env_with_python_on_path(env: Mapping[str, str]) -> dict[str, str]:
    """Append this Python's folder to PATH: its environment may not be active."""
    path = os.pathsep.join([env.get("PATH", ""), os.path.dirname(sys.executable)])
    return {**env, "PATH": path}


def find_executables(name: str, env: Mapping[str, str]) -> list[str]:
    """Return all paths of a program, in the order of PATH, each once."""
    paths: list[str] = []
    for folder in env.get("PATH", "").split(os.pathsep):
        path = os.path.join(folder, name)
        is_executable = os.access(path, os.X_OK) and not os.path.isdir(path)
        if folder and is_executable and path not in paths:
            paths.append(path)
    return paths
