"""One rank of the world in which ``hatch run bench:checkpoint`` measures; see there.

``checkpoint_ranks.py '{"rounds": 5, "width": 1024, ...}'`` prints samples as JSON, in seconds.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import ezpz_dist

ALONE = (("small", [(2,)] * 10_000, True), ("ten", [(2_500_000,)] * 10, False))
"""Cases of one process: name, sizes of parameters, and whether AdamW has its state."""

Ways = dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]]


class Training:
    """A model that has made a step, with AdamW's state, three times its parameters, or without."""

    def __init__(self, model: nn.Module, adam: bool = True) -> None:
        self.model: Any = model
        kind = torch.optim.AdamW if adam else torch.optim.SGD
        self.optimizer = kind(self.model.parameters(), lr=1e-4)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.steps = 0

    def save_ours(self, folder: Path) -> None:
        """By us: checksums, synced, renamed."""
        self.steps += 1
        ezpz_dist.save_checkpoint(
            folder, model=self.model, optimizer=self.optimizer, step=self.steps
        ).wait()

    def load_ours(self, folder: Path) -> None:
        """By us: checksums compared first."""
        assert ezpz_dist.load_checkpoint(folder, model=self.model, optimizer=self.optimizer)

    def save_dcp(self, folder: Path) -> None:
        """By torch.distributed.checkpoint, which flushes its files to disk."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load_dcp(self, folder: Path) -> None:
        """By torch.distributed.checkpoint."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )

    def save_torch(self, folder: Path) -> None:
        """By torch.save on rank 0, as scripts do: of wrapped DDP models only."""
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            with (folder / "state.pt").open("wb") as file:
                torch.save(state, file)
                # The others flush theirs: what is compared is safe on disk.
                file.flush()
                os.fsync(file.fileno())

    def load_torch(self, folder: Path) -> None:
        """By torch.load on every rank."""
        state = torch.load(folder / "state.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def measure(ways: Ways, rounds: int, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Save and load in each way, in turn (A B C C B A), each into a folder of its own."""
    saved: dict[str, list[float]] = {name: [] for name in ways}
    loaded: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, (save, load) in list(ways.items())[:: -1 if turn % 2 else 1]:
            place = folder / f"{name}{turn}"
            for call, samples in ((save, saved[name]), (load, loaded[name])):
                dist.barrier()
                began = time.perf_counter()
                call(place)
                dist.barrier()
                if turn:
                    samples.append(time.perf_counter() - began)
            if dist.get_rank() == 0:
                shutil.rmtree(place)
    return {"save": saved, "load": loaded}


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Be one rank, and return what it found."""
    os.environ |= {
        "RANK": str(job["rank"]), "LOCAL_RANK": str(job["rank"]), "WORLD_SIZE": str(job["ranks"]),
        "LOCAL_WORLD_SIZE": str(job["ranks"]), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job["rendezvous"]),
    }  # fmt: skip
    torch.set_num_threads(1)
    ezpz_dist.setup_torch(timeout=120)
    found: dict[str, Any] = {}
    # Rank 0's folder is everyone's.
    box = [tempfile.mkdtemp() if job["rank"] == 0 else ""]
    dist.broadcast_object_list(box, 0)
    folder = Path(box[0])
    for name, tensors, adam in ALONE if job.get("alone") else ():
        torch.manual_seed(0)
        training = Training(nn.ParameterList(torch.randn(size) for size in tensors), adam)
        ways: Ways = {
            "ours": (training.save_ours, training.load_ours),
            "torch.save": (training.save_torch, training.load_torch),
        }
        found[name] = measure(ways, job["rounds"], folder)
    for name, wrap in (
        ()
        if job.get("alone")
        else (
            ("ddp", ezpz_dist.wrap_model_for_ddp),
            ("fsdp2", ezpz_dist.wrap_model_for_fsdp2),
        )
    ):
        torch.manual_seed(0)
        width = job["width"]
        layers = [nn.Linear(width, width, bias=False) for _ in range(8)]
        training = Training(wrap(nn.Sequential(*layers)))
        ways = {
            "ours": (training.save_ours, training.load_ours),
            "DCP": (training.save_dcp, training.load_dcp),
        }
        if name == "ddp":
            ways["torch.save"] = (training.save_torch, training.load_torch)
        found[name] = measure(ways, job["rounds"], folder)
    ezpz_dist.barrier()
    if job["rank"] == 0:
        shutil.rmtree(folder)
    ezpz_dist.cleanup()
    return found


if __name__ == "__main__":
    answer = main(json.loads(sys.argv[1]))
    print(json.dumps(answer))
