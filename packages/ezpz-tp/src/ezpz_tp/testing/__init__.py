"""Run and check tensor-parallel code on ranks of this machine.

* `run_ranks` runs a function on several ranks, each a process.
* `counting` counts the collectives that a rank starts.
* `assert_matches_unsharded` compares a parallel module with an ordinary one, bit for bit.
"""

from ._compare import assert_matches_unsharded
from ._counting import counting
from ._ranks import run_ranks
from ._worker import RankError

__all__ = ["RankError", "assert_matches_unsharded", "counting", "run_ranks"]
