"""Alarms: a metric that is not finite, or jumps."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

_NO_LIMIT = sys.float_info.max
_REFRESH = 16  # records between two looks at the window: 6 us shared by so many
_IQR_OF_NORMAL = 1.349  # interquartile range of a normal distribution, in standard deviations


@dataclass(eq=False, repr=False)
class Alarms:
    """Watch one metric: say so when it is NaN or infinite, or jumps above what it was.

    A jump (a loss spike) is a value above ``median + deviations * spread`` of the last ``window``
    values, and above the median by ``rise`` of it too. The spread is the interquartile range over
    1.349 (the standard deviation of a normal distribution, and not moved by outliers). So a slow
    drift, a constant, noise and the steep descent of the first steps are no alarm. While the
    descent is in the window, only a larger jump is one. The values of a jump do not enter the
    window, until there are ``window`` of them. Then they are the new normal.

    A jump that lasts is one alarm. The next needs ``cooldown`` records without a reason before.

    Give it to a `History`, which logs what it says and writes it down: ``alarms=[Alarms("loss")]``.

    >>> alarms = Alarms("loss")
    >>> alarms.check({"step": 3, "loss": 2.5})
    >>> alarms.check({"step": 4, "loss": float("nan")})
    'loss is nan at step 4; before that 2.5'

    Args:
        metric: Its name in the records; of a History's nested metrics ``"train/loss"``.
        deviations: How far above the median, in the window's spreads; ``inf``: only what is not
            finite is an alarm.
        rise: How far above it, as a part of it: 0.1 is 10 %.
        window: How many records are looked at.
        warmup: Records before a jump can be told; at most ``window``.
        cooldown: Records without a reason before the next alarm.

    Raises:
        ValueError: An argument is out of its range.
    """

    metric: str = "loss"
    _: KW_ONLY
    deviations: float = 10.0
    rise: float = 0.1
    window: int = 128
    warmup: int = 64
    cooldown: int = 100

    def __post_init__(self) -> None:
        if not self.deviations > 0:
            raise ValueError(f"deviations={self.deviations}; expected a number above 0")
        if not self.rise >= 0:
            raise ValueError(f"rise={self.rise}; expected 0 or more, such as 0.1 for 10 %")
        if not 8 <= self.warmup <= self.window:
            raise ValueError(
                f"warmup={self.warmup}, window={self.window}; expected 8 <= warmup <= window"
            )
        if self.cooldown < 1:
            raise ValueError(f"cooldown={self.cooldown}; expected 1 or more records")
        self._values: deque[float] = deque(maxlen=self.window)
        self._limit = _NO_LIMIT
        self._median = math.nan
        self._until_refresh = self.warmup
        # The alarm that goes on: records since its last reason, its values above the limit.
        self._calm = 0
        self._high = 0
        self._is_on = False
        self._absent: int | None = 0

    def check(self, record: Mapping[str, Any]) -> str | None:
        """Return what is wrong, or None; half a microsecond.

        Args:
            record: Metrics by name; ``step`` is named in the message.
        """
        value = record.get(self.metric)
        # False for NaN and both infinities too.
        if type(value) is float and -_NO_LIMIT <= value <= self._limit and not self._is_on:
            self._values.append(value)
            self._until_refresh -= 1
            if not self._until_refresh:
                self._refresh()
            return None
        return self._check_slowly(value, record)

    def _check_slowly(self, value: Any, record: Mapping[str, Any]) -> str | None:
        if value is None:
            return self._count_absent(record)
        self._absent = None
        value = float(value)
        before = self._values[-1] if self._values else None
        if not math.isfinite(value):
            return self._alarm(
                f"{self.metric} is {value} at {_place(record)}"
                + ("" if before is None else f"; before that {before:.6g}")
            )
        if value > self._limit:
            limit, median = self._limit, self._median
            self._high += 1
            if self._high > self.window:
                # This is no jump any more: begin again.
                self._values.clear()
                self._limit, self._high, self._until_refresh = _NO_LIMIT, 0, self.warmup
            return self._alarm(
                f"{self.metric} jumped to {value:.6g} at {_place(record)}; the median of the last "
                f"{len(self._values)} records is {median:.6g}, and {limit:.6g} the most expected"
            )
        self._calm += 1
        if self._calm >= self.cooldown:
            self._is_on, self._high = False, 0
        self._values.append(value)
        self._until_refresh -= 1
        if self._until_refresh <= 0:
            self._refresh()
        return None

    def _alarm(self, message: str) -> str | None:
        was_on, self._is_on, self._calm = self._is_on, True, 0
        return None if was_on else message

    def _refresh(self) -> None:
        self._absent = None
        self._until_refresh = _REFRESH
        values = sorted(self._values)
        count = len(values)
        self._median = median = values[count // 2]
        spread = (values[count * 3 // 4] - values[count // 4]) / _IQR_OF_NORMAL
        margin = max(self.deviations * spread, self.rise * abs(median))
        # Without spread and around zero there is no scale to measure a jump by.
        self._limit = min(median + margin, _NO_LIMIT) if margin > 0 else _NO_LIMIT

    def _count_absent(self, record: Mapping[str, Any]) -> str | None:
        """Say once that nothing is watched, where no record has had the metric."""
        if self._absent is None or self._values:
            return None
        self._absent += 1
        if self._absent < self.warmup:
            return None
        self._absent = None
        names = ", ".join(name for name in record if name not in {"step", "time", "replay"})
        return (
            f"no record of {self.warmup} has {self.metric!r}, so nothing is watched; the last "
            f"has {names or 'no metrics'}"
        )


def _place(record: Mapping[str, Any]) -> str:
    step = record.get("step")
    return "some step" if step is None else f"step {step}"
