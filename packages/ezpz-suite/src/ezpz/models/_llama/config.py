"""The sizes of a Llama, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ezpz.models._errors import ModelError

_MULTIPLE = 256
"""The feed-forward width is rounded up to a multiple, as Meta's reference code does."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How Llama 3.1 stretches its rotary embeddings to longer sequences (``rope_type`` llama3).

    Attributes:
        factor: By which frequencies are divided whose period is long.
        low_freq_factor: Periods above ``original_length / low_freq_factor`` are long.
        high_freq_factor: Periods below ``original_length / high_freq_factor`` stay.
        original_length: Tokens that the model was first trained on.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of a Llama (Touvron et al., arXiv:2302.13971; grouped queries: arXiv:2307.09288).

    >>> LlamaConfig(dim=64, heads=4).hidden
    256
    >>> LlamaConfig.named("8b").parameters()
    8030261248

    Attributes:
        vocab_size: Tokens there are; 256 are bytes.
        dim: Width of the residual stream; ``heads`` divides it, into an even size.
        layers: Number of blocks.
        heads: Query heads.
        kv_heads: Key and value heads, which divide the query heads; as many if 0.
        hidden: Width of the feed-forward layers; if 0 8/3 of ``dim``, rounded up to a
            multiple of 256.
        max_seq_len: Longest sequence that is accepted.
        rope_theta: Base of the rotary embeddings' frequencies.
        rope_scaling: For Llama 3.1 and later.
        norm_eps: Of the RMS norms.
        tie_embeddings: The output layer has the embedding's weight.

    Raises:
        ModelError: Sizes do not fit.
    """

    vocab_size: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 8
    kv_heads: int = 0
    hidden: int = 0
    max_seq_len: int = 2048
    rope_theta: float = 1e4
    rope_scaling: RopeScaling | None = field(default=None, kw_only=True)
    norm_eps: float = 1e-5
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)
        if not self.hidden:
            width = -(-8 * self.dim // (3 * _MULTIPLE)) * _MULTIPLE
            object.__setattr__(self, "hidden", width)
        sizes = "vocab_size", "dim", "layers", "heads", "kv_heads", "hidden", "max_seq_len"
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ModelError(f"LlamaConfig({name}={value!r}); expected a whole number from 1")
        if self.dim % self.heads or self.head_dim % 2:
            raise ModelError(
                f"LlamaConfig(dim={self.dim}, heads={self.heads}); expected heads of an even size: "
                f"make dim a multiple of {2 * self.heads}"
            )
        if self.heads % self.kv_heads:
            raise ModelError(
                f"LlamaConfig(heads={self.heads}, kv_heads={self.kv_heads}); expected kv_heads "
                "that divide heads"
            )

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.dim // self.heads

    @classmethod
    def named(cls, name: str, **changes: Any) -> LlamaConfig:
        """Return the sizes of a known model (`LLAMA_SIZES`), with what you change.

        Raises:
            ModelError: There is no such name.
        """
        from .sizes import LLAMA_SIZES  # noqa: PLC0415  # which are made of this class

        if name not in LLAMA_SIZES:
            raise ModelError(f"no Llama of size {name!r}; expected one of {', '.join(LLAMA_SIZES)}")
        import dataclasses  # noqa: PLC0415  # as above

        return dataclasses.replace(LLAMA_SIZES[name], **changes)

    @classmethod
    def from_huggingface(cls, source: str | Path | Mapping[str, Any] | Any) -> LlamaConfig:
        """Return the sizes that a Hugging Face ``LlamaConfig`` says.

        Args:
            source: A model's folder or its ``config.json``, what is in that, or transformers'
                configuration.

        Raises:
            ModelError: It is of another kind of model, or of a Llama with something that this
                one has not, such as biases.
        """
        from .huggingface import config_of  # noqa: PLC0415  # only who asks pays for it

        return config_of(source)

    def parameters(self) -> int:
        """Return the number of parameters of the whole model; a tied weight counts once."""
        heads = 2 * self.dim * self.head_dim * (self.heads + self.kv_heads)
        block = heads + 3 * self.dim * self.hidden + 2 * self.dim
        tables = self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)
        return self.layers * block + tables + self.dim

    def flops_per_token(self, sequence: int | None = None) -> int:
        """Return the floating-point operations of a token, forward and backward.

        As `ezpz_obs.transformer_flops` counts them: 6 for each parameter, and the attention.

        Args:
            sequence: Tokens of a sequence; ``max_seq_len`` if None.
        """
        from ezpz_obs import transformer_flops  # noqa: PLC0415  # the models need it here only

        length = self.max_seq_len if sequence is None else sequence
        return transformer_flops(self.parameters(), self.layers, self.dim, length)
