"""``python -m ezpz_launch``: the same as ``ezpz-launch``."""

from ._console import main

main()
