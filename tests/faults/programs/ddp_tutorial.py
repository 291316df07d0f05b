"""A script for torchrun, in the shape of PyTorch's tutorial on DistributedDataParallel.

It knows nothing of ezpz: it reads LOCAL_RANK and RANK, and torch reads the rest.

usage: ddp_tutorial.py REPORT

Rank 0 writes to REPORT what every rank found.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

STEPS = 20


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def main():
    local_rank, rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group()

    # Ranks begin apart: DDP gives them rank 0's weights, and each sees other data.
    torch.manual_seed(rank)
    model = DDP(ToyModel().to(device), device_ids=[local_rank] if on_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    inputs = torch.randn(20, 10, device=device)
    labels = inputs[:, :5]
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    weights = torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])
    mine = {
        "rank": rank,
        "local_rank": local_rank,
        "world_size": dist.get_world_size(),
        "host": os.environ.get("SLURMD_NODENAME", os.uname().nodename),
        "losses": losses,
        "weights": weights.tolist(),
    }
    found = [None] * dist.get_world_size()
    dist.gather_object(mine, found if rank == 0 else None)
    if rank == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(found, file)
    dist.destroy_process_group()
    # torch 2.13 aborts where gloo still wants the GIL, for its last tensor, while Python ends.
    time.sleep(0.5)


if __name__ == "__main__":
    main()
