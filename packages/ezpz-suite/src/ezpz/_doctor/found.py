"""The checks that the installed packages contribute."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Final, NamedTuple

GROUP: Final = "ezpz.checks"
"""The group of entry points by which a package contributes checks."""


class DoctorError(Exception):
    """The doctor was asked for what it does not have, or found nothing to ask."""


class Check(NamedTuple):
    """One check, not loaded yet.

    Attributes:
        name: The entry point's.
        value: Where it is, as ``"package.module:function"``.
        package: The distribution that contributes it, with its version.
    """

    name: str
    value: str
    package: str

    @property
    def source(self) -> str:
        """The distribution and the object, for people."""
        return f"{self.package} ({self.value})"


def find_checks(only: Sequence[str] = ()) -> list[Check]:
    """Return the checks of all installed packages, by name; nothing of theirs is imported.

    Args:
        only: Names of those to return; all if empty.

    Raises:
        DoctorError: No package has a check, or none has one of these names.
    """
    checks = sorted(map(_check_of, entry_points(group=GROUP)))
    if not checks:
        raise DoctorError(
            f"no installed package has an entry point of the group {GROUP}; expected those of "
            "ezpz-topo and its siblings; install them again: pip install --force-reinstall "
            "ezpz-suite"
        )
    names = {check.name for check in checks}
    for name in only:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]}?" if close else "see ezpz doctor --list"
            raise DoctorError(
                f"no check is called {name!r}; expected one of {', '.join(sorted(names))}; {hint}"
            )
    return [check for check in checks if not only or check.name in only]


def _check_of(entry: EntryPoint) -> Check:
    whose = entry.dist
    package = "unknown" if whose is None else f"{whose.name} {whose.version}"
    return Check(entry.name, entry.value, package)
