"""One rank of the worlds in which ``hatch run bench:tp-context`` measures; see there.

``tp_context_ranks.py '{"attention": "ring", ...}'`` prints MB: the most that a step of training
added to any rank's process.
"""

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from callee_process import peak_mb

import ezpz_tp
from ezpz.models import Llama, LlamaConfig

LENGTH, BATCH = 64, 64
"""Tokens of a rank's part of each sequence, and sequences."""


def main(job: dict[str, Any]) -> float:
    """Be one rank, and return what the largest rank's step added."""
    ranks = job["ranks"]
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", job["port"])
    dist.init_process_group("gloo", store=store, rank=job["rank"], world_size=ranks)
    ezpz_tp.initialize_tensor_parallel(1, 1, ranks)
    config = LlamaConfig(vocab_size=256, dim=128, layers=2, heads=8, kv_heads=8)
    how = {"context_parallel": job["attention"]} if ranks > 1 else {}
    model = Llama(config, parallel=True, **how)  # type: ignore[arg-type]
    tokens = model.shard_sequence(torch.zeros(BATCH, LENGTH * ranks, dtype=torch.int64))
    dist.barrier()
    before = peak_mb()
    model(tokens, tokens).backward()
    added = torch.tensor(peak_mb() - before)
    dist.all_reduce(added, dist.ReduceOp.MAX)
    dist.destroy_process_group()
    return added.item()


if __name__ == "__main__":
    answer = main(json.loads(sys.argv[1]))
    print(json.dumps(answer))
