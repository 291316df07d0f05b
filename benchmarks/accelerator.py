"""What costs on an accelerator: ``hatch run bench:accelerator [--runs=10] [--json=FILE]``.

On one device, everything beside raw PyTorch, in turn: layers of ezpz_tp, the vocabulary-parallel
loss, FSDP2 as we wrap it, the recording of metrics, ezpz.models' Llama, also compiled, and how near
its step is to the device's peak. Without an accelerator each row says so.
"""

import gc
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import fire
import torch
from dist import free_ports
from paired import Row, absent, against, beside, interleaved, times
from ranks import ranks
from raw_llama import RawLlama
from table import finish
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from tp import rows_of_blocks
from tp_variants import HEADS

import ezpz_device
import ezpz_dist
import ezpz_obs
import ezpz_tp
from ezpz.models import Llama, LlamaConfig

Step = Callable[[], object]
NOTHING = "no accelerator here"
WHAT = {
    "tp/plain": "MLP H 1024 of ezpz_tp, TP 2 of fake ranks",
    "loss/cross_entropy": "vocabulary-parallel loss",
    "llama/raw": "Llama: a step",
    "llama-memory/raw": "Llama: memory of a step",
    "llama-tp/raw": "Llama on layers of ezpz_tp: a step",
    "llama-compiled/raw": "Llama compiled by block: a step",
    "llama-mfu/peak": "Llama: a step over its time at peak (1 / MFU)",
    "raw-mfu/peak": "the same in raw PyTorch",
    "compiled-mfu/peak": "the same compiled",
    "fsdp2/by hand": "Llama under FSDP2: a step",
    "metrics/raw": "Llama, metrics recorded deferred: a step",
}


@dataclass(frozen=True)
class Sizes:
    """Of what is trained: large enough that kernels, not launches, take the time."""

    config: LlamaConfig
    batch: int
    sequence: int
    dtype: torch.dtype

    @classmethod
    def on(cls, device: str) -> "Sizes":
        """Return those for a device; on the CPU it is only seen whether all of it runs."""
        if device == "cpu":
            config = LlamaConfig(vocab_size=256, dim=128, layers=2, heads=HEADS, hidden=384)
            return cls(config, 2, 64, torch.float32)
        # A billion parameters, and heads 128 wide, as in Llama's own sizes.
        config = LlamaConfig(vocab_size=32_000, dim=2048, layers=16, heads=16, hidden=5632)
        return cls(config, 4, 2048, torch.bfloat16)


