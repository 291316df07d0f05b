"""A script of the shape that the talk's minimal example has: the same calls, and no more care."""

import os
import time

import torch

import ezpz

log = ezpz.get_logger(__name__)


class Autoencoder(torch.nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        down, up = torch.nn.Linear(width, hidden), torch.nn.Linear(hidden, width)
        self.layers = torch.nn.Sequential(down, torch.nn.ReLU(), up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@ezpz.timeitlogit(rank=ezpz.get_rank())
def build():
    rank = ezpz.setup_torch()
    if os.environ.get("WANDB_DISABLED"):
        log.info("no W&B")
    elif rank == 0:
        try:
            ezpz.setup_wandb(project_name="talk")
        except Exception:  # as people write it
            log.exception("without W&B")
    model = Autoencoder(32, 64)
    model.to(ezpz.get_torch_device_type())
    model.to(torch.bfloat16)
    log.info(f"{model=}")
    optimizer = torch.optim.Adam(model.parameters())
    if ezpz.get_world_size() > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    return model, optimizer


@ezpz.timeitlogit(rank=ezpz.get_rank())
def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> ezpz.History:
    is_wrapped = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    bare = model.module if is_wrapped else model
    history, device_type = ezpz.History(), ezpz.get_torch_device_type()
    dtype = bare.layers[0].weight.dtype
    model.train()
    for step in range(200):
        with torch.autocast(device_type=device_type, dtype=dtype):
            began = time.perf_counter()
            x = torch.rand((64, bare.layers[0].in_features), dtype=dtype).to(device_type)
            loss = ((model(x) - x) ** 2).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0 and step > 10:
                dt = time.perf_counter() - began
                log.info(history.update({"iter": step, "loss": loss.item(), "dt": dt}))
    return history


def main():
    model, optimizer = build()
    history = train(model, optimizer)
    if ezpz.get_rank() == 0:
        dataset = history.finalize()
        losses = dataset["loss"]
        log.info(f"{dataset=}")
        print("FINAL", type(model).__name__, float(losses[0]), float(losses[-1]))


if __name__ == "__main__":
    main()
