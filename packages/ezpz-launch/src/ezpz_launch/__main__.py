"""``python -m ezpz_launch`` is ``ezpz-launch``."""

import sys

from ._cli import main

sys.exit(main())
