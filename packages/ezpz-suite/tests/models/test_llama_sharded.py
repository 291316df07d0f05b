"""Tensor parallel Llama, sharded further by FSDP2 from the meta device: it is Llama on one rank."""

import pytest
import torch

from ezpz.models import Llama, LlamaConfig

SCRIPT = """
import torch
from ezpz.models import Llama, LlamaConfig
from ezpz_dist import setup_torch, wrap_model_for_fsdp2, all_reduce, cleanup

setup_torch(tensor_parallel_size=2)
config = LlamaConfig(dim=64, layers=2, heads=8, kv_heads=4, hidden=96, tie_embeddings={tied})
model = Llama(config, parallel=True, sequence_parallel=True, device="meta")
model = wrap_model_for_fsdp2(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
tokens = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(0))
mine = tokens.chunk(2)[ezpz_tp.get_data_parallel_rank()]
for _ in range(3):
    loss = model(mine[:, :-1], mine[:, 1:])
    loss.backward()
    ezpz_tp.finalize_grads(model)
    optimizer.step()
    optimizer.zero_grad()
    print(all_reduce(loss.item(), op="mean"))
cleanup()
"""


@pytest.mark.parametrize("tied", [False, True])
def test_tensor_parallel_and_fsdp2_from_meta(ranks, tied):
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
    for text in ranks(4, SCRIPT.format(tied=tied)):
        assert [float(line) for line in text.split()] == pytest.approx(expected, abs=1e-5)
