"""What ezpz-dist adds: ``hatch run bench:dist [--rounds=40] [--ranks=2] [--json=FILE]``.

In one launch of gloo ranks on this machine, in turn (A B A B ...), compared as ratios:
set-up against a bare init_process_group; a training step of a model that we wrapped against one
wrapped by hand, with DDP and with FSDP2; our collectives against torch's own. Two models wrapped by
hand tell how much of a step's ratio is chance.
"""

import json as json_module
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import fire
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ezpz_dist

Figures = dict[str, dict[str, float]]
Wrap = Callable[[nn.Module], nn.Module]
_MODELS = 6


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens at."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


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


def stepper(model: nn.Module) -> Callable[[], None]:
    """Return a training step of this model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = torch.randn(16, 256)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(rows).square().mean().backward()
        optimizer.step()

    return step


def paired(
    ours: Callable[[], object], theirs: Callable[[], object], rounds: int
) -> list[tuple[float, float]]:
    """Time two things in turn; return seconds of both, round by round."""
    samples: list[tuple[float, float]] = []
    for turn in range(rounds + 3):
        taken = {}
        for name, run in (("ours", ours), ("theirs", theirs))[:: 1 if turn % 2 else -1]:
            dist.barrier()
            began = time.perf_counter()
            run()
            taken[name] = time.perf_counter() - began
        if turn >= 3:
            samples.append((taken["ours"], taken["theirs"]))
    return samples


def paired_steps(ours: Wrap, theirs: Wrap, rounds: int) -> list[tuple[float, float]]:
    """Time training steps of models that are made anew six times, each first in turn.

    Where a model's memory happens to lie makes up to a tenth of such a step.
    """
    samples: list[tuple[float, float]] = []
    for turn in range(_MODELS):
        made = [stepper(wrap(network())) for wrap in (ours, theirs)[:: 1 if turn % 2 else -1]]
        our_step, their_step = made[:: 1 if turn % 2 else -1]
        samples += paired(our_step, their_step, -(-rounds // _MODELS))
    return samples


def figure_of(samples: list[tuple[float, float]]) -> dict[str, float]:
    """Return medians (ms) and the quartiles of the ratio."""
    ratios = sorted(one / other for one, other in samples)
    return {
        "ours_ms": statistics.median(one for one, _ in samples) * 1e3,
        "theirs_ms": statistics.median(other for _, other in samples) * 1e3,
        "ratio": statistics.median(ratios),
        "low": ratios[len(ratios) // 4],
        "high": ratios[3 * len(ratios) // 4],
    }


def set_up(ports: list[int], start: Any) -> dict[str, float]:
    """Time set-up against a bare group, each at a port of its own."""
    samples: dict[str, list[float]] = {"ours": [], "theirs": []}
    for turn, port in enumerate(ports):
        os.environ["MASTER_PORT"] = str(port)
        ours = turn % 2 == 0
        # Set-up drops the group before, whose threads end then; a first one has none.
        ezpz_dist._cleanup._retired.clear()  # noqa: SLF001
        start.wait()
        began = time.perf_counter()
        if ours:
            ezpz_dist.setup_torch(timeout=60)
        else:
            dist.init_process_group("gloo")
        taken = time.perf_counter() - began
        if turn >= 2:
            samples["ours" if ours else "theirs"].append(taken)
        start.wait()
        if ours:
            ezpz_dist.cleanup()
        else:
            dist.destroy_process_group()
    ours_ms, theirs_ms = (statistics.median(samples[name]) * 1e3 for name in ("ours", "theirs"))
    return {
        "ours_ms": ours_ms,
        "theirs_ms": theirs_ms,
        "ratio": ours_ms / theirs_ms,
        "beyond_5_ms": max(0.0, ours_ms - 5) / theirs_ms,
    }


def measure(place: tuple[int, int], rounds: int, ports: list[int], start: Any, said: Any) -> None:
    """Be one rank, as (rank, ranks); the figures of each go back through the queue."""
    rank, ranks = place
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    torch.set_num_threads(1)
    figures: Figures = {"setup_torch / init_process_group": set_up(ports[:-1], start)}
    os.environ["MASTER_PORT"] = str(ports[-1])
    ezpz_dist.setup_torch(timeout=60)
    one, numbers = torch.ones(1), {f"m{i}": float(i) for i in range(10)}
    gathered = [torch.empty(10) for _ in range(ranks)]
    wraps: dict[str, tuple[Wrap, Wrap]] = {
        "DDP step": (ezpz_dist.wrap_model_for_ddp, bare_ddp),
        "DDP step, both by hand": (bare_ddp, bare_ddp),
        "FSDP2 step": (ezpz_dist.wrap_model_for_fsdp2, bare_fsdp2),
        "FSDP2 step, both by hand": (bare_fsdp2, bare_fsdp2),
    }
    for name, (our_wrap, their_wrap) in wraps.items():
        figures[name] = figure_of(paired_steps(our_wrap, their_wrap, 3 * rounds))
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "barrier": (ezpz_dist.barrier, dist.barrier),
        "all_reduce(float)": (lambda: ezpz_dist.all_reduce(1.0), lambda: dist.all_reduce(one)),
        "all_reduce(10 numbers) / all_gather": (
            lambda: ezpz_dist.all_reduce(numbers),
            lambda: dist.all_gather(gathered, torch.ones(10)),
        ),
    }
    for name, (ours, theirs) in pairs.items():
        figures[name] = figure_of(paired(ours, theirs, 5 * rounds))
    ezpz_dist.cleanup()
    said.put((rank, figures))


def main(rounds: int = 40, ranks: int = 2, json: str = "") -> None:
    """Print the figures, and write them to a file if one is named.

    Args:
        rounds: Pairs of set-ups; of steps three times as many, of collectives five times.
        ranks: Gloo processes on this machine.
        json: A file to write the figures to.
    """
    context = multiprocessing.get_context("spawn")
    start, said = context.Barrier(ranks), context.Queue()
    ports = free_ports(2 * rounds + 3)
    processes = [
        context.Process(target=measure, args=((rank, ranks), rounds, ports, start, said))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    figures = dict(said.get() for _ in processes)[0]
    for process in processes:
        process.join()
    for name, figure in figures.items():
        spread = f" [{figure['low']:.3f}, {figure['high']:.3f}]" if "low" in figure else ""
        spread += f", beyond 5 ms {figure['beyond_5_ms']:.2f} x" if "beyond_5_ms" in figure else ""
        print(
            f"{name:36} {figure['ours_ms']:8.3f} ms, {figure['theirs_ms']:8.3f} ms: "
            f"{figure['ratio']:.3f} x{spread}"
        )
    if json:
        with open(json, "w") as file:
            json_module.dump(figures, file, indent=2)


if __name__ == "__main__":
    fire.Fire(main)
