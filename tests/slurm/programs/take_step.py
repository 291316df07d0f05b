"""Set up, meet whoever else is, add up the ranks, and report how it went into a directory."""

import argparse
import json
import logging
import os
import sys
import time
from pathlib import Path

import ezpz_dist

PATIENCE = 300  # seconds, of which an idle machine needs five

parser = argparse.ArgumentParser()
parser.add_argument("directory", type=Path)
parser.add_argument("count", type=int, help="go on when that many, of any step, are set up at once")
parser.add_argument("meeting", type=Path)
args = parser.parse_args()

logging.basicConfig(level=logging.INFO, stream=sys.stderr)
rank = ezpz_dist.setup_torch(seed=1, timeout=300)
step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
(args.meeting / f"{step}-{rank}").touch()
deadline = time.monotonic() + PATIENCE
while len(list(args.meeting.iterdir())) < args.count:
    if time.monotonic() > deadline:
        sys.exit(f"{step}, rank {rank}: the others are not set up within {PATIENCE} s")
    time.sleep(0.01)
said = {
    "rank": rank,
    "step": step,
    "address": f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
    "sums": [ezpz_dist.all_reduce(1), ezpz_dist.all_reduce(rank)],
}
ezpz_dist.cleanup()
(args.directory / f"{os.getpid()}.json").write_text(json.dumps(said), encoding="utf-8")
