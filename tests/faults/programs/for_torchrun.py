"""A script for torchrun, without ezpz: ranks meet, and each prints the sum of their numbers."""

import os
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor(dist.get_rank())
dist.all_reduce(total)
place = f"{dist.get_rank()} of {dist.get_world_size()} on {os.uname().nodename}"
sys.stdout.write(f"{place}: {total.item()}\n")
sys.stdout.flush()
dist.destroy_process_group()
# torch 2.13 aborts where gloo still wants the GIL, for its last tensor, while Python ends.
time.sleep(0.5)
