"""Train until a signal asks for a checkpoint; started again, a few steps more, and that is all.

usage: resumed.py FOLDER [STEPS]     FOLDER: one that every rank sees; STEPS: so many, undisturbed

Rank 0 adds a line a step to FOLDER/losses: the step, the loss to the last bit, and which attempt.
"""

import os
import sys
import time
from pathlib import Path

import torch

import ezpz_dist

MORE = 5

folder, steps = Path(sys.argv[1]), [int(word) for word in sys.argv[2:]]
rank = ezpz_dist.setup_torch(backend="gloo", seed=7)
model = ezpz_dist.wrap_model(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = {"model": model, "optimizer": optimizer}
loaded = ezpz_dist.load_checkpoint(folder / "checkpoints", **state)
done = loaded.step if loaded else 0
last = steps[0] if steps else done + MORE if loaded else sys.maxsize


def save(step):
    ezpz_dist.save_checkpoint(folder / "checkpoints", step=step, **state)


# Started again it is not to be asked, however slow the machine.
signals = ["SIGTERM"] if loaded else ["SIGUSR1", "SIGTERM"]
with ezpz_dist.SnapshotOnSignal(save, signals=signals, within=30) as snapshot:
    for step in range(done + 1, last + 1):
        batch = torch.randn(8, 16)  # of the stream that a checkpoint restores
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            with (folder / "losses").open("a") as file:
                file.write(f"{step} {loss.item().hex()} {os.environ['EZPZ_ATTEMPT']}\n")
        time.sleep(0 if steps else 0.1)
        snapshot.step(step)
ezpz_dist.cleanup()
