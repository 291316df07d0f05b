"""What a Hugging Face configuration says of a Llama."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from ezpz.models._errors import ModelError

from .config import LlamaConfig, RopeScaling

_FIXED = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
"""What this Llama can be only; what a configuration leaves out has these values."""


def config_of(source: str | Path | Mapping[str, Any] | Any) -> LlamaConfig:
    """Return the sizes; see `LlamaConfig.from_huggingface`."""
    said, where = _read(source)
    for name, value in _FIXED.items():
        if said.get(name, value) != value:
            raise ModelError(
                f"{where}: {name}={said[name]!r}; expected {value!r}: no other is here"
            )
    try:
        dim, heads = int(said["hidden_size"]), int(said["num_attention_heads"])
        if (said.get("head_dim") or dim // heads) * heads != dim:
            raise ModelError(
                f"{where}: head_dim={said['head_dim']} with {heads} heads of hidden_size={dim}; "
                f"expected {dim // heads}"
            )
        theta, scaling = _rotary(said, where)
        return LlamaConfig(
            vocab_size=int(said["vocab_size"]),
            dim=dim,
            layers=int(said["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(said.get("num_key_value_heads") or heads),
            hidden=int(said["intermediate_size"]),
            max_seq_len=int(said.get("max_position_embeddings", 2048)),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=float(said.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(said.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise ModelError(f"{where}: says no {error}; expected a Llama's configuration") from error


def _read(source: object) -> tuple[Mapping[str, Any], str]:
    if isinstance(source, Mapping):
        return source, "the configuration"
    if isinstance(source, (str, Path)):
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        try:
            said = orjson.loads(path.read_bytes())
        except (OSError, orjson.JSONDecodeError) as error:
            raise ModelError(f"{path}: {error}; expected a model's config.json") from error
        if not isinstance(said, dict):
            raise ModelError(f"{path}: holds a {type(said).__name__}; expected a JSON object")
        return said, str(path)
    to_dict = getattr(source, "to_dict", None)
    if to_dict is None:
        raise ModelError(
            f"a configuration of type {type(source).__name__}; expected a path, a mapping, or "
            "transformers' LlamaConfig"
        )
    return to_dict(), type(source).__name__


def _rotary(said: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Return base and scaling: transformers 5 has them in one mapping, before they were two."""
    rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or said.get("rope_theta") or 1e4)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelError(f"{where}: rope_type {kind!r}; expected 'default' or 'llama3'")
    return theta, RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_length=int(rope["original_max_position_embeddings"]),
    )
