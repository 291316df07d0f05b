"""Under ezpz_dist one rank fails. usage: train.py FOLDER (raises|lingers) RANK"""

import atexit
import os
import sys
import time
from pathlib import Path

import ezpz_dist

folder, what, guilty = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])


if what == "lingers":
    # As what CUDA, NCCL or W&B do at the end.
    atexit.register(time.sleep, 5 if int(os.environ["RANK"]) == guilty else 0)
rank = ezpz_dist.setup_torch(timeout=300)
ezpz_dist.barrier()
if rank == guilty:
    (folder / "time").write_text(repr(time.time()))
    raise ValueError("boo")
time.sleep(600)
