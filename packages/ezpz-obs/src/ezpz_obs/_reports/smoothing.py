"""What a curve looks like: smoothed, and in which frame."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .series import FROM, GREATEST, LEAST, MEAN, TO, Floats

_FEW = 24
"""Points that need no smoothing."""
_FAR = 20.0
"""So many times the range of nearly all values beyond it, a value is an outlier."""
_DECADES = 3.0
_LITTLE = 0.004
"""A learning rate's corners are no noise: below this part of the range nothing is smoothed."""


def smooth(table: Floats) -> Floats | None:
    """Return the buckets' means without their noise; None where there is none to speak of.

    At each point a line is fitted to all, their weights falling off exponentially to both sides.
    Unlike a moving average's, such a curve does not lag behind: a straight line stays what it is,
    up to its ends. What is no number leaves a gap.
    """
    means = table[MEAN]
    if len(means) < _FEW:
        return None
    known = np.isfinite(means)
    scale = float(np.abs(means[known]).max(initial=0.0)) or 1.0
    values = np.where(known, means, 0.0) / scale  # squares of 1e200 are no doubles
    if known.sum() < _FEW or _noise(values[known]) < _LITTLE * float(np.ptp(values[known])):
        return None
    places = np.arange(len(means), dtype=np.float64)
    away = (places - places[:, None]) / max(2.5, len(means) / 60)
    weight = np.exp(-np.abs(away)) * known
    # A line's value at its middle by least squares, from the weighted moments.
    one, first, second = weight.sum(1), (weight * away).sum(1), (weight * away**2).sum(1)
    of, along = weight @ values, (weight * away) @ values
    bare = one * second - first**2
    with np.errstate(invalid="ignore", divide="ignore"):
        line = np.where(bare > 1e-9 * one**2, (second * of - first * along) / bare, of / one)
    return np.where(known, line * scale, np.nan)


def _noise(values: Floats) -> float:
    """Return the standard deviation of what has no course, from each value's two neighbours."""
    return float(np.median(np.abs(np.diff(values, 2)))) / (0.6745 * 6**0.5)


def reach(tables: Sequence[Floats]) -> tuple[float, float]:
    """Return the first and last step of all curves."""
    known = [table for table in tables if table.shape[1]]
    if not known:
        return 0.0, 1.0
    return (
        min(float(table[FROM].min()) for table in known),
        max(float(table[TO].max()) for table in known),
    )


def limits(tables: Sequence[Floats]) -> tuple[float, float, bool, bool]:
    """Return the frame: lower and upper end, whether logarithmic, whether something is outside."""
    means = np.concatenate([table[MEAN] for table in tables])
    means = means[np.isfinite(means)]
    if not len(means):
        return 0.0, 1.0, False, False
    least = min(float(np.nanmin(table[LEAST])) for table in tables if _known(table))
    greatest = max(float(np.nanmax(table[GREATEST])) for table in tables if _known(table))
    usual_low, usual_high = (float(q) for q in np.quantile(means, (0.02, 0.98), method="nearest"))
    usual = usual_high / 2 - usual_low / 2  # halves: twice the largest double is none
    if usual_low > 0 and least > 0 and math.log10(usual_high) - math.log10(usual_low) > _DECADES:
        return least / 1.2, min(greatest * 1.2, 1e308), True, False
    low, high = least, greatest
    if usual > 0:
        low = max(low, usual_low - 2 * _FAR * usual)
        high = min(high, usual_high + 2 * _FAR * usual)
    outside = low > least or high < greatest
    if outside:
        # The outlier would hide everything else: show what is usual.
        low = usual_low - usual if low > least else low
        high = usual_high + usual if high < greatest else high
    half = high / 2 - low / 2
    pad = 0.12 * half if half > 0 else 0.05 * abs(high) or 0.5
    return max(low - pad, -1.7e308), min(high + pad, 1.7e308), False, outside


def _known(table: Floats) -> bool:
    return bool(np.isfinite(table[MEAN]).any())
