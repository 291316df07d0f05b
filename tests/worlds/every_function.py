"""Call every function of ezpz_dist in whatever world this is started in, and check the answers.

usage: every_function.py FOLDER [--mpi]     FOLDER: one that every rank sees

A world of one runs the same bodies. In a larger one the last rank then stays away from a barrier,
and the others report what they are told of it. ``--mpi``: the ranks are MPI's, too.
"""

import copy
import json
import sys
import time
from array import array
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ezpz_dist as ez

LEFT_OUT = {
    "breakpoint", "watch",  # need a person, and end the job
    "deepspeed_config", "wrap_model_for_deepspeed",  # of another package
    "setup_torch", "cleanup",  # here by name
}  # fmt: skip
ROWS = 12  # divides by 1, 2, 3 and 4 ranks


def collectives(rank, size, implementation):
    """Numbers, tensors, dicts and objects come together on every rank."""
    by = {"implementation": implementation}
    assert ez.all_reduce(rank, **by) == size * (size - 1) // 2
    assert ez.all_reduce(float(rank), "mean", **by) == (size - 1) / 2
    device = ez.get_dist_info()["device"]
    mine = torch.full((3,), rank, device=device)
    assert ez.all_reduce(mine, "max", **by).tolist() == [size - 1] * 3
    seen = torch.ones(2, dtype=torch.int64, device=device)
    got = ez.all_reduce({"loss": 1.0, "seen": seen}, **by)
    assert got["loss"] == size
    assert got["seen"].tolist() == [size, size]
    assert ez.broadcast({"from": rank}, root=size - 1) == {"from": size - 1}
    mine = torch.full((5000,), rank, device=device)
    assert ez.broadcast(mine, root=size - 1).eq(size - 1).all()
    assert ez.all_gather_object(("rank", rank)) == [("rank", one) for one in range(size)]
    ez.synchronize()
    ez.barrier(**by)
    ez.barrier(timeout=300, **by)


def this_world(rank, size):
    """What it says of itself, and its seeds."""
    info = ez.get_dist_info()
    assert (info["rank"], info["world_size"]) == (rank, size), info
    assert ez.query_environment()["rank"] == rank
    assert str(size) in ez.print_dist_setup()
    assert ez.data_share() == (rank, size)
    seeds = ez.all_gather_object(ez.seed_everything(1))
    assert seeds == [ez.seed_for_rank(1, one) for one in range(size)]
    assert len(set(ez.all_gather_object(torch.rand(1).item()))) == size


def steps(model, optimizer, x):
    """Train, and return the losses."""
    losses = []
    for _ in range(5):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def zero1(parameters):
    return ez.wrap_optimizer_for_zero1(torch.optim.AdamW, parameters, lr=1e-2)


WRAPPERS = (
    (ez.wrap_model, adamw),
    (lambda model: ez.wrap_model(model, use_fsdp=True), adamw),
    (ez.wrap_model_for_ddp, zero1),
    (ez.wrap_model_for_fsdp, adamw),
    (ez.wrap_model_for_fsdp2, adamw),
)


def training(rank, size, folder):
    """Each wrapper follows one rank's curve; checkpoints are loaded into another's model."""
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x = torch.randn(ROWS, 5, dtype=torch.float64)
    device = ez.get_dist_info()["device"]
    bare, x = bare.to(device), x.to(device)
    alone = copy.deepcopy(bare)
    expected = steps(alone, adamw(alone.parameters()), x)
    for wrap, optimizer_of in WRAPPERS:
        model = wrap(copy.deepcopy(bare))
        optimizer = optimizer_of(model.parameters())
        found = [ez.all_reduce(loss, "mean") for loss in steps(model, optimizer, x[rank::size])]
        same = torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-12)
        assert same, (wrap, found)
    checkpoints = folder / "checkpoints"
    ez.save_checkpoint(checkpoints, model=model, optimizer=optimizer, step=5, asynchronous=True)
    ez.finish_saving()
    assert ez.verify_checkpoint(checkpoints).step == 5
    assert [one.step for one in ez.list_checkpoints(checkpoints)] == [5]
    assert ez.latest_checkpoint(checkpoints).world_size == size
    loaded = ez.wrap_model_for_ddp(copy.deepcopy(bare))
    assert ez.load_checkpoint(checkpoints, model=loaded) is not None
    weights = loaded.module.state_dict()
    for name, weight in alone.state_dict().items():
        assert torch.allclose(weights[name], weight, rtol=1e-12), name
    with ez.SnapshotOnSignal(lambda step: None) as snapshot:
        snapshot.step(6)


def data(rank, size, folder):
    """Every sample, file and row is some rank's, once."""

    def together(mine):
        return sorted(one for theirs in ez.all_gather_object(mine) for one in theirs)

    assert together(list(ez.DataParallelSampler(ROWS))) == list(range(ROWS))
    batches = ez.DataLoader(torch.arange(ROWS), batch_size=1, shuffle=True, num_workers=1)
    assert together([int(batch) for batch in batches]) == list(range(ROWS))
    assert together(ez.share_of(list(range(ROWS)))) == list(range(ROWS))
    numbers = folder / "numbers"
    if rank == 0:
        numbers.write_bytes(array("q", range(ROWS)).tobytes())
    ez.barrier()
    mine = ez.read_share(numbers, torch.int64, [-1])
    assert together(mine.tolist()) == list(range(ROWS))
    here = ez.all_gather_object(ez.get_dist_info()["hostname"])
    ranks = [one for one in range(size) if here[one] == here[rank]]
    node = ez.node_group()
    assert (size == 1 and node is None) or len(dist.get_process_group_ranks(node)) == len(ranks)
    assert ez.scatter_from_one_reader(lambda: [[one] for one in ranks]) == [rank]


def times():
    """The timer runs."""
    timer = ez.Timer("work")
    for _ in range(3):
        with timer, ez.timed("work"):
            assert ez.timeitlogit()(abs)(-1) == 1
    assert timer.timing.count == 3


def exercise(rank, size, folder, *, mpi):
    """Call all of it. Collective: every rank calls this, set up."""
    this_world(rank, size)
    collectives(rank, size, "torch")
    if mpi:
        collectives(rank, size, "mpi")
    training(rank, size, folder)
    data(rank, size, folder)
    times()


def load_batch(folder, others):
    """Stay here until the others have said what they are told."""
    deadline = time.monotonic() + 300
    while len(list(folder.glob("*.json"))) < others and time.monotonic() < deadline:
        time.sleep(0.05)  # the missing rank


def main():
    folder = Path(sys.argv[1])
    rank = ez.setup_torch(seed=1, timeout=300)
    info = ez.get_dist_info()
    size = info["world_size"]
    exercise(rank, size, folder, mpi="--mpi" in sys.argv)
    said = {"rank": rank, "size": size, "host": info["hostname"], "missing": "", "seconds": 0.0}
    if size > 1 and rank == size - 1:
        load_batch(folder, size - 1)
    elif size > 1:
        began = time.monotonic()
        try:
            ez.barrier(timeout=2)
        except ez.HangError as error:
            said |= {"missing": str(error), "seconds": time.monotonic() - began}
    draft = folder / f"{rank}.draft"
    draft.write_text(json.dumps(said), encoding="utf-8")
    draft.rename(folder / f"{rank}.json")
    ez.cleanup()


if __name__ == "__main__":
    main()
