"""One rank of the world in which ``hatch run bench:models`` fine-tunes; see there.

``models_ranks.py '{"rounds": 30, "folder": "...", ...}'`` prints the samples as JSON, in seconds;
of one ``way`` alone the memory that it adds to its process, in MB.
"""

import importlib
import itertools
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from dist_ranks import paired_steps
from torch.utils.data import DataLoader, TensorDataset

import ezpz_device
import ezpz_dist
from ezpz.data import pack_documents
from ezpz.examples import finetune

BATCH, BLOCK, STEPS = 2, 128, 1000

Call = Callable[[], object]


def ours(folder: str) -> Call:
    """Return a step of the example, as its command line runs it."""
    settings = finetune.Settings(
        model=folder, data=f"{folder}/text.txt", block=BLOCK, micro_batch=BATCH, dtype="fp32",
        batch_size=BATCH * torch.distributed.get_world_size(), steps=STEPS, outdir=f"{folder}/ours",
    )  # fmt: skip
    run = finetune._Run(settings)  # noqa: SLF001  # the example's step is what is measured
    run.model.train()
    return run.step


def accelerate(folder: str) -> Call:
    """Return the same step as transformers' and Accelerate's pages write it."""
    from accelerate import Accelerator  # noqa: PLC0415  # a peer, where it is installed
    from accelerate.state import PartialState  # noqa: PLC0415
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin  # noqa: PLC0415

    # Accelerate shards on accelerators only, though its code for it does not depend on them.
    state = PartialState(cpu=True)  # one a process
    if state.distributed_type is DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=True, cpu_ram_efficient_loading=False,
        auto_wrap_policy="transformer_based_wrap",
    )  # fmt: skip
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    assert accelerator.is_fsdp2, accelerator.distributed_type
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    packed = pack_documents(Path(folder, "text.txt"), tokenizer, BLOCK)
    data = TensorDataset(packed["tokens"], packed["targets"])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, STEPS // 10, STEPS)
    loader = DataLoader(data, BATCH, shuffle=True, drop_last=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    model.train()
    batches = itertools.chain.from_iterable(itertools.repeat(loader))

    def step() -> None:
        tokens, targets = next(batches)
        loss = model(input_ids=tokens, labels=tokens, shift_labels=targets).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        loss.item()

    return step


SIDES = {"ours": ours, "accelerate": accelerate}


def memory_of(make: Callable[[], Call]) -> float:
    """Return the most memory that one side adds to this process, with what it loads."""
    before = ezpz_device.get_memory("cpu").allocated or 0
    ezpz_device.reset_peak_memory("cpu")
    step = make()
    for _ in range(3):
        step()
    return ((ezpz_device.get_memory("cpu").peak or 0) - before) / 1e6


def main(job: dict[str, Any]) -> Any:
    """Be one rank, and return what it found."""
    os.environ |= {
        "RANK": str(job["rank"]), "LOCAL_RANK": str(job["rank"]), "WORLD_SIZE": str(job["ranks"]),
        "LOCAL_WORLD_SIZE": str(job["ranks"]), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job["ports"][0]), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    torch.set_num_threads(1)
    if "path" in job:
        sys.path.append(job["path"])
        importlib.import_module("accelerate")  # as what we import: not counted
    ezpz_dist.setup_torch(timeout=60, tensor_parallel_size=1)
    sides = {name: partial(make, job["folder"]) for name, make in SIDES.items()}
    if job["way"] in sides:
        found: Any = memory_of(sides[job["way"]])
    else:
        first, second = sides
        found = paired_steps(sides[first], sides[second], job["rounds"])
        found[second] = found.pop("theirs")
    ezpz_dist.cleanup()
    return found


if __name__ == "__main__":
    answer = main(json.loads(sys.argv[1]))
    print(json.dumps(answer))
