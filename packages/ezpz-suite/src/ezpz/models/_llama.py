"""Llama: its sizes, its layers (torch's own or those of ezpz_tp), whole or a pipeline's stage."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import ezpz_tp
from ezpz_device import as_dtype

from ._errors import ModelError


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
            # Rounded up to a multiple of 256, as Meta's reference code does.
            object.__setattr__(self, "hidden", -(-8 * self.dim // 768) * 256)
        for name in ["vocab_size", "dim", "layers", "heads", "kv_heads", "hidden", "max_seq_len"]:
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
        if name not in LLAMA_SIZES:
            raise ModelError(f"no Llama of size {name!r}; expected one of {', '.join(LLAMA_SIZES)}")
        return replace(LLAMA_SIZES[name], **changes)

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
        from ._llama_files import config_of  # noqa: PLC0415  # only who asks pays for it

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


# Source: the ``config.json`` of each model on the Hugging Face Hub (meta-llama/Llama-2-7b-hf,
# Llama-3.2-1B, Llama-3.1-8B, Llama-3.1-70B), which say what tables 1 and 3 of arXiv:2307.09288 and
# arXiv:2407.21783 say. ``debug`` is ours: bytes as tokens, trained in seconds on a CPU. So is
# ``125m``: as wide and as deep as GPT-2's smallest.
_LONG = {"max_seq_len": 131072, "rope_theta": 5e5}

LLAMA_SIZES: dict[str, LlamaConfig] = {
    "debug": LlamaConfig(dim=128, layers=4, heads=8, kv_heads=4),
    "125m": LlamaConfig(50304, 768, 12, 12, tie_embeddings=True),
    "7b": LlamaConfig(32000, 4096, 32, 32, 32, 11008, max_seq_len=4096),
    "1b": LlamaConfig(
        128256, 2048, 16, 32, 8, 8192, tie_embeddings=True,
        rope_scaling=RopeScaling(factor=32.0), **_LONG,  # type: ignore[arg-type]
    ),
    "8b": LlamaConfig(128256, 4096, 32, 32, 8, 14336, rope_scaling=RopeScaling(), **_LONG),  # type: ignore[arg-type]
    "70b": LlamaConfig(128256, 8192, 80, 64, 8, 28672, rope_scaling=RopeScaling(), **_LONG),  # type: ignore[arg-type]
}  # fmt: skip
"""Sizes by name: Llama 2 7B, Llama 3.2 1B, Llama 3.1 8B and 70B, and two to try things with."""


# Rotary position embeddings (Su et al., arXiv:2104.09864), in Hugging Face's order of features:
# feature i of a head turns with feature i + head_dim / 2. (Meta's own files pair neighbors; their
# weights are permuted when they are converted.)


class Rotation:
    """By what the features of each token are turned: fp32 ``[tokens, head_dim]``."""

    # No tuple and no dataclass: FSDP2 would look into them, and cast the tensors to the 16 bits
    # that it computes in.

    def __init__(self, angles: Tensor) -> None:
        self.cos, self.sin = angles.cos(), angles.sin()


def rotation(config: LlamaConfig, positions: Tensor) -> Rotation:
    """Return what `rotate` turns tokens at these positions, ``[tokens]``, by."""
    steps = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = 1.0 / (config.rope_theta ** (steps / config.head_dim))
    if config.rope_scaling is not None:
        frequencies = _stretched(frequencies, config.rope_scaling)
    angles = torch.outer(positions.to(torch.float32), frequencies)
    return Rotation(torch.cat([angles, angles], dim=-1))


def rotate(values: Tensor, by: Rotation) -> Tensor:
    """Turn ``[batch, heads, tokens, head_dim]``, in fp32, and return it in its own dtype."""
    wide = values if values.dtype == torch.float64 else values.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * by.cos + torch.cat([-second, first], dim=-1) * by.sin).to(values.dtype)


def _stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide low frequencies by a factor, and blend those between low and high (Llama 3.1)."""
    turns = scaling.original_length * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


_STD = 0.02  # of the first weights, as of GPT-2 and of transformers' Llama


