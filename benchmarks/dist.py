"""What ezpz-dist adds: ``hatch run bench:dist [--rounds=40] [--ranks=2] [--json=FILE]``.

In one launch of gloo ranks on this machine, in turn, compared as ratios: set-up against a bare
init_process_group (also the first of new processes, which loads what later ones find); a training
step of a model that we wrapped against one wrapped by hand, with DDP and with FSDP2, by Lightning
Fabric and by Accelerate; our collectives against torch's own. Two models wrapped by hand tell how
much of a step's ratio is chance.
"""

import socket
import sys
from functools import partial
from importlib.metadata import version

import fire
from callee import fresh
from paired import Row, absent, beside, interleaved, times
from peers import present
from ranks import RanksError
from ranks import ranks as world
from table import finish

# One rank that has trained a step: how much it holds.
MEMORY = """
import os, sys, torch
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
               "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
if sys.argv[1] == "ours":
    import ezpz_dist
    ezpz_dist.setup_torch()
    wrap = ezpz_dist.wrap_model_for_ddp
else:
    torch.distributed.init_process_group("gloo")
    wrap = torch.nn.parallel.DistributedDataParallel
model = wrap(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(16)]))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(16, 256)).square().mean().backward()
optimizer.step()
print(peak_mb())
torch.distributed.destroy_process_group()
"""

# Of each figure: for people, and whom it is compared with.
WHAT = {
    "set-up": ("set-up", "init_process_group"),
    "set-up-first": ("set-up, the first of a process", "init_process_group"),
    "step-ddp": ("step, DDP", "by hand"),
    "step-ddp-control": ("step, DDP, both by hand", "by hand"),
    "step-fsdp2": ("step, FSDP2", "by hand"),
    "step-fsdp2-control": ("step, FSDP2, both by hand", "by hand"),
    "barrier": ("barrier", "torch"),
    "all-reduce": ("all_reduce of a number", "torch"),
    "all-reduce-10": ("all_reduce of 10 numbers, exact", "all_gather"),
}
WAYS = ("ours", "by hand")
LIBRARIES = ("lightning-fabric", "accelerate")


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens at."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def measure(rounds: int, ranks: int) -> list[Row]:
    """Return all rows of this section."""
    own = [name for name in WHAT if name.startswith("step")]
    job = {"rounds": rounds, "ports": free_ports(2 * rounds + 3), "steps": own}
    found = world("dist_ranks.py", job, ranks)
    found["set-up-first"] = first_set_ups(ranks)
    rows = []
    for name, (what, other) in WHAT.items():
        ours, theirs = times(1e3, found[name]["ours"]), times(1e3, found[name]["theirs"])
        title = f"{other} {version('torch')}" if other == "torch" else other
        rows.append(beside(f"dist/{name}/{other}", what, "ms", (ours, theirs), title))
    rows += libraries(rounds, ranks)
    rows.sort(key=lambda row: list(WHAT).index(row.key.split("/")[1]))
    return [*rows, memory()]


def libraries(rounds: int, ranks: int) -> list[Row]:
    """Return the rows of the other libraries' steps, each in a world of its own.

    What one of them sets in its process, or that it fails, is then nobody else's matter.
    """
    there, missing = present(LIBRARIES)
    rows = []
    for name, each in there.items():
        job = {"rounds": rounds, "ports": free_ports(1), "steps": [name],
               "path": each.site_packages}  # fmt: skip
        try:
            samples = world("dist_ranks.py", job, ranks)[name]
        except RanksError as error:
            missing[name] = f"it fails: {error}"
        else:
            pair = times(1e3, samples["ours"]), times(1e3, samples["theirs"])
            rows.append(beside(f"dist/step-ddp/{name}", "step, DDP", "ms", pair, each.name))
    for name, why in missing.items():
        rows.append(absent(f"dist/step-ddp/{name}", "step, DDP", name, why))
    return rows


def first_set_ups(ranks: int) -> dict[str, list[float]]:
    """Return samples of set-ups, in seconds, each in a world of new processes."""

    def once(way: str) -> float:
        job = {"ports": free_ports(1), "first": way}
        return float(world("dist_ranks.py", job, ranks))

    return interleaved({name: partial(once, name) for name in ("ours", "theirs")}, 4, warm=0)


def memory() -> Row:
    """Return the row of what one rank holds after a step."""
    held = {
        name: partial(
            lambda name: fresh(sys.executable, MEMORY, name, env={"TORCH_DEVICE": "cpu"})[0], name
        )
        for name in WAYS
    }
    samples = interleaved(held, 3, warm=0)
    what = "memory of a rank after a step, DDP"
    return beside(
        "dist/memory/by hand", what, "MB", (samples["ours"], samples["by hand"]), "by hand"
    )


def main(rounds: int = 40, ranks: int = 2, json: str = "") -> None:
    """Print the figures, and write them to a file if one is named.

    Args:
        rounds: Pairs of set-ups; of steps three times as many, of collectives five times.
        ranks: Gloo processes on this machine.
        json: A file to write the figures to.
    """
    finish(measure(rounds, ranks), json)


if __name__ == "__main__":
    fire.Fire(main)
