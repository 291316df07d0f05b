"""Write a PyTorch training script once; run it, unchanged, from a laptop to a supercomputer.

Importing ``ezpz`` loads nothing: each name is fetched from its package when it is first
used, and kept.
"""

from ._names import HOMES
from ._version import __version__

__all__ = ["__version__", *HOMES]  # noqa: PLE0604  # HOMES maps strings to strings


def __getattr__(name: str) -> object:
    home = HOMES.get(name)
    if home is None:
        raise AttributeError(_unknown(name))
    import importlib

    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})


def _unknown(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, HOMES, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"module 'ezpz' has no attribute {name!r}{hint}"
