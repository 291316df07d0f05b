"""Run and check tensor-parallel code on ranks of this machine.

* `run_ranks` runs a function on several ranks, as threads or as processes.
* `counting` counts the collectives that a rank starts.
* `assert_matches_unsharded` compares a parallel module with an ordinary one, bit for bit.
"""

from ._lattice import assert_matches_unsharded
from ._ranks import RankError, counting, run_ranks

__all__ = ["RankError", "assert_matches_unsharded", "counting", "run_ranks"]