class Bench:
    """One device with one rank on it, and what is timed there."""

    def __init__(self, device: str, runs: int) -> None:
        self.device, self.runs, self.sizes = torch.device(device), runs, Sizes.on(device)
        config = self.sizes.config
        shape = (self.sizes.batch, self.sizes.sequence)
        self.tokens = torch.randint(config.vocab_size, shape, device=self.device)
        self.raw = partial(self.placed, lambda: RawLlama(config))
        self.ours = partial(self.placed, lambda: Llama(config))
        self.parallel = partial(self.placed, lambda: Llama(config, parallel=True))

    def placed(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Return a new model, on the device."""
        torch.manual_seed(0)
        return make().to(self.device, self.sizes.dtype)

    def step_of(self, model: Any, then: Callable[[Tensor], object] = lambda _: None) -> Step:
        """Return a training step, and what is done with its loss."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            loss = model(self.tokens, self.tokens)
            loss.backward()
            optimizer.step()
            then(loss)

        return step

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device.type != "cpu":
            getattr(torch, self.device.type).synchronize()

    def seconds(self, step: Step, steps: int = 3) -> float:
        """Time so many steps, and return the mean of one."""
        self.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        self.synchronize()
        return (time.perf_counter() - began) / steps

    def pair(self, key: str, ours: Step, theirs: Step, peer: str) -> Row:
        """Return the row of two steps, timed in turn."""
        ways = {"ours": partial(self.seconds, ours), "theirs": partial(self.seconds, theirs)}
        samples = interleaved(ways, self.runs, warm=2)
        pair = times(1e3, samples["ours"]), times(1e3, samples["theirs"])
        return beside(f"accelerator/{key}", WHAT[key], "ms", pair, peer)

    def peak_mb(self, make: Callable[[], nn.Module]) -> float:
        """Return the most memory that a model's step takes on the device, alone there, in MB."""
        step = self.step_of(make())
        step()  # the optimizer's state is made by the first
        self.synchronize()
        ezpz_device.reset_peak_memory(self.device)
        step()
        self.synchronize()
        memory = ezpz_device.get_memory(self.device)
        return (memory.peak or 0) / 1e6

    def memory(self) -> list[Row]:
        """The memory of both, one after the other."""
        if self.device.type == "cpu":
            return []  # it is only seen whether the rest runs
        held = {}
        for name, make in (("ours", self.ours), ("raw", self.raw)):
            held[name] = [self.peak_mb(make)]
            gc.collect()  # a step holds its model in a closure
        what = WHAT["llama-memory/raw"]
        return against("accelerator/llama-memory", what, "MB", held, {"raw": "raw PyTorch"})

    def loss(self) -> Row:
        """The loss over a vocabulary, forward and backward."""
        config, count = self.sizes.config, self.sizes.batch * self.sizes.sequence
        logits = torch.randn(count, config.vocab_size, device=self.device, dtype=self.sizes.dtype)
        logits.requires_grad_()
        targets = self.tokens.flatten()

        def ours() -> None:
            logits.grad = None
            ezpz_tp.vocab_parallel_cross_entropy(logits, targets).mean().backward()

        def raw() -> None:
            logits.grad = None
            nn.functional.cross_entropy(logits.float(), targets).backward()

        return self.pair("loss/cross_entropy", ours, raw, "cross_entropy")

    def llama(self) -> list[Row]:
        """The Llama, plain and on parallel layers, and its distance from the peak."""
        raw, ours = self.step_of(self.raw()), self.step_of(self.ours())
        rows = [self.pair("llama/raw", ours, raw, "raw PyTorch")]
        rows.append(self.pair("llama-tp/raw", self.step_of(self.parallel()), raw, "raw PyTorch"))
        return [*rows, self.mfu("llama-mfu/peak", ours), self.mfu("raw-mfu/peak", raw)]

    def mfu(self, key: str, step: Step) -> Row:
        """A step beside the time that its operations take at the device's peak."""
        peak = ezpz_device.get_peak_flops(self.sizes.dtype, self.device)
        if not peak:
            return absent(f"accelerator/{key}", WHAT[key], "peak", "its peak FLOP/s are not known")
        tokens = self.tokens.numel()
        ideal = self.sizes.config.flops_per_token(self.sizes.sequence) * tokens / peak * 1e3
        took = [self.seconds(step) * 1e3 for _ in range(self.runs)]
        return beside(f"accelerator/{key}", WHAT[key], "ms", (took, [ideal] * len(took)), "peak")

    def compiled(self) -> list[Row]:
        """Both compiled, and ours beside the peak."""
        key = "llama-compiled/raw"
        try:
            raw = self.step_of(by_block(self.raw()))
            raw()
        # Triton, a C++ compiler, their headers: whatever is missing has an error of its own.
        except Exception as error:  # noqa: BLE001
            said = str(error).strip().splitlines()
            why = f"torch.compile: {said[0] if said else type(error).__name__}"
            return [absent(f"accelerator/{key}", WHAT[key], "raw PyTorch, compiled", why)]
        # Where that compiles, ours has to.
        ours = self.step_of(by_block(self.ours()))
        row = self.pair(key, ours, raw, "raw PyTorch, compiled")
        return [row, self.mfu("compiled-mfu/peak", ours)]

    def fsdp2(self) -> Row:
        """Ours and wrapped by hand as torch's tutorial does."""

        def by_hand(model: Any) -> Any:
            for block in model.layers:
                fully_shard(block)
            return fully_shard(model)

        ours = self.step_of(ezpz_dist.wrap_model_for_fsdp2(self.ours()))
        return self.pair("fsdp2/by hand", ours, self.step_of(by_hand(self.ours())), "by hand")

    def metrics(self) -> Row:
        """A step whose loss is recorded, beside one whose loss stays where it is."""
        with (
            tempfile.TemporaryDirectory() as folder,
            ezpz_obs.History(folder, deferred=True) as history,
        ):
            step = self.step_of(self.ours(), lambda loss: history.record({"loss": loss.detach()}))
            return self.pair("metrics/raw", step, self.step_of(self.ours()), "nothing recorded")

    def rows(self) -> list[Row]:
        """Measure all."""
        # First, while nothing else is on the device.
        rows = self.memory()
        rows += [self.loss(), *self.llama(), *self.compiled(), self.fsdp2(), self.metrics()]
        if self.device.type == "cuda":
            job = {"world": "fake cuda", "degree": 2, "hidden": [1024], "seconds": 1.0}
            found = ranks("tp_blocks.py", job | {"blocks": ["mlp", "llama"], "bias": False})
            rows = [*rows_of_blocks(found, "accelerator/tp"), *rows]
        return rows


def by_block(model: Any) -> Any:
    """Compile one block for all, as torchtitan does; a whole model takes minutes."""
    for block in model.layers:
        block.compile()
    return model


def measure(device: str, runs: int) -> list[Row]:
    """Return all rows of this section."""
    if not device:
        return [
            absent(f"accelerator/{key}", what, key.split("/")[1], NOTHING)
            for key, what in WHAT.items()
        ]
    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0]), "TORCH_DEVICE": device,
    }  # fmt: skip
    ezpz_dist.setup_torch()
    ezpz_tp.initialize_tensor_parallel(1)
    try:
        return Bench(device, runs).rows()
    finally:
        ezpz_dist.cleanup()


def main(runs: int = 10, device: str = "", json: str = "") -> None:
    """Print the figures, and write them to a file if one is named.

    Args:
        runs: How often each pair is timed, three steps at a time.
        device: cuda, xpu, mps; default: the one that is here. cpu: tiny models, to try it out.
        json: A file to write the figures to.
    """
    here = ezpz_device.get_torch_device_type()
    finish(measure(device or (here if here != "cpu" else ""), runs), json)


if __name__ == "__main__":
    fire.Fire(main)
