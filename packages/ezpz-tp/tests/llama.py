"""A small Llama-style transformer; activations are ``[sequence, batch, hidden]``."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import ezpz_tp
from ezpz_tp import ring_attention, sequence_positions


@dataclass(frozen=True)
class Config:
    vocabulary: int = 256
    hidden: int = 32
    heads: int = 4
    inner: int = 64
    layers: int = 2
    sequence: int = 48
    sequence_parallel: bool = False
    context_parallel: bool = False
    tied: bool = False  # the head has the embedding's weight
    dropout: float = 0.0

    @property
    def head_dim(self):
        return self.hidden // self.heads


def column(config, outputs, seed, *, pad_output=False):
    options = {"sequence_parallel": config.sequence_parallel, "seed": seed, "bias": False}
    return ezpz_tp.ColumnParallelLinear(
        config.hidden, outputs, gather_output=False, pad_output=pad_output, **options
    )


def row(config, inputs, seed):
    options = {"sequence_parallel": config.sequence_parallel, "seed": seed, "bias": False}
    return ezpz_tp.RowParallelLinear(inputs, config.hidden, input_is_parallel=True, **options)


def norm(config):
    made = nn.RMSNorm(config.hidden, eps=1e-5)
    if config.sequence_parallel:
        ezpz_tp.mark_sequence_parallel(made.weight)
    return made


def rotate(values, positions, *, base=10000.0):
    """Rotary position embedding of ``[batch, heads, sequence, head_dim]``."""
    half = values.shape[-1] // 2
    numbers = {"device": values.device, "dtype": torch.float64}
    frequencies = base ** (-torch.arange(half, **numbers) / half)
    angles = positions.to(**numbers)[:, None] * frequencies
    cos, sin = angles.cos().to(values.dtype), angles.sin().to(values.dtype)
    first, second = values[..., :half], values[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Attention(nn.Module):
    def __init__(self, config, seed):
        super().__init__()
        self.head_dim = config.head_dim
        self.context_parallel = config.context_parallel
        self.query = column(config, config.hidden, seed)
        self.key = column(config, config.hidden, seed + 1)
        self.value = column(config, config.hidden, seed + 2)
        self.out = row(config, config.hidden, seed + 3)

    def forward(self, hidden):
        q, k, v = (
            # [s, b, heads * d] -> [b, heads, s, d]
            part(hidden).unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0, 3)
            for part in (self.query, self.key, self.value)
        )
        if self.context_parallel:
            length = q.shape[-2] * ezpz_tp.get_context_parallel_world_size()
            positions = sequence_positions(length, device=q.device)
            mixed = ring_attention(rotate(q, positions), rotate(k, positions), v, is_causal=True)
        else:
            positions = torch.arange(q.shape[-2], device=q.device)
            q, k = rotate(q, positions), rotate(k, positions)
            mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.permute(2, 0, 1, 3).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, config, seed):
        super().__init__()
        self.gate = column(config, config.inner, seed)
        self.up = column(config, config.inner, seed + 1)
        self.down = row(config, config.inner, seed + 2)
        self.dropout = config.dropout

    def forward(self, hidden):
        inner = silu(self.gate(hidden)) * self.up(hidden)
        if self.dropout:
            # Each rank drops other features.
            with ezpz_tp.get_rng_tracker().fork():
                inner = nn.functional.dropout(inner, self.dropout)
        return self.down(inner)


class Block(nn.Module):
    def __init__(self, config, seed):
        super().__init__()
        self.attention_norm, self.attention = norm(config), Attention(config, seed)
        self.feed_forward_norm, self.feed_forward = norm(config), FeedForward(config, seed + 10)

    def forward(self, hidden):
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


def embedding(config):
    return ezpz_tp.VocabParallelEmbedding(
        config.vocabulary, config.hidden, sequence_parallel=config.sequence_parallel, seed=1
    )


class Llama(nn.Module):
    """Tokens ``[batch, sequence]`` to logits, this rank's part of the vocabulary."""

    def __init__(self, config, *, first=True, last=True, layers=None):
        super().__init__()
        self.config = config
        self.embedding = self.head = self.norm = None
        if first:
            self.embedding = embedding(config)
        # Named by their number in the whole model.
        numbers = range(config.layers) if layers is None else layers
        self.layers = nn.ModuleDict({str(n): Block(config, 100 * (n + 1)) for n in numbers})
        if last:
            self.norm = norm(config)
            self.head = column(config, config.vocabulary, 2, pad_output=True)
            if config.tied and first:
                self.head.weight = self.embedding.weight
            elif config.tied:
                self.head.weight = embedding(config).weight  # of the same seed: equal
                self.head.weight.shared = True
        if config.tied and first and not last:
            self.embedding.weight.shared_embedding = True

    def forward(self, hidden):
        if self.embedding is not None:
            hidden = self.embedding(hidden.t())
        for layer in self.layers.values():
            hidden = layer(hidden)
        if self.head is not None:
            return self.head(self.norm(hidden)).transpose(0, 1)
        return hidden


def unsharded(config):
    """The model where there are no groups: its layers are torch's then, as test_linear says."""
    return Llama(replace(config, sequence_parallel=False, context_parallel=False))


def parallel_loss_of(logits, labels):
    return ezpz_tp.vocab_parallel_cross_entropy(logits, labels).mean()


def text_batch(step, *, batch=4, length=48):
    """Bytes of a text and the byte after each: two ``[batch, length]``, the same on every rank."""
    text = Path(__file__).with_name("text.txt").read_bytes()
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length - 1, (batch,), generator=generator).tolist()
    tokens = torch.tensor([list(text[start : start + length + 1]) for start in starts])
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3, eps=1e-6, foreach=True)


def learn_alone(config, steps, batch, dtype=torch.float32):
    model = unsharded(config).to(dtype)
    optimizer, losses = optimizer_of(model.parameters()), []
    for step in range(steps):
        tokens, labels = text_batch(step, batch=batch, length=config.sequence)
        loss = cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return losses