@dataclass(frozen=True)
class Build:
    """How a Llama's layers are made: by torch or by ezpz_tp, all from one seed."""

    config: LlamaConfig
    parallel: bool = False
    sequence_parallel: bool = False
    seed: int = 0
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None

    def column(self, outputs: int, tensor: int, *, pad_output: bool = False) -> nn.Module:
        """Return a projection out of the residual stream, its outputs split over ranks."""
        if not self.parallel:
            return self._plain(nn.Linear, self.config.dim, outputs, tensor, _STD)
        # Its gradient is not summed over the ranks: that `enter` does, once for several of them.
        made = ezpz_tp.ColumnParallelLinear(
            self.config.dim, outputs, bias=False, gather_output=False, pad_output=pad_output,
            **self._options(tensor, _STD),
        )  # fmt: skip
        made.reduce_input_gradient = False
        return made

    def row(self, inputs: int, tensor: int) -> nn.Module:
        """Return a projection into the residual stream, its inputs split over ranks."""
        # What each of 2 L projections adds is scaled so that their sum is not (GPT-2).
        std = _STD / (2 * self.config.layers) ** 0.5
        if not self.parallel:
            return self._plain(nn.Linear, inputs, self.config.dim, tensor, std)
        return ezpz_tp.RowParallelLinear(
            inputs, self.config.dim, bias=False, input_is_parallel=True,
            sequence_parallel=self.sequence_parallel, **self._options(tensor, std),
        )  # fmt: skip

    def embedding(self, tensor: int) -> nn.Module:
        rows, columns = self.config.vocab_size, self.config.dim
        if not self.parallel:
            return self._plain(nn.Embedding, rows, columns, tensor, _STD)
        return ezpz_tp.VocabParallelEmbedding(
            rows, columns, sequence_parallel=self.sequence_parallel, **self._options(tensor, _STD)
        )

    def norm(self) -> nn.RMSNorm:
        made = nn.RMSNorm(
            self.config.dim, eps=self.config.norm_eps, device=self.device, dtype=self.dtype
        )
        if self.sequence_parallel:
            ezpz_tp.mark_sequence_parallel(made.weight)
        return made

    def enter(self, hidden: Tensor) -> Tensor:
        """Hand the residual stream to column-parallel layers: gather or copy it, once for all."""
        if self.sequence_parallel:
            return ezpz_tp.gather_from_sequence_parallel_region(hidden)
        return ezpz_tp.copy_to_tensor_parallel_region(hidden) if self.parallel else hidden

    def _plain(
        self, kind: type[nn.Linear | nn.Embedding], first: int, second: int, tensor: int, std: float
    ) -> nn.Module:
        """Return a layer of torch's very class, by which FSDP2's units and others know it."""
        options = self._options(tensor, std)
        init_method, seed = options.pop("init_method"), options.pop("seed")
        options["device"] = self.device or torch.get_default_device()
        if kind is nn.Linear:
            options["bias"] = False
        # Without torch's own first weights, which would draw from everybody's generator.
        made: nn.Module = nn.utils.skip_init(kind, first, second, **options)
        fill = partial(_fill, made, init_method, seed)
        vars(made)["reset_parameters"] = fill
        fill()
        return made

    def _options(self, tensor: int, std: float) -> dict[str, Any]:
        init, seed = partial(nn.init.normal_, std=std), self.seed * 2**24 + tensor
        return {"init_method": init, "device": self.device, "dtype": self.dtype, "seed": seed}


def _fill(module: nn.Module, init_method: Any, seed: int) -> None:
    weight = module.get_parameter("weight")
    ezpz_tp.initialize_shard(weight, weight.shape, None, 0, 1, init_method, seed=seed)


KINDS = ("ring", "ulysses", "unified")


