"""PyTorch's tutorial on DDP, without ezpz. usage: ddp_tutorial.py REPORT (of all ranks)"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

dist.init_process_group("gloo")
# Ranks begin apart: DDP gives them rank 0's weights, and each sees other data.
torch.manual_seed(int(os.environ["RANK"]))
model = DDP(nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
inputs = torch.randn(20, 10)
losses = []
for _ in range(20):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), inputs[:, :5])
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
mine = {
    "rank": dist.get_rank(),
    "local_rank": int(os.environ["LOCAL_RANK"]),
    "world_size": dist.get_world_size(),
    "host": os.uname().nodename,
    "losses": losses,
    "weights": [weight for one in model.parameters() for weight in one.flatten().tolist()],
}
found = [None] * dist.get_world_size()
dist.gather_object(mine, found if mine["rank"] == 0 else None)
if mine["rank"] == 0:
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(found, file)
dist.destroy_process_group()
# torch 2.13 aborts where gloo still wants the GIL, for its last tensor, while Python ends.
time.sleep(0.5)
