import types
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from ezpz_tp import model_parallel
from ezpz_tp.testing import run_ranks

CODE = Path(__file__).parent / "fairscale_code.py"
WEIGHTS = {
    "tok_embeddings": 1,
    "feed_forward.w1": 0,
    "feed_forward.w2": 1,
    "feed_forward.w3": 0,
    "output": 0,
}


def train_fairscale_code():
    source = CODE.read_text(encoding="utf-8").replace("fairscale.nn", "ezpz_tp")
    code = types.ModuleType("code_for_fairscale")
    exec(compile(source, CODE, "exec"), vars(code))
    model, loss = code.train()
    parts = {name: model.get_submodule(name).weight for name in WEIGHTS}
    grads = {name: weight.grad for name, weight in parts.items()}
    code.fs_init.destroy_model_parallel()
    return {name: weight.detach() for name, weight in parts.items()}, grads, loss.detach()


def test_code_for_fairscale_runs_and_is_right():
    ranks = run_ranks(train_fairscale_code, 2, in_processes=True, initialize=False)

    def joined(which):
        return {
            name: torch.cat([rank[which][name] for rank in ranks], dim)
            for name, dim in WEIGHTS.items()
        }

    weights = {name: weight.requires_grad_() for name, weight in joined(0).items()}
    tokens = torch.arange(34).view(2, 17) * 7 % 32
    hidden = functional.embedding(tokens[:, :-1], weights["tok_embeddings"])
    gate = functional.silu(functional.linear(hidden, weights["feed_forward.w1"]))
    inner = gate * functional.linear(hidden, weights["feed_forward.w3"])
    hidden = hidden + functional.linear(inner, weights["feed_forward.w2"])
    logits = functional.linear(hidden, weights["output"])
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    loss.mean().backward()
    for _, _, found in ranks:
        torch.testing.assert_close(found, loss.view(2, 16).detach(), rtol=1e-12, atol=1e-12)
    for name, grad in joined(1).items():
        torch.testing.assert_close(grad, weights[name].grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layer", ["ColumnParallelLinear", "RowParallelLinear"])
def test_layers_return_a_tensor(layer):
    linear = getattr(model_parallel, layer)(8, 12)
    assert linear(torch.zeros(3, 8)).shape == (3, 12)
    assert linear.get_master_weight().shape == (12, 8)


def test_streams_by_fairscales_names():
    tracker = model_parallel.get_cuda_rng_tracker()
    try:
        model_parallel.model_parallel_cuda_manual_seed(5)
        with tracker.fork():
            drawn = torch.rand(3)
        assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(2723)))
    finally:
        tracker.reset()