class SequenceShare:
    def __init__(self, kind: str | None, ulysses: int | None) -> None:
        if kind is not None and kind not in KINDS:
            raise ModelError(f"context_parallel={kind!r}; expected one of {', '.join(KINDS)}")
        if (kind == "unified") is (ulysses is None):
            raise ModelError(
                f"context_parallel={kind!r}, ulysses={ulysses}; expected ulysses= (ranks that "
                "share heads) with 'unified', and only there"
            )
        self.kind = kind
        self.degree = 1 if kind is None else ezpz_tp.get_context_parallel_world_size()
        self._group: ProcessGroup | None = None
        self._ulysses: ProcessGroup | None = None
        if ulysses is not None:
            self._ulysses, self._group = ezpz_tp.split_context(ulysses)

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        if self.kind is None:
            return tensor
        return ezpz_tp.shard_sequence(tensor, dim, group=self._group, ulysses_group=self._ulysses)

    def positions(self, length: int, device: torch.device) -> Tensor:
        if self.kind is None:
            return torch.arange(length, device=device)
        return ezpz_tp.sequence_positions(
            length, group=self._group, ulysses_group=self._ulysses, device=device
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return this rank's rows of causal attention: ``q [batch, heads, s, d]``, ``kv_heads``."""
        if self.kind == "ring":
            return ezpz_tp.ring_attention(q, k, v, is_causal=True)
        if self.kind == "ulysses":
            return ezpz_tp.ulysses_attention(q, k, v, is_causal=True)
        if self._ulysses is not None and self._group is not None:
            return ezpz_tp.unified_attention(
                q, k, v, ulysses_group=self._ulysses, ring_group=self._group, is_causal=True
            )
        grouped = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    def __deepcopy__(self, memo: dict[int, object]) -> SequenceShare:
        # The copy is of the same groups, which cannot be copied.
        return self


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., arXiv:2305.13245) with rotary positions."""

    def __init__(self, build: Build, share: SequenceShare, layer: int) -> None:
        super().__init__()
        config = build.config
        self._build, self._share, self._head_dim = build, share, config.head_dim
        self.q_proj = build.column(config.heads * config.head_dim, 16 * layer + 1)
        self.k_proj = build.column(config.kv_heads * config.head_dim, 16 * layer + 2)
        self.v_proj = build.column(config.kv_heads * config.head_dim, 16 * layer + 3)
        self.o_proj = build.row(config.heads * config.head_dim, 16 * layer + 4)

    def forward(self, hidden: Tensor, by: Rotation) -> Tensor:
        hidden = self._build.enter(hidden)
        # [b, s, heads * d], sequence parallel [s, b, heads * d], to [b, heads, s, d]
        order = (1, 2, 0, 3) if self._build.sequence_parallel else (0, 2, 1, 3)
        q, k, v = (
            projection(hidden).unflatten(-1, (-1, self._head_dim)).permute(order)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, by), rotate(k, by)
        mixed = self._share.attend(q, k, v)
        back = (2, 0, 1, 3) if self._build.sequence_parallel else (0, 2, 1, 3)
        added: Tensor = self.o_proj(mixed.permute(back).flatten(-2))
        return added


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv:2002.05202)."""

    def __init__(self, build: Build, layer: int) -> None:
        super().__init__()
        self._build = build
        self.gate_proj = build.column(build.config.hidden, 16 * layer + 5)
        self.up_proj = build.column(build.config.hidden, 16 * layer + 6)
        self.down_proj = build.row(build.config.hidden, 16 * layer + 7)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self._build.enter(hidden)
        added: Tensor = self.down_proj(silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return added


class Block(nn.Module):
    """One of a Llama's layers; its modules are named as transformers names them."""

    def __init__(self, build: Build, share: SequenceShare, layer: int) -> None:
        super().__init__()
        self.input_layernorm = build.norm()
        self.self_attn = Attention(build, share, layer)
        self.post_attention_layernorm = build.norm()
        self.mlp = FeedForward(build, layer)

    def forward(self, hidden: Tensor, by: Rotation) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), by)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


_EMBEDDING, _HEAD = 1, 2  # seeds below those of layer 0, which begin at 16


