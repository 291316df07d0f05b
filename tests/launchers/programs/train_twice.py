"""Train on all ranks, with a checkpoint a step; the first time rank 1 fails in the third step."""

import sys

import torch

import ezpz

folder = sys.argv[1]
rank = ezpz.setup_torch(seed=1)
model = ezpz.wrap_model(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loaded = ezpz.load_checkpoint(folder, model=model, optimizer=optimizer)
first = 0
if loaded is not None:
    first = loaded.step + 1
samples = torch.Generator().manual_seed(rank)
for step in range(first, 6):
    if rank == 1 and step == 2 and first == 0:
        sys.exit(3)
    x = torch.randn(16, 8, generator=samples)
    loss = (model(x).squeeze() - x.sum(dim=1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ezpz.save_checkpoint(folder, model=model, optimizer=optimizer, step=step)
print(f"rank {rank} of {ezpz.get_world_size()}: steps {first} to {step}", flush=True)
ezpz.cleanup()
