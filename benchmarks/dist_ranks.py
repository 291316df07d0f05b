"""One rank of the world in which ``hatch run bench:dist`` measures; see there.

``dist_ranks.py '{"rounds": 40, "ports": [...], ...}'`` prints the samples as JSON, in seconds.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ezpz_dist
from ezpz_dist._setup import _drop_retired

Call = Callable[[], object]
Pairs = dict[str, list[float]]
_MODELS = 6


def network(width: int = 256, depth: int = 8) -> nn.Module:
    """Return a model of blocks with 1.05 M parameters, the same on every rank."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        for _ in range(depth)
    ]
    return nn.Sequential(nn.Sequential(*blocks))


def bare_ddp(model: nn.Module) -> nn.Module:
    """Wrap by hand."""
    return DistributedDataParallel(model)


def bare_fsdp2(model: nn.Module) -> nn.Module:
    """Shard each block, then the rest, as torch's tutorial does."""
    for block in model[0]:  # type: ignore[index]  # the model is a Sequential of Sequentials
        fully_shard(block)
    fully_shard(model)
    return model


def step_of(wrap: Callable[[nn.Module], nn.Module]) -> Call:
    """Return a training step of a new model, wrapped."""
    model = wrap(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return stepper(model, optimizer, lambda loss: loss.backward())


def stepper(model: Any, optimizer: Any, backward: Callable[[Any], object]) -> Call:
    """Return a training step."""
    rows = torch.randn(16, 256)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        backward(model(rows).square().mean())
        optimizer.step()

    return step


def fabric_step() -> Call:
    """Return a training step of a new model under Lightning Fabric's DDP."""
    from lightning_fabric import Fabric  # noqa: PLC0415  # a peer, where it is installed

    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    return stepper(model, optimizer, fabric.backward)


def accelerate_step() -> Call:
    """Return a training step of a new model under Accelerate's DDP."""
    from accelerate import Accelerator  # noqa: PLC0415  # a peer, where it is installed

    accelerator = Accelerator(cpu=True)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    return stepper(model, optimizer, accelerator.backward)


def ours_ddp() -> Call:
    """Return a training step of a new model that we wrapped."""
    return step_of(ezpz_dist.wrap_model_for_ddp)


STEPS: dict[str, tuple[Callable[[], Call], Callable[[], Call]]] = {
    "step-ddp": (ours_ddp, lambda: step_of(bare_ddp)),
    "step-ddp-control": (lambda: step_of(bare_ddp), lambda: step_of(bare_ddp)),
    "step-fsdp2": (
        lambda: step_of(ezpz_dist.wrap_model_for_fsdp2),
        lambda: step_of(bare_fsdp2),
    ),
    "step-fsdp2-control": (lambda: step_of(bare_fsdp2), lambda: step_of(bare_fsdp2)),
    "lightning-fabric": (ours_ddp, fabric_step),
    "accelerate": (ours_ddp, accelerate_step),
}


def paired(ours: Call, theirs: Call, rounds: int) -> Pairs:
    """Time two things in turn, all ranks starting together."""
    samples: Pairs = {"ours": [], "theirs": []}
    for turn in range(rounds + 3):
        for name, run in (("ours", ours), ("theirs", theirs))[:: 1 if turn % 2 else -1]:
            dist.barrier()
            began = time.perf_counter()
            run()
            if turn >= 3:
                samples[name].append(time.perf_counter() - began)
    return samples


def paired_steps(ours: Callable[[], Call], theirs: Callable[[], Call], rounds: int) -> Pairs:
    """Time training steps of models that are made anew six times, each first in turn.

    Where a model's memory happens to lie makes up to a tenth of such a step.
    """
    samples: Pairs = {"ours": [], "theirs": []}
    for turn in range(_MODELS):
        made = [make() for make in (ours, theirs)[:: 1 if turn % 2 else -1]]
        our_step, their_step = made[:: 1 if turn % 2 else -1]
        found = paired(our_step, their_step, -(-rounds // _MODELS))
        for name, taken in found.items():
            samples[name] += taken
    return samples


def set_up(job: dict[str, Any]) -> Pairs:
    """Time set-up against a bare group, each at a port of its own."""
    samples: Pairs = {"ours": [], "theirs": []}
    store = dist.TCPStore("127.0.0.1", job["port"])
    for turn, port in enumerate(job["ports"]):
        os.environ["MASTER_PORT"] = str(port)
        way = "theirs" if turn % 2 else "ours"
        # Set-up drops the group before, whose threads end then; a first one has none.
        _drop_retired()
        taken = _once(store, turn, job["ranks"], way)
        if turn >= 2:
            samples[way].append(taken)
    return samples


def first_set_up(job: dict[str, Any]) -> float:
    """Time the set-up of this process, by us or bare."""
    os.environ["MASTER_PORT"] = str(job["ports"][0])
    return _once(dist.TCPStore("127.0.0.1", job["port"]), 0, job["ranks"], job["first"])


def _once(store: dist.Store, turn: int, ranks: int, way: str) -> float:
    """Set up and take down again; return how long the former takes from when all ranks are here."""
    _meet(store, f"begin{turn}", ranks)
    began = time.perf_counter()
    if way == "ours":
        ezpz_dist.setup_torch(timeout=60)
    else:
        dist.init_process_group("gloo")
    taken = time.perf_counter() - began
    _meet(store, f"end{turn}", ranks)
    if way == "ours":
        ezpz_dist.cleanup()
    else:
        dist.destroy_process_group()
    return taken


def _meet(store: dist.Store, name: str, ranks: int) -> None:
    if store.add(name, 1) == ranks:
        store.set(f"{name}/all", "here")
    store.wait([f"{name}/all"])


def collectives(rounds: int, ranks: int) -> dict[str, Pairs]:
    """Time our collectives against torch's own."""
    one, numbers = torch.ones(1), {f"m{i}": float(i) for i in range(10)}
    gathered = [torch.empty(10) for _ in range(ranks)]
    pairs: dict[str, tuple[Call, Call]] = {
        "barrier": (ezpz_dist.barrier, dist.barrier),
        "all-reduce": (lambda: ezpz_dist.all_reduce(1.0), lambda: dist.all_reduce(one)),
        "all-reduce-10": (
            lambda: ezpz_dist.all_reduce(numbers),
            lambda: dist.all_gather(gathered, torch.ones(10)),
        ),
    }
    return {name: paired(ours, theirs, rounds) for name, (ours, theirs) in pairs.items()}


def main(job: dict[str, Any]) -> dict[str, Pairs] | float:
    """Be one rank, and return what it found."""
    os.environ |= {
        "RANK": str(job["rank"]), "LOCAL_RANK": str(job["rank"]), "WORLD_SIZE": str(job["ranks"]),
        "LOCAL_WORLD_SIZE": str(job["ranks"]), "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    torch.set_num_threads(1)
    if "first" in job:
        return first_set_up(job)
    last, found = job["ports"].pop(), {}
    library = job.get("path")
    if library is None:
        found["set-up"] = set_up(job)
    else:
        sys.path.append(library)
    os.environ["MASTER_PORT"] = str(last)
    ezpz_dist.setup_torch(timeout=60)
    for name in job["steps"]:
        found[name] = paired_steps(*STEPS[name], 3 * job["rounds"])
    if library is None:
        found |= collectives(5 * job["rounds"], job["ranks"])
    ezpz_dist.cleanup()
    return found


if __name__ == "__main__":
    answer = main(json.loads(sys.argv[1]))
    print(json.dumps(answer))