class Llama(nn.Module):
    """A decoder-only transformer (Touvron et al., arXiv:2302.13971), plain torch or parallel.

    Parameters are named as those of transformers' ``LlamaForCausalLM`` without their ``model.``.
    The first weights depend on ``seed`` alone. They are equal for every degree, for plain and
    parallel, and for a whole model and its stages. The model can also be built on the meta device
    and filled later, by ``reset_parameters()`` or by ``ezpz.wrap_model_for_fsdp2``.

    A plain model knows nothing of groups. A parallel one is built after
    ``ezpz_tp.initialize_tensor_parallel`` (or ``ezpz.setup_torch(tensor_parallel_size=...)``): its
    layers are split over tensor-parallel ranks, and attention goes over the context-parallel
    ranks. After backward call ``ezpz_tp.finalize_grads(model)``, with ``average_over="context"``
    where the sequence is shared.

    >>> model = Llama(LlamaConfig(dim=64, layers=2, heads=4, kv_heads=2))
    >>> tokens = torch.zeros(3, 16, dtype=torch.int64)
    >>> model(tokens).shape
    torch.Size([3, 16, 256])
    >>> model.loss(tokens, tokens).backward()

    Args:
        config: Sizes.
        parallel: Build on ezpz_tp's layers, over the groups that there are.
        sequence_parallel: Norms and residuals hold ``1/tp`` of the sequence, which tp must
            divide; with ``parallel`` only.
        context_parallel: How attention goes over the context-parallel ranks: ``"ring"``,
            ``"ulysses"``, ``"unified"``. None: of a parallel model by ring where there are
            several such ranks.
        ulysses: Of ``"unified"``: how many of them share heads.
        checkpoint: Keep no activations within a block; backward computes them again.
        seed: Of the weights.
        layers: The numbers of this stage's blocks; all if None.
        first: Whether the stage has the embedding.
        last: Whether the stage has the last norm and the output layer.
        device: Of the parameters; ``"meta"`` makes them without data.
        dtype: Of the parameters; also by name, as in ``"bf16"``.

    Attributes:
        config: Sizes.
        layers: The blocks, named by their numbers in the whole model.

    Raises:
        ezpz_tp.DegreeError: Tensor-parallel ranks do not divide the heads or the hidden width.
        ModelError: Options contradict each other.

    Collective, where parallel: every rank of the model builds it and calls it.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        parallel: bool = False,
        sequence_parallel: bool = False,
        context_parallel: str | None = None,
        ulysses: int | None = None,
        checkpoint: bool = False,
        seed: int = 0,
        layers: Iterable[int] | None = None,
        first: bool = True,
        last: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__()
        if not parallel and (sequence_parallel or context_parallel):
            raise ModelError(
                "Llama(parallel=False) with sequence_parallel or context_parallel; expected "
                "parallel=True: a plain model knows of no groups"
            )
        self.config: LlamaConfig = config
        self.checkpoint: bool = checkpoint
        degree = degree_of("tensor") if parallel else 1
        if parallel and context_parallel is None and degree_of("context") > 1:
            context_parallel = "ring"
        self._share = SequenceShare(context_parallel, ulysses)
        # With one tensor-parallel rank there is no sequence to share.
        if dtype is not None:
            dtype = as_dtype(dtype)
        self._build = build = Build(
            config, parallel, sequence_parallel and degree > 1, seed, device, dtype
        )
        if config.kv_heads % degree:
            raise ezpz_tp.DegreeError(
                f"Llama: kv_heads={config.kv_heads} is not divisible by the tensor-parallel degree "
                f"{degree}; expected a degree that divides it"
            )
        self.embed_tokens: nn.Module | None = build.embedding(_EMBEDDING) if first else None
        self.layers: nn.ModuleList = nn.ModuleList()
        for number in range(config.layers) if layers is None else layers:
            self.layers.add_module(str(number), Block(build, self._share, number + 1))
        self.norm: nn.RMSNorm | None = None
        self.lm_head: nn.Module | None = None
        if last:
            self.norm = build.norm()
            # A tied head draws what the embedding draws, whichever of them is filled last.
            tensor = _EMBEDDING if config.tie_embeddings else _HEAD
            self.lm_head = build.column(config.vocab_size, tensor, pad_output=True)
        if config.tie_embeddings:
            self._tie()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits, or with ``targets`` the loss.

        Collective, where parallel: every rank of the model calls this.

        Args:
            tokens: ``[batch, s]``, int64; of a stage that is not the first, what the stage before
                returned. Where the sequence is shared, this rank's part (`shard_sequence`).
            targets: ``[batch, s]``, int64: the token after each; -100 is left out.

        Returns:
            ``[batch, s, vocab_size]``, parallel ``[batch, s, ceil(vocab_size / tp)]``; the
            residual stream of a stage that is not the last; or a scalar, see `loss`.

        Raises:
            ModelError: The sequence is longer than ``max_seq_len``, or this stage has no loss.
        """
        hidden = tokens
        if self.embed_tokens is not None:
            hidden = self.embed_tokens(tokens.t() if self._build.sequence_parallel else tokens)
        by = self._rotation(hidden)
        for layer in self.layers:
            if self.checkpoint and torch.is_grad_enabled():
                hidden = ezpz_tp.checkpoint_activations(layer, hidden, by)
            else:
                hidden = layer(hidden, by)
        if self.lm_head is None or self.norm is None:
            if targets is not None:
                raise ModelError("a stage without the output layer has no loss; give no targets")
            return hidden
        hidden = self._build.enter(self.norm(hidden))
        if self._build.sequence_parallel:
            hidden = hidden.transpose(0, 1)
        logits: Tensor = self.lm_head(hidden)
        if targets is None:
            return logits
        return mean_loss(logits, targets, self.config.vocab_size, parallel=self.is_parallel)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of the next token, a scalar of fp32.

        The same as ``model(tokens, targets)``, which is what to call where the model is wrapped:
        DDP and FSDP2 see to that only. Where sequences are shared it is this rank's part of it:
        the average over the context-parallel ranks is the batch's mean.

        Args:
            tokens: ``[batch, s]``, int64.
            targets: ``[batch, s]``, int64; -100 is left out.
        """
        return self(tokens, targets)  # type: ignore[no-any-return]  # nn.Module's __call__

    def shard_sequence(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of tokens or targets whose dim ``dim`` is the whole sequence.

        As the model's attention wants it; all of it where ranks share no sequence.
        """
        return self._share.part(tensor, dim)

    def reset_parameters(self) -> None:
        """Fill all parameters with the first weights again, for example after ``to_empty``.

        Collective, where parallel: every rank of the model calls this.
        """
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if module is not self and callable(reset):
                reset()
        if self.config.tie_embeddings:
            self._tie()

    @property
    def is_parallel(self) -> bool:
        """Whether the layers are those of ezpz_tp."""
        return self._build.parallel

    def _tie(self) -> None:
        """Let the head have the embedding's weight; over stages, say that they are one."""
        if self.embed_tokens is not None and self.lm_head is not None:
            self.lm_head.weight = self.embed_tokens.weight
        elif self.embed_tokens is not None:
            self.embed_tokens.weight.shared_embedding = True  # type: ignore[union-attr]
        elif self.lm_head is not None:
            self.lm_head.weight.shared_embedding = True  # type: ignore[union-attr]
            self.lm_head.weight.shared = True  # type: ignore[union-attr]

    def _rotation(self, hidden: Tensor) -> Rotation:
        dim, times = 1, self._share.degree
        if self._build.sequence_parallel:
            dim, times = 0, times * degree_of("tensor")
        length = hidden.shape[dim] * times
        if length > self.config.max_seq_len:
            raise ModelError(
                f"a sequence of {length} tokens; expected at most {self.config.max_seq_len}: "
                "shorten it, or give LlamaConfig a larger max_seq_len"
            )
        return rotation(self.config, self._share.positions(length, hidden.device))

    # What follows puts new parameters in the place of those here, of which nothing is said.
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with ezpz_tp.keep_attributes(self):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self)] = new = type(self).__new__(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        ezpz_tp.copy_attributes(self, new)
        return new


def llamas(module: nn.Module) -> Iterator[Llama]:
    """Yield the Llamas in a module: itself, or the chunks of a pipeline's rank."""
    chunks = list(module) if isinstance(module, nn.ModuleList) else [module]
    for one in chunks:
        if not isinstance(one, Llama):
            raise ModelError(f"{type(module).__name__}; expected a Llama that is not wrapped")
        yield one


def mean_loss(logits: Tensor, targets: Tensor, vocab_size: int, *, parallel: bool) -> Tensor:
    """Return the mean cross entropy of logits ``[batch, s, vocabulary or this rank's part]``."""
    # Where sequences are shared, the average of it over the context-parallel ranks is the mean of
    # all of their tokens, also where some have more targets that are left out than others.
    if not parallel:
        return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    losses = ezpz_tp.vocab_parallel_cross_entropy(logits, targets, vocab_size=vocab_size)
    count, ranks = (targets != -100).sum().float(), degree_of("context")
    if ranks > 1:
        # A sum over the ranks of any group, which other ranks' gradients do not come through.
        group = ezpz_tp.get_context_parallel_group()
        count = ezpz_tp.reduce_from_tensor_parallel_region(count, group)
    return losses.sum() * ranks / count


def degree_of(axis: str) -> int:
    state = ezpz_tp.current_state()
    return 1 if state is None else state.size(axis)
