"""``python -m ezpz_launch``: the same as ``ezpz-launch``."""

from ._cli import console

console()
