"""What the tensors of Llama-like models are called, and how each is split: tables only.

Sources: Hugging Face transformers' ``modeling_llama.py`` (and its `base_model_tp_plan`), Meta's
``llama/model.py`` and ``llama_models``, and Megatron-LM's ``megatron/core/models/gpt`` with
``tools/checkpoint/schema_core.py``; all read in 2026.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Split:
    """How a tensor is split.

    Attributes:
        dim: Along which dim; None where every rank holds the whole.
        matrices: How many of one size are stacked along it, or their sizes.
        padded: A degree that does not divide it is allowed, as for a vocabulary.
    """

    dim: int | None
    matrices: int | Sequence[int] = 1
    padded: bool = False


WHOLE = Split(None)
COLUMN = Split(0)
ROW = Split(1)
VOCABULARY = Split(0, padded=True)
GATED = Split(0, matrices=2)

HUGGINGFACE: dict[str, Split] = {
    "*embed_tokens.weight": VOCABULARY,
    "*lm_head.weight": VOCABULARY,
    "*lm_head.bias": VOCABULARY,
    "*.[qkv]_proj.weight": COLUMN,
    "*.[qkv]_proj.bias": COLUMN,
    "*.gate_proj.weight": COLUMN,
    "*.gate_proj.bias": COLUMN,
    "*.up_proj.weight": COLUMN,
    "*.up_proj.bias": COLUMN,
    "*.gate_up_proj.weight": GATED,
    "*.gate_up_proj.bias": GATED,
    "*.o_proj.weight": ROW,
    "*.o_proj.bias": WHOLE,
    "*.down_proj.weight": ROW,
    "*.down_proj.bias": WHOLE,
    "*norm.weight": WHOLE,
    "*norm.bias": WHOLE,
    "*.rotary_emb.inv_freq": WHOLE,
}
LLAMA: dict[str, Split] = {
    "tok_embeddings.weight": VOCABULARY,
    "output.weight": VOCABULARY,
    "layers.*.attention.w[qkv].weight": COLUMN,
    "layers.*.attention.wo.weight": ROW,
    "layers.*.feed_forward.w[13].weight": COLUMN,
    "layers.*.feed_forward.w2.weight": ROW,
    "layers.*_norm.weight": WHOLE,
    "norm.weight": WHOLE,
    "rope.freqs": WHOLE,
}
MEGATRON: dict[str, Split] = {
    "*embedding.word_embeddings.weight": VOCABULARY,
    "*embedding.position_embeddings.weight": WHOLE,
    "*output_layer.weight": VOCABULARY,
    "*output_layer.bias": VOCABULARY,
    "*.linear_qkv.weight": COLUMN,
    "*.linear_qkv.bias": COLUMN,
    "*.linear_proj.weight": ROW,
    "*.linear_proj.bias": WHOLE,
    # Not linear_fc1: one matrix, or a gate above an up projection, as the arguments say.
    "*.linear_fc2.weight": ROW,
    "*.linear_fc2.bias": WHOLE,
    "*layernorm.weight": WHOLE,
    "*layernorm.bias": WHOLE,
    "*.layer_norm_weight": WHOLE,
    "*.layer_norm_bias": WHOLE,
    "*.rotary_pos_emb.inv_freq": WHOLE,
    "*.router.weight": WHOLE,
    "*.router.expert_bias": WHOLE,
}
ALL = {**HUGGINGFACE, **LLAMA, **MEGATRON}
"""Patterns, in which ``*`` is anything, ``[..]`` one of some characters; the first that fits."""

FROM_LLAMA = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "layers.{}.attention_norm": "model.layers.{}.input_layernorm",
    "layers.{}.attention.wq": "model.layers.{}.self_attn.q_proj",
    "layers.{}.attention.wk": "model.layers.{}.self_attn.k_proj",
    "layers.{}.attention.wv": "model.layers.{}.self_attn.v_proj",
    "layers.{}.attention.wo": "model.layers.{}.self_attn.o_proj",
    "layers.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "layers.{}.feed_forward.w1": "model.layers.{}.mlp.gate_proj",
    "layers.{}.feed_forward.w2": "model.layers.{}.mlp.down_proj",
    "layers.{}.feed_forward.w3": "model.layers.{}.mlp.up_proj",
}
"""Modules of Meta's Llama, by Hugging Face's names; ``{}`` is the number of a layer."""

FROM_MEGATRON = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
    "decoder.layers.{}.input_layernorm": "model.layers.{}.input_layernorm",
    "decoder.layers.{}.self_attention.linear_qkv.layer_norm": "model.layers.{}.input_layernorm",
    "decoder.layers.{}.self_attention.linear_proj": "model.layers.{}.self_attn.o_proj",
    "decoder.layers.{}.self_attention.q_layernorm": "model.layers.{}.self_attn.q_norm",
    "decoder.layers.{}.self_attention.k_layernorm": "model.layers.{}.self_attn.k_norm",
    "decoder.layers.{}.pre_mlp_layernorm": "model.layers.{}.post_attention_layernorm",
    "decoder.layers.{}.mlp.linear_fc1.layer_norm": "model.layers.{}.post_attention_layernorm",
    "decoder.layers.{}.mlp.linear_fc2": "model.layers.{}.mlp.down_proj",
}
"""Modules of Megatron-LM's GPT, but for those that are two or three of Hugging Face's."""
