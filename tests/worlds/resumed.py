"""Train in as many jobs as it takes: a step a moment, a checkpoint where a signal asks for one.

usage: resumed.py FOLDER STEPS SECONDS     FOLDER: one that every rank sees; SECONDS: of each step

Rank 0 adds a line a step to FOLDER/losses: the step, the loss to the last bit, and which attempt.
"""

import os
import signal
import sys
import time
from pathlib import Path

# On a busy machine the signal may come before there is anything to save.
signal.signal(signal.SIGUSR1, lambda *_: os._exit(75))

import torch  # noqa: E402 - see above

import ezpz_dist  # noqa: E402 - see above

folder, steps, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
rank = ezpz_dist.setup_torch(backend="gloo", seed=7)
model = ezpz_dist.wrap_model(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = {"model": model, "optimizer": optimizer}
loaded = ezpz_dist.load_checkpoint(folder / "checkpoints", **state)
done = loaded.step if loaded else 0
print("training from", done, "of attempt", os.environ["EZPZ_ATTEMPT"], flush=True)


def save(step):
    ezpz_dist.save_checkpoint(folder / "checkpoints", step=step, **state)


with ezpz_dist.SnapshotOnSignal(save, within=30) as snapshot:
    for step in range(done + 1, steps + 1):
        batch = torch.randn(8, 16)  # the stream that a checkpoint restores
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            with (folder / "losses").open("a") as file:
                file.write(f"{step} {loss.item().hex()} {os.environ['EZPZ_ATTEMPT']}\n")
        time.sleep(seconds)
        if step == steps:
            save(step)
        snapshot.step(step)
ezpz_dist.cleanup()
