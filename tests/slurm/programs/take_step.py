"""Set up, train one step with DDP, and report how it went into a directory."""

import argparse
import json
import logging
import os
import sys
import time
from pathlib import Path

import torch

import ezpz_dist

parser = argparse.ArgumentParser()
parser.add_argument("directory", type=Path)
parser.add_argument("--timeout", type=float, default=60)
parser.add_argument(
    "--fail", nargs=2, type=int, metavar=("RANK", "STATUS"), help="that rank leaves after set-up"
)
parser.add_argument(
    "--meet",
    nargs=2,
    metavar=("COUNT", "DIRECTORY"),
    help="go on when that many processes, of any step, are set up at the same time",
)
args = parser.parse_args()

logging.basicConfig(level=logging.INFO, stream=sys.stderr)
rank = ezpz_dist.setup_torch(seed=1, timeout=args.timeout)
address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
if args.fail and args.fail[0] == rank:
    sys.exit(args.fail[1])
if args.meet:
    count, directory = int(args.meet[0]), Path(args.meet[1])
    (directory / f"{step}-{rank}").touch()
    deadline = time.monotonic() + 30
    while len(list(directory.iterdir())) < count:
        if time.monotonic() > deadline:
            sys.exit(f"{step}, rank {rank}: the others are not set up within 30 s")
        time.sleep(0.01)

ranks = ezpz_dist.all_reduce(1)
sum_of_ranks = ezpz_dist.all_reduce(rank)
model = ezpz_dist.wrap_model(torch.nn.Linear(3, 1, bias=False))
(weight,) = model.parameters()
before = weight.detach().clone()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
# The gradient of each weight is this rank's input; DDP takes the mean over the ranks.
model(torch.full((1, 3), float(rank))).sum().backward()
optimizer.step()
moved = (before - weight.detach()).mean().item()
largest = ezpz_dist.all_reduce(weight.detach(), op="max")
smallest = ezpz_dist.all_reduce(weight.detach(), op="min")
ezpz_dist.cleanup()
said = {
    "rank": rank,
    "ranks": ranks,
    "sum_of_ranks": sum_of_ranks,
    "moved": moved,
    "same_weights": torch.equal(largest, smallest),
    "address": address,
    "step": step,
    "node": os.environ["SLURMD_NODENAME"],
    "group_is_gone": not torch.distributed.is_initialized(),
}
(args.directory / f"{os.getpid()}.json").write_text(json.dumps(said), encoding="utf-8")
