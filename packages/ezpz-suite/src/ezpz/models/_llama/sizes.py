"""Llamas by name.

Source: the ``config.json`` of each model on the Hugging Face Hub (meta-llama/Llama-2-7b-hf,
Llama-3.2-1B, Llama-3.1-8B, Llama-3.1-70B), which say what tables 1 and 3 of arXiv:2307.09288 and
arXiv:2407.21783 say. ``debug`` is ours: bytes as tokens, trained in seconds on a CPU.
"""

from __future__ import annotations

from .config import LlamaConfig, RopeScaling

_LONG = {"max_seq_len": 131072, "rope_theta": 5e5}

LLAMA_SIZES: dict[str, LlamaConfig] = {
    "debug": LlamaConfig(dim=128, layers=4, heads=8, kv_heads=4),
    "7b": LlamaConfig(32000, 4096, 32, 32, 32, 11008, max_seq_len=4096),
    "1b": LlamaConfig(
        128256, 2048, 16, 32, 8, 8192, tie_embeddings=True,
        rope_scaling=RopeScaling(factor=32.0), **_LONG,  # type: ignore[arg-type]
    ),
    "8b": LlamaConfig(128256, 4096, 32, 32, 8, 14336, rope_scaling=RopeScaling(), **_LONG),  # type: ignore[arg-type]
    "70b": LlamaConfig(128256, 8192, 80, 64, 8, 28672, rope_scaling=RopeScaling(), **_LONG),  # type: ignore[arg-type]
}  # fmt: skip
"""Sizes by name: Llama 2 7B, Llama 3.2 1B, Llama 3.1 8B and 70B, and one to try things with."""
