"""Llama: whole, or a pipeline's stage of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, overload

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ezpz_tp
from ezpz.models._errors import ModelError

from .attention import SequenceShare
from .block import Block
from .config import LlamaConfig
from .layers import Build
from .rotary import Rotation, rotation

_EMBEDDING, _HEAD = 1, 2
"""Seeds below those of layer 0, which begin at 16."""


class Llama(nn.Module):
    """A decoder-only transformer (Touvron et al., arXiv:2302.13971), plain torch or parallel.

    Parameters are named as those of transformers' ``LlamaForCausalLM`` without their ``model.``.
    The first weights depend on ``seed`` alone: they are equal for every degree, for plain and
    parallel, for a whole model and its stages, and built directly or on the meta device and
    filled later, by ``reset_parameters()`` or by ``ezpz.wrap_model_for_fsdp2``.

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
        dtype: Of the parameters.

    Attributes:
        config: Sizes.
        layers: The blocks, named by their numbers in the whole model.

    Raises:
        ezpz_tp.DegreeError: Tensor-parallel ranks do not divide the heads or the hidden width.
        ModelError: Options contradict each other.

    Collective, where parallel: every rank of the model builds it and calls it.
    """

    config: LlamaConfig
    checkpoint: bool
    embed_tokens: nn.Module | None
    layers: nn.ModuleList
    norm: nn.RMSNorm | None
    lm_head: nn.Module | None

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
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not parallel and (sequence_parallel or context_parallel):
            raise ModelError(
                "Llama(parallel=False) with sequence_parallel or context_parallel; expected "
                "parallel=True: a plain model knows of no groups"
            )
        self.config, self.checkpoint = config, checkpoint
        several = parallel and _degree("tensor") > 1
        if parallel and context_parallel is None and _degree("context") > 1:
            context_parallel = "ring"
        self._share = SequenceShare(context_parallel, ulysses)
        # With one tensor-parallel rank there is no sequence to share.
        self._build = build = Build(
            config, parallel, sequence_parallel and several, seed, device, dtype
        )
        if parallel:
            _check_heads(config, _degree("tensor"))
        self.embed_tokens = build.embedding(_EMBEDDING) if first else None
        self.layers = nn.ModuleList()
        for number in range(config.layers) if layers is None else layers:
            self.layers.add_module(str(number), Block(build, self._share, number + 1))
        self.norm = self.lm_head = None
        if last:
            self.norm = build.norm()
            # A tied head draws what the embedding draws, whichever of them is filled last.
            tensor = _EMBEDDING if config.tie_embeddings else _HEAD
            self.lm_head = build.column(config.vocab_size, tensor, pad_output=True)
        if config.tie_embeddings:
            self._tie()

    @overload
    def forward(self, tokens: Tensor) -> Tensor: ...
    @overload
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor: ...
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
            first = self._build.sequence_parallel
            hidden = self.embed_tokens(tokens.t() if first else tokens)
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
        return logits if targets is None else self.loss_of(logits, targets)

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

    def loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of what `forward` returned; see `loss`."""
        return mean_loss(logits, targets, self.config.vocab_size, parallel=self.is_parallel)

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
            dim, times = 0, times * _degree("tensor")
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
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        ezpz_tp.copy_attributes(self, new)
        return new


def llamas(module: nn.Module) -> Iterator[Llama]:
    """Yield the Llamas in a module: itself, or the chunks of a pipeline's rank.

    Raises:
        ModelError: There is none, or it is wrapped.
    """
    chunks = list(module) if isinstance(module, nn.ModuleList) else [module]
    for one in chunks:
        if not isinstance(one, Llama):
            raise ModelError(f"{type(module).__name__}; expected a Llama that is not wrapped")
        yield one


def mean_loss(logits: Tensor, targets: Tensor, vocab_size: int, *, parallel: bool) -> Tensor:
    """Return the mean cross entropy of logits ``[batch, s, vocabulary or this rank's part]``.

    Where sequences are shared, the average of it over the context-parallel ranks is the mean of
    all of their tokens, also where some have more targets that are left out than others.
    """
    if not parallel:
        return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    losses = ezpz_tp.vocab_parallel_cross_entropy(logits, targets, vocab_size=vocab_size)
    count, ranks = (targets != -100).sum().float(), _degree("context")
    if ranks > 1:
        # A sum over the ranks of any group, which other ranks' gradients do not come through.
        group = ezpz_tp.get_context_parallel_group()
        count = ezpz_tp.reduce_from_tensor_parallel_region(count, group)
    return losses.sum() * ranks / count


def _degree(axis: str) -> int:
    state = ezpz_tp.current_state()
    return 1 if state is None else state.size(axis)


def _check_heads(config: LlamaConfig, degree: int) -> None:
    if config.kv_heads % degree:
        raise ezpz_tp.DegreeError(
            f"Llama: kv_heads={config.kv_heads} is not divisible by the tensor-parallel degree "
            f"{degree}; expected a degree that divides it"
        )
