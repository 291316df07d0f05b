"""Where in the user's code something happens."""

from __future__ import annotations

import linecache
import os
import sys
from pathlib import Path

import torch

_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).resolve().parent) + os.sep
# Not the standard library's: a call through it (contextlib, functools) is nobody's line.
_STANDARD = str(Path(linecache.__file__).resolve().parent) + os.sep


def is_foreign(path: str) -> bool:
    """Whether a file is torch's, this package's or the standard library's."""
    if path.startswith((_OURS, _TORCH, "<frozen")):
        return True
    return path.startswith(_STANDARD) and "site-packages" not in path


def user_line() -> str:
    """Return ``file:line, in function`` and the source of the innermost line of the user's."""
    frame = sys._getframe(1)  # noqa: SLF001 - as traceback.walk_stack does, without its list
    while frame.f_back is not None and is_foreign(frame.f_code.co_filename):
        frame = frame.f_back
    code = frame.f_code
    source = linecache.getline(code.co_filename, frame.f_lineno).strip()
    place = f"{code.co_filename}:{frame.f_lineno}, in {code.co_qualname}"
    return f"{place}\n    {source}" if source else place
