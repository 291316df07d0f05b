"""Names, numbers and times as reports write them."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Final

from ezpz_topo import redact

NOTHING: Final = "\N{EN DASH}"  # in a cell without a value
TIMES: Final = "\N{MULTIPLICATION SIGN}"
_MINUS: Final = "\N{MINUS SIGN}"
_UNITS: Final = ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))
"""From which size, its divisor, and the unit: 8,000 stays as it is."""


def clean(text: object) -> str:
    """Return a text in one line, without secrets: what cannot be seen is written as its escape."""
    # Line ends, terminal codes and marks that turn the direction of writing are among that.
    redacted = redact(str(text))
    if redacted.isprintable():
        return redacted
    letters = []
    for letter in redacted:
        if letter.isprintable():
            letters.append(letter)
        else:
            letters.append(letter.encode("unicode_escape").decode())
    return "".join(letters)


def shorten(text: object, limit: int = 60) -> str:
    """Return a text as `clean` does, its middle left out where it is longer than ``limit``."""
    whole = clean(text)
    if len(whole) <= limit:
        return whole
    tail = (limit - 1) // 3
    return f"{whole[: limit - 1 - tail]}…{whole[-tail:]}"


def format_number(value: float | None, digits: int = 4) -> str:
    """Return a number for a table: ``1,234``, ``0.2534``, ``1e-07``."""
    if value is None:
        return NOTHING
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return f"{_MINUS}∞" if value < 0 else "∞"
    if float(value).is_integer() and abs(value) < 1e9:
        text = f"{int(value):,}"
    elif 1e3 <= abs(value) < 1e9:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.{digits}g}"
    if text.startswith("-"):
        return f"{_MINUS}{text[1:]}"
    return text


def format_share(value: float) -> str:
    return f"{100 * value:.3g} %"


def format_seconds(value: float | None) -> str:
    """Return a duration: ``30 µs``, ``12.3 ms``, ``1 h 7 min``."""
    if value is None or math.isnan(value):
        return NOTHING
    if value < 60:
        return _below_a_minute(value)
    if value < 3600:
        return _two_units(value, 60, "min", "s")
    if value < 86_400:
        return _two_units(value / 60, 60, "h", "min")
    return _two_units(value / 3600, 24, "d", "h")


def _below_a_minute(value: float) -> str:
    if value < 0.9995e-3:
        return f"{value * 1e6:.3g} µs"
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s"


def _two_units(value: float, size: int, unit: str, small_unit: str) -> str:
    whole, rest = divmod(round(value), size)
    if not rest:
        return f"{whole} {unit}"
    return f"{whole} {unit} {rest} {small_unit}"


def format_time(value: object) -> str:
    """Return seconds since 1970 as a date and time of day, UTC; NOTHING where they are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NOTHING
    try:
        return f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return NOTHING


def format_tick(value: float) -> str:
    """Return a number in few letters, for the axes of plots: 20k, 1.5M, 3e-05."""
    size = abs(value)
    text = f"{size:.10g}"
    for least, divisor, unit in _UNITS:
        if least <= size < 1e15:
            text = f"{size / divisor:.10g}{unit}"
            break
    if value < 0:
        return f"{_MINUS}{text}"
    return text
