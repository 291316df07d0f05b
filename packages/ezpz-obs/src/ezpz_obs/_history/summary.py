"""One line that says a step's metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .names import STATISTICS

_LEFT_OUT = {"time", "replay"}


def summarize(record: Mapping[str, Any]) -> str:
    """Return ``step=3 loss=0.25 lr=0.001``; with statistics ``loss=0.26±0.03``, of all ranks.

    >>> summarize({"step": 3, "time": 0.0, "loss": 0.25, "tokens": 4096})
    'step=3 loss=0.25 tokens=4096'
    """
    parts = []
    for name, value in record.items():
        if type(value) is float:
            if name != "time":
                parts.append(f"{name}={value:.4g}")
        elif name not in _LEFT_OUT:
            parts.append(f"{name}={value}")
    return " ".join(parts)


def summarize_ranks(record: Mapping[str, Any], statistics: Mapping[str, Any]) -> str:
    """Return the line of a record that has statistics: ``step=3 loss=0.26±0.03``."""
    parts = []
    for name, value in record.items():
        if f"{name}/mean" in statistics:
            mean, std = statistics[f"{name}/mean"], statistics[f"{name}/std"]
            parts.append(f"{name}={mean:.4g}" + (f"±{std:.2g}" if std else ""))
        elif name not in _LEFT_OUT and name.rpartition("/")[2] not in STATISTICS:
            parts.append(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}")
    return " ".join(parts)
