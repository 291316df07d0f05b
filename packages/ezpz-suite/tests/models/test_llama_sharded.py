"""Llama, plain or tensor parallel, sharded by FSDP2 from the meta device, is Llama on one rank."""

import pytest
import torch

from ezpz.models import Llama, LlamaConfig

SCRIPT = """
import torch
from ezpz.models import Llama, LlamaConfig, ModelError, huggingface_state_dict
from ezpz_dist import setup_torch, wrap_model_for_fsdp2, all_reduce, cleanup

setup_torch(tensor_parallel_size={tensor})
config = LlamaConfig(dim=64, layers=2, heads=8, kv_heads=4, hidden=96, tie_embeddings={tied})
parallel = {tensor} > 1
model = Llama(config, parallel=parallel, sequence_parallel=parallel, device="meta")
model = wrap_model_for_fsdp2(model)
print(*(name for name, one in model.named_modules() if type(one).__name__.startswith("FSDP")))
try:
    huggingface_state_dict(model)
except ModelError as error:
    print(error)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
tokens = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(0))
mine = tokens.chunk(2)[ezpz_dist.data_share()[0]]
for _ in range(3):
    loss = model(mine[:, :-1], mine[:, 1:])
    loss.backward()
    if parallel:
        ezpz_tp.finalize_grads(model)
    optimizer.step()
    optimizer.zero_grad()
    print(all_reduce(loss.item(), op="mean"))
cleanup()
"""


@pytest.mark.parametrize(("tensor", "tied"), [(2, False), (2, True), (1, False)])
def test_fsdp2_from_meta(ranks, tensor, tied):
    config = LlamaConfig(dim=64, layers=2, heads=8, kv_heads=4, hidden=96, tie_embeddings=tied)
    model = Llama(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    tokens = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(0))
    expected = []
    for _ in range(3):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert expected[-1] < expected[0]
    for text in ranks(2 * tensor, SCRIPT.format(tied=tied, tensor=tensor)):
        units, refused, *losses = text.splitlines()
        assert refused.startswith("embed_tokens.weight is sharded by FSDP2; expected"), refused
        assert {"layers.0", "layers.1"} <= set(units.split())
        # What is tied is left to the root.
        assert ({"embed_tokens", "lm_head"} <= set(units.split())) is not tied
        assert [float(loss) for loss in losses] == pytest.approx(expected, abs=1e-5)


def test_positions_stay_exact_in_mixed_precision(ranks):
    """FSDP2 casts what it gives to a block; not what turns its features."""
    script = """
    from ezpz.models import Llama, LlamaConfig
    from ezpz_dist import setup_torch, wrap_model_for_fsdp2, cleanup
    setup_torch()
    model = wrap_model_for_fsdp2(Llama(LlamaConfig(dim=64, layers=1, heads=4)), dtype="bf16")
    seen = []
    model.layers[0].self_attn.register_forward_pre_hook(lambda module, given: seen.extend(given))
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    print(model(tokens, tokens).dtype, seen[0].dtype, seen[1].cos.dtype)
    cleanup()
    """
    assert ranks(2, script) == ["torch.float32 torch.bfloat16 torch.float32\n"] * 2
