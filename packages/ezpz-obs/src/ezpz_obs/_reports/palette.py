"""Colours of plots: readable on white and on black, and told apart by colour-blind eyes."""

from __future__ import annotations

from typing import Final

INK: Final = "#010a01"
"""Stands for the colour of the text around the plot until the plot is written."""

LIGHT: Final = ("#0072b2", "#d55e00", "#00936b", "#3d3d46", "#c4639d")
"""Of the series, on white: at least 3.4 : 1 (after Okabe and Ito: blue, vermilion, green, ...)."""

DARK: Final = ("#56b4e9", "#f08a3c", "#2fc49a", "#e8e8ee", "#e0609f")
"""The same on near black: at least 5 : 1."""

ALARM: Final = ("#c8232c", "#ff6b6b")
"""What is wrong, light and dark."""

_STANDS_FOR: Final = tuple(f"#02{place:02x}0b" for place in range(len(LIGHT)))
_STANDS_FOR_ALARM: Final = "#030c03"

DASHES: Final = ("-", (0, (5, 1.6)), (0, (1.2, 1.4)), (0, (6, 1.5, 1.2, 1.5)))
"""Of the series too, so that colour is never the only thing that tells."""


def colour(place: int) -> str:
    """Return what stands for the colour of the series at this place until `to_variables`."""
    return _STANDS_FOR[place % len(_STANDS_FOR)]


def alarm() -> str:
    """Return what stands for the colour of what is wrong."""
    return _STANDS_FOR_ALARM


def to_variables(svg: str) -> str:
    """Replace what stands for colours by ``currentColor`` and variables of `style`."""
    svg = svg.replace(INK, "currentColor").replace(_STANDS_FOR_ALARM, f"var(--alarm, {ALARM[0]})")
    for place, stands in enumerate(_STANDS_FOR):
        svg = svg.replace(stands, f"var(--series-{place}, {LIGHT[place]})")
    return svg


def style(selector: str) -> str:
    """Return the variables as CSS, for light and dark."""
    light, dark = (
        "".join(f"--series-{place}:{of}; " for place, of in enumerate(colours)) + f"--alarm:{alarm}"
        for colours, alarm in ((LIGHT, ALARM[0]), (DARK, ALARM[1]))
    )
    return (
        f"{selector} {{ {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ {selector} {{ {dark} }} }}"
    )
