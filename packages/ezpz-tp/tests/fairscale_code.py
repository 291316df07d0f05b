"""A model as Llama's users write it; only its imports are changed before it runs."""

import fairscale.nn.model_parallel.initialize as fs_init
import torch
from fairscale.nn.model_parallel.cross_entropy import vocab_parallel_cross_entropy
from fairscale.nn.model_parallel.initialize import (
    get_model_parallel_rank,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from fairscale.nn.model_parallel.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)
from fairscale.nn.model_parallel.mappings import (
    copy_to_model_parallel_region,
    gather_from_model_parallel_region,
)
from fairscale.nn.model_parallel.random import checkpoint, model_parallel_cuda_manual_seed
from fairscale.nn.model_parallel.utils import divide_and_check_no_remainder

VOCABULARY, HIDDEN = 32, 16


class FeedForward(torch.nn.Module):
    def __init__(self, dim, hidden_dim):
        super().__init__()
        options = {"bias": False, "init_method": lambda x: x}
        self.w1 = ColumnParallelLinear(dim, hidden_dim, gather_output=False, **options)
        self.w2 = RowParallelLinear(hidden_dim, dim, input_is_parallel=True, **options)
        self.w3 = ColumnParallelLinear(dim, hidden_dim, gather_output=False, **options)

    def forward(self, x):
        return self.w2(torch.nn.functional.silu(self.w1(x)) * self.w3(x))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = ParallelEmbedding(VOCABULARY, HIDDEN, init_method=lambda x: x)
        self.feed_forward = FeedForward(HIDDEN, 4 * HIDDEN)
        self.output = ColumnParallelLinear(HIDDEN, VOCABULARY, bias=False, init_method=lambda x: x)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        return self.output(h + checkpoint(self.feed_forward, h))


def train():
    if not model_parallel_is_initialized():
        initialize_model_parallel(2)
    model_parallel_cuda_manual_seed(1)
    assert fs_init.get_model_parallel_world_size() == 2
    model = Model().double()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        # Each rank's own part of a weight that is loaded.
        whole = torch.randn(2, *parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(whole[get_model_parallel_rank()])
    tokens = torch.arange(34).view(2, 17) * 7 % VOCABULARY
    logits = model(tokens[:, :-1])
    columns = divide_and_check_no_remainder(VOCABULARY, 2)
    own = copy_to_model_parallel_region(logits).split(columns, -1)[get_model_parallel_rank()]
    loss = vocab_parallel_cross_entropy(own.contiguous(), tokens[:, 1:])
    loss.mean().backward()
    assert torch.equal(gather_from_model_parallel_region(own), logits)
    return model, loss
