"""``python -m ezpz``: the same as ``ezpz``."""

import sys

from ._cli import main

sys.exit(main())
