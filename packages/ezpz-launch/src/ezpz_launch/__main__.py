"""``python -m ezpz_launch``: the same as ``ezpz-launch``."""

from ezpz_launch._cli import console

console()
