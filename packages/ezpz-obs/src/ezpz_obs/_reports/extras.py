"""What reports need beyond the package's own requirements."""

from __future__ import annotations

import importlib
from typing import Any

from ezpz_obs._errors import ReportError


def require(module: str, purpose: str, extra: str = "report") -> Any:
    """Import a module of an extra.

    Args:
        module: Its full name.
        purpose: What it is wanted for, as in "a report".
        extra: Of ezpz-obs.

    Raises:
        ReportError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ReportError(
            f"{purpose} needs {module.partition('.')[0]}, which cannot be imported ({error}); "
            f'expected it installed: pip install "ezpz-obs[{extra}]"'
        ) from error
