"""Tests whose whole body runs on several ranks; numbers; and code for other packages."""

import weakref
from functools import partial, wraps
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ezpz_tp.testing import run_ranks


def on_ranks(ranks, **how):
    """Call a test on every one of so many ranks, as `run_ranks` does; each asserts what it sees."""

    def decorate(body):
        @wraps(body)
        def test(**given):
            run_ranks(partial(body, **given), ranks, **how)

        return test

    return decorate


def all_raise(ranks, function, error, match, **how):
    """Assert that every one of so many ranks raises it, and none waits for another before."""

    def refused():
        with pytest.raises(error, match=match):
            function()

    run_ranks(refused, ranks, **how)


class MemoryWatch(TorchDispatchMode):
    """Watches the tensors that operations make, beside those that are given."""

    def __init__(self, *given):
        super().__init__()
        self.now = 0
        self.peak = 0  # the most bytes at a time
        self.largest = 0  # bytes of one tensor
        self.largest_float32 = 0  # elements
        self.seen = weakref.WeakSet(tensor.untyped_storage() for tensor in given)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
                if tensor.dtype == torch.float32:
                    self.largest_float32 = max(self.largest_float32, tensor.numel())
        return result

    def add(self, storage):
        if storage in self.seen:
            return
        self.seen.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        self.largest = max(self.largest, size)
        weakref.finalize(storage, self.remove, size)

    def remove(self, size):
        self.now -= size


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def load_code(name):
    """Load megatron_code.py or fairscale_code.py with its imports changed, and nothing else."""
    path = Path(__file__).with_name(f"{name}_code.py")
    original = {"megatron": "megatron.core", "fairscale": "fairscale.nn"}[name]
    code = ModuleType(name)
    source = path.read_text(encoding="utf-8").replace(original, "ezpz_tp")
    exec(compile(source, path, "exec"), vars(code))
    return code
