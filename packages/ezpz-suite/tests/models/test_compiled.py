"""Models that a wrapper compiles: whole graphs, one for all blocks, made once, the same losses."""

import pytest

SCRIPT = """
import torch
import ezpz
from ezpz.models import DiT, DiTConfig, Llama, LlamaConfig, ViTConfig, VisionTransformer
from torch._dynamo.utils import counters

ezpz.setup_torch(seed=1)
# A break of the graph is an error too.
HOW, torch._dynamo.config.error_on_recompile = dict(backend="aot_eager", fullgraph=True), True
images, none = torch.randn(4, 1, 8, 8), torch.zeros(4).long()
tokens = torch.randint(256, (2, 32))
CASES = [
    (ezpz.wrap_model_for_ddp, lambda: Llama(LlamaConfig(dim=64, heads=4)), tokens.chunk(2, 1)),
    (ezpz.wrap_model_for_fsdp, lambda: Llama(LlamaConfig(dim=64, heads=4)), (tokens,)),
    (ezpz.wrap_model_for_fsdp2, lambda: VisionTransformer(ViTConfig()), (images,)),
    (ezpz.wrap_model_for_ddp, lambda: DiT(DiTConfig(label_dropout=0.0)), (images, none, none)),
    (ezpz.wrap_model, lambda: torch.nn.Linear(8, 2), (images,)),
]

def losses(wrap, make, inputs, compile):
    torch.manual_seed(0)
    model = wrap(make(), compile=compile)
    assert not any("_orig_mod" in name for name in model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = (model(*inputs) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()

for case in CASES:
    torch._dynamo.reset()
    counters.clear()
    compiled = list(losses(*case, HOW))
    assert counters["stats"]["unique_graphs"] == 1, (case, counters)
    assert compiled == list(losses(*case, False)), case
ezpz.cleanup()
"""


@pytest.mark.slow
def test_blocks_are_compiled_once_and_whole(ranks):
    ranks(2, SCRIPT)
