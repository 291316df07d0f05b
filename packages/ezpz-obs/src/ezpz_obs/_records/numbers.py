"""What users call a metric, as plain numbers by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

Number = int | float | bool

RESERVED = frozenset({"step", "time", "replay", "event", "ezpz_obs", "crc"})
"""Names of the file's own: no metric may have one."""

PLAIN = frozenset({int, float, bool})
"""The types that JSON takes as they are."""


def flatten(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics under flat names, ``{"train": {"loss": 1}}`` as ``{"train/loss": 1}``.

    The values are plain numbers, or tensors that lie on a device: those are for `fetch`.

    Raises:
        TypeError: A name is no string, or a value is no number.
        ValueError: A name is one of the file's own, empty, or given twice.
    """
    flat: dict[str, Any] = {}
    for name, value in _leaves(metrics, ""):
        if name in RESERVED:
            raise ValueError(
                f"a metric called {name!r}; expected another name: History writes one of its own"
            )
        if name in flat:
            raise ValueError(f"two metrics called {name!r}; expected each name once")
        flat[name] = (
            value if type(value) in PLAIN or is_on_device(value) else to_number(name, value)
        )
    return flat


def _leaves(metrics: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in metrics.items():
        if not isinstance(key, str):
            raise TypeError(f"a metric called {key!r}; expected its name to be a string")
        if not key:
            raise ValueError(f"a metric of {prefix or 'the step'!r} has no name; expected one")
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}/")
        else:
            # A subclass of str is none to the encoder.
            yield f"{prefix}{key}", value


def to_number(name: str, value: Any) -> Number:
    """Return one number, of anything that holds one: 0-d arrays and tensors, numpy's scalars.

    Raises:
        TypeError: It holds none, or several.
    """
    if isinstance(value, str | bytes):
        raise TypeError(f"metric {name!r} is {value!r:.60}; expected a number")
    if type(value) not in PLAIN:
        # numpy's float64 is a float to Python, and not to the encoder.
        item = getattr(value, "item", None)
        masked = sys.modules.get("numpy.ma")
        if masked is not None and masked.is_masked(value):
            return float("nan")  # its `item` is a number that is none
        try:
            value = item() if callable(item) else value
        except (ValueError, RuntimeError) as error:  # numpy's and torch's, of several elements
            raise TypeError(f"metric {name!r} is not one number: {error}") from error
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"metric {name!r} is a {type(value).__name__}; expected a number")


def is_on_device(value: Any) -> bool:
    """Say whether this is a tensor whose number would have to be waited for."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return False
    return bool(value.device.type not in ("cpu", "meta"))


def as_float(value: float) -> float:
    """Return a number as a double; an integer beyond 1.8e308 as an infinity."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
