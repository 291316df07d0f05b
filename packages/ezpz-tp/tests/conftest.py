"""What the test modules share can be imported by its name, here and in the ranks' processes."""

import sys
from pathlib import Path

from ezpz_tp.testing import assert_matches_unsharded, run_ranks

sys.path.insert(0, str(Path(__file__).parent))
# A test that hangs is ended as any other is: a busy machine needs longer than users' tests have.
for each in (run_ranks, assert_matches_unsharded):
    each.__kwdefaults__["timeout"] = 550.0
