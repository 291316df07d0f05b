"""A model as Megatron-LM's users write it; only its imports are changed before it runs."""

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.model_parallel_config import ModelParallelConfig
from torch.nn.init import normal_

VOCABULARY, HIDDEN = 32, 16


class Model(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        options = {"config": config, "init_method": normal_}
        product = {"bias": True, "skip_bias_add": True, "is_expert": False, **options}
        self.embedding = tensor_parallel.VocabParallelEmbedding(
            VOCABULARY, HIDDEN, reduce_scatter_embeddings=config.sequence_parallel, **options
        )
        self.up = tensor_parallel.ColumnParallelLinear(
            HIDDEN, 4 * HIDDEN, gather_output=False, tp_comm_buffer_name="fc1", **product
        )
        self.down = tensor_parallel.RowParallelLinear(
            4 * HIDDEN, HIDDEN, input_is_parallel=True, tp_comm_buffer_name="fc2", **product
        )
        self.norm = torch.nn.LayerNorm(HIDDEN, dtype=config.params_dtype)
        for parameter in self.norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        borrowed = {"bias": False, "skip_bias_add": False, "skip_weight_param_allocation": True}
        self.output_layer = tensor_parallel.ColumnParallelLinear(
            HIDDEN, VOCABULARY, gather_output=False, **borrowed, **options
        )

    def forward(self, ids, labels):
        hidden = self.embedding(ids)
        if not self.config.sequence_parallel:
            hidden = hidden.transpose(0, 1).contiguous()
        inner, bias = self.up(self.norm(hidden))
        output, output_bias = self.down(torch.nn.functional.gelu(inner + bias))
        hidden = hidden + output + output_bias
        logits, _ = self.output_layer(hidden, weight=self.embedding.weight)
        loss = tensor_parallel.vocab_parallel_cross_entropy(
            logits.float() if logits.dtype == torch.bfloat16 else logits,
            labels.transpose(0, 1).contiguous(),
        )
        return loss.transpose(0, 1).contiguous()


def train(sequence_parallel):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    assert parallel_state.get_tensor_model_parallel_world_size() == 2
    tensor_parallel.model_parallel_cuda_manual_seed(123)
    config = ModelParallelConfig(
        tensor_model_parallel_size=2,
        sequence_parallel=sequence_parallel,
        params_dtype=torch.float64,
        use_cpu_initialization=True,
    )
    model = Model(config)
    rank = parallel_state.get_tensor_model_parallel_rank()
    data = {"text": torch.arange(34).view(2, 17) * 7 % VOCABULARY} if rank == 0 else None
    text = tensor_parallel.broadcast_data(["text"], data, torch.int64)["text"].long()
    with tensor_parallel.get_cuda_rng_tracker().fork():
        draw = torch.rand(1)
    loss = tensor_parallel.checkpoint(model, False, text[:, :-1], text[:, 1:])
    loss.mean().backward()
    return model, loss, draw
