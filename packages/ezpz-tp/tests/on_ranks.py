"""Tests whose whole body runs on several ranks; numbers; and code for other packages."""

from functools import partial, wraps
from pathlib import Path
from types import ModuleType

import pytest
import torch

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
