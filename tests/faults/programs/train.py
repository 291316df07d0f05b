"""A training script under ezpz_dist, in which one rank fails.

usage: train.py FOLDER (raises|hangs) RANK
"""

import sys
import time
from pathlib import Path

import ezpz_dist

folder, what, guilty = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
rank = ezpz_dist.setup_torch(timeout=60)


def load_batch():
    """Read what never comes."""
    time.sleep(100)  # the line that hangs


ezpz_dist.barrier()
if rank == guilty:
    (folder / "time").write_text(repr(time.time()))
    if what == "hangs":
        load_batch()
    raise ValueError("boo")
if what == "hangs":
    ezpz_dist.barrier(timeout=2)
load_batch()
