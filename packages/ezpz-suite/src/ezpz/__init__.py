"""Write a PyTorch training script once; run it, unchanged, from a laptop to a supercomputer.

Importing ``ezpz`` loads nothing: each name is fetched from its package when it is first
used, and kept.
"""

from ._names import HOMES, MODULES, unknown
from ._version import __version__

__all__ = ["__version__", *HOMES, *MODULES]  # noqa: PLE0604  # all are strings


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in MODULES:
        return import_module(f"{__name__}.{name}")
    home = HOMES.get(name)
    if home is None:
        raise unknown(__name__, name, [*HOMES, *MODULES])
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES, *MODULES})
