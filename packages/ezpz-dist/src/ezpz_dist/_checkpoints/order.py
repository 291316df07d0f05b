"""What a save is asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be written.

    Attributes:
        step: The step.
        contents: What there is.
        keep: How many to keep.
    """

    step: int
    contents: tuple[str, ...]
    keep: int | None
