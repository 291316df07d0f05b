"""Names, numbers and times as reports say them."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final

from ezpz_topo import redact


def clean(text: object) -> str:
    """Return a text in one line, without secrets: what cannot be seen is written as its escape."""
    # Line ends, terminal codes and marks that turn the direction of writing are among that.
    said = redact(str(text))
    if said.isprintable():
        return said
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in said
    )


def shorten(text: object, limit: int = 60) -> str:
    """Return a text as `clean` does, its middle left out where it is longer than ``limit``."""
    said = clean(text)
    if len(said) <= limit:
        return said
    tail = (limit - 1) // 3
    return f"{said[: limit - 1 - tail]}…{said[-tail:]}"


def distinct(names: list[str], paths: list[str]) -> list[str]:
    """Return labels for runs, with what tells them apart where several have one name."""
    pairs = zip(names, paths, strict=True)
    labels = [f"{name} ({path})" if names.count(name) > 1 else name for name, path in pairs]
    return [
        f"{label} #{place + 1}" if labels.count(label) > 1 else label
        for place, label in enumerate(labels)
    ]


NOTHING: Final = "\N{EN DASH}"  # stands in a table where there is nothing to say
TIMES: Final = "\N{MULTIPLICATION SIGN}"
_MINUS: Final = "\N{MINUS SIGN}"
_SPANS: Final = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def number(value: float | None, digits: int = 4) -> str:
    if value is None:
        return NOTHING
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else f"{_MINUS}∞"
    if float(value).is_integer() and abs(value) < 1e9:
        return f"{int(value):,}".replace("-", _MINUS)
    if 1e3 <= abs(value) < 1e9:
        return f"{value:,.0f}".replace("-", _MINUS)
    return f"{value:.{digits}g}"


def share(value: float) -> str:
    return f"{100 * value:.3g} %"


def seconds(value: float | None) -> str:
    if value is None or math.isnan(value):
        return NOTHING
    if value < 60:
        for factor, unit in ((1.0, "s"), (1e3, "ms")):
            if value * factor >= 0.9995:
                return f"{value * factor:.3g} {unit}"
        return f"{value * 1e6:.3g} µs"
    for (size, unit), (below, unit_below) in pairwise(_SPANS):
        if value >= size:
            whole, rest = divmod(round(value / below), round(size / below))
            return f"{whole} {unit}" + (f" {rest} {unit_below}" if rest else "")
    return f"{value:.0f} s"


def moment(value: object) -> str:
    """Return seconds since 1970 as a date and time of day, UTC; NOTHING where they are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NOTHING
    try:
        return f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return NOTHING


def compact(value: float) -> str:
    """Return a number in few letters, for the axes of plots: 20k, 1.5M, 3e-05."""
    text = f"{abs(value):.10g}"
    for size, least, unit in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e3, 1e4, "k")):
        if least <= abs(value) < 1e15:
            text = f"{abs(value) / size:.10g}{unit}"
            break
    return f"{_MINUS}{text}" if value < 0 else text
