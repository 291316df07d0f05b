"""Full tensors in files of any format: one module a format, each read a piece at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor

from ezpz_tp._errors import DegreeError, ParallelError
from ezpz_tp._shard import Entry, Held, Shard, optimizer_name, parameter_of

if TYPE_CHECKING:
    from .torch_file import StoredTensor

# Where full tensors come from: files of any format, read a piece at a time.


class Source(Protocol):
    """Full tensors, of which any stretch can be read.

    An optimizer's tensors are entries too, named as `optimizer_name` does.

    Attributes:
        entries: What there is, by name, in the model's order.
        metadata: What else the files say. Of it ``param_groups`` (of the optimizer, by names),
            ``values`` (of states, that are no tensors) and ``extra`` are passed on.
    """

    @property
    def entries(self) -> Mapping[str, Entry]: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill ``out`` with a stretch of a full tensor along the dim that is split (or dim 0).

        Args:
            name: A name in ``entries``.
            start: Where in the full tensor the stretch begins.
            out: A CPU tensor of the entry's dtype, of any strides, of the full shape but for its
                length along that dim.
        """
        ...


@dataclass(frozen=True, slots=True)
class Options:
    """What a reader has to be told because its files do not say it.

    Args:
        plan: Patterns of names, and how the tensors they match are split.
        vocab_size: The vocabulary without padding.
    """

    plan: Mapping[str, Any] | None = None
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """A format of files: whether a path is of it, and how to open it."""

    name: str
    recognizes: Callable[[Path], bool]
    open: Callable[[Path, Options], Source]


# What the tensors of Llama-like models are called, and how each is split: tables only.


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


# How a tensor is split, known by its name.

Way: TypeAlias = int | tuple[int, int | Sequence[int]] | None
"""The dim that is split, or None; and with it the number, or the sizes, of matrices stacked."""


class Splits:
    """Which way tensors are split: as the caller's plan says, or else a table.

    Args:
        table: By pattern.
        options: The caller's plan, which comes first, and the vocabulary without padding.
    """

    def __init__(self, table: Mapping[str, Split], options: Options) -> None:
        self._table, self._plan = table, dict(options.plan or {})
        self._vocab_size = options.vocab_size

    def known(self, name: str) -> Split | None:
        """Return what the table says of a name, or None."""
        for pattern, split in self._table.items():
            if fnmatchcase(name, pattern):
                return split
        return None

    def shard(self, name: str, full_shape: tuple[int, ...]) -> Shard | None:
        """Return how a full tensor is to be split, or None if nothing is known of its name.

        A tensor without dims, which cannot be split, is always known. A vocabulary loses its
        padding.

        Raises:
            DegreeError: It cannot be split so.
            ParallelError: It has fewer rows than the vocabulary.
        """
        split = self.known(name)
        vocabulary = split is not None and split.padded
        if vocabulary and self._vocab_size is not None:
            if not 0 < self._vocab_size <= full_shape[0]:
                raise ParallelError(
                    f"vocab_size={self._vocab_size}; expected 1 to {full_shape[0]}: tensor {name} "
                    f"has shape {full_shape}"
                )
            full_shape = (self._vocab_size, *full_shape[1:])
        planned = self._planned(name)
        if planned is not None:
            return _shard(name, full_shape, planned, padded=vocabulary and planned.dim == 0)
        if split is not None:
            return _shard(name, full_shape, split, padded=vocabulary)
        return None if full_shape else Shard(full_shape)

    def stored(self, name: str, local_shape: tuple[int, ...], degree: int) -> Shard | None:
        """Return what a file's tensor is a part of, one of ``degree`` equal ones, or None.

        Here the table comes first: it says what the files are.

        Raises:
            DegreeError: It cannot have been split so.
        """
        split = self.known(name) or self._planned(name)
        if split is None:
            return None if local_shape else Shard(local_shape)
        return _shard(name, _full(local_shape, split.dim, degree), split, padded=split.padded)

    def _planned(self, name: str) -> Split | None:
        for pattern, way in self._plan.items():
            if fnmatchcase(name, pattern):
                dim, matrices = way if isinstance(way, tuple) and len(way) == 2 else (way, 1)
                sizes = (matrices,) if isinstance(matrices, int) else tuple(matrices)
                if not all(isinstance(each, int) for each in (dim or 0, *sizes)):
                    raise ParallelError(
                        f"plan[{pattern!r}]={way!r}; expected a dim, None for what every rank "
                        "holds whole, or (dim, matrices) with their number or sizes"
                    )
                return Split(dim, matrices)
        return None


def unknown(where: object, tensors: Mapping[str, tuple[int, ...]]) -> ParallelError:
    """Return what to raise of tensors whose names no rule knows."""
    shown = [f"{name} {list(shape)}" for name, shape in tensors.items()]
    more = f", ... ({len(shown)} in all)" if len(shown) > 8 else ""
    return ParallelError(
        f"{where}: no rule says how these tensors are split: {', '.join(shown[:8])}{more}. Give "
        'plan={"pattern": dim}, with None as the dim of what every rank holds whole'
    )


def same_names(
    where: object,
    found: Mapping[str, StoredTensor],
    first: object,
    wanted: Mapping[str, StoredTensor],
) -> None:
    """Raise `ParallelError` unless a file has the tensors that the first one has."""
    for name, tensor in wanted.items():
        if name not in found:
            raise ParallelError(
                f"{where}: has no tensor {name}; expected one of shape {tensor.shape}, as {first} "
                "has it (files of different models?)"
            )
    for name, tensor in found.items():
        if name not in wanted:
            raise ParallelError(
                f"{where}: has a tensor {name} of shape {tensor.shape}; expected none, as {first} "
                "has none (files of different models?)"
            )


def _shard(name: str, full_shape: tuple[int, ...], split: Split, *, padded: bool) -> Shard:
    dim, blocks = split.dim, split.matrices
    if dim is None:
        return Shard(full_shape)
    if isinstance(blocks, int):
        size = full_shape[dim] if -len(full_shape) <= dim < len(full_shape) else 0
        if blocks < 1 or size % blocks:
            raise DegreeError(
                f"{name}: dim {dim} of a tensor of shape {full_shape} is not {blocks} matrices of "
                "one size"
            )
        blocks = (size // blocks,) * blocks if blocks > 1 else ()
    try:
        return Shard(full_shape, dim, tuple(blocks), padded)
    except DegreeError as error:
        raise DegreeError(f"{name}: {error}") from error


def _full(local_shape: tuple[int, ...], dim: int | None, degree: int) -> tuple[int, ...]:
    if dim is None or not -len(local_shape) <= dim < len(local_shape):
        return local_shape
    dim %= len(local_shape)
    return (*local_shape[:dim], local_shape[dim] * degree, *local_shape[dim + 1 :])
