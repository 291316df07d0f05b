"""Train until told to end; started again, go on where all stopped. Usage: preempted.py STATE."""

import pathlib
import sys
import time

import torch

import ezpz_dist

path = pathlib.Path(sys.argv[1])
rank = ezpz_dist.setup_torch(timeout=60)
ranks = ezpz_dist.all_reduce(1)
state = ezpz_dist.load_on_one_rank(path) if path.exists() else {"step": -1, "sum": 0}
first = state["step"] + 1


def save(step):
    if rank == 0:
        torch.save(state, path)


with ezpz_dist.SnapshotOnSignal(save, within=30) as snapshot:
    # The second time a few steps are enough.
    for step in range(first, first + 5 if first else 1_000_000):
        state = {"step": step, "sum": state["sum"] + ezpz_dist.all_reduce(step)}
        time.sleep(0.01)
        pathlib.Path(f"step-{rank}").write_text(str(step))
        snapshot.step(step)
assert state["sum"] == ranks * sum(range(first + 5)), "no step was lost, none was done twice"
print(f"rank {rank} went on at {first}", flush=True)
