"""The tokens that follow prompts: greedy or sampled, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ezpz_tp

from ._errors import ModelError
from ._llama import Cache, Llama


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Tensor | Sequence[Sequence[int] | Tensor],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos: int | Sequence[int] | None = None,
    seed: int | None = None,
) -> Tensor:
    """Return the tokens that a Llama adds to each of several prompts.

    Keys and values of the tokens so far are kept, as many heads of them as this rank has. Prompts
    of different lengths are padded on their left, which attention does not see. Give a model that
    other data-parallel ranks shard, as FSDP2 does, the same ``max_new_tokens`` on all of them;
    their prompts may differ.

    >>> from ezpz.models import Llama, LlamaConfig
    >>> model = Llama(LlamaConfig(dim=64, layers=2, heads=4))
    >>> generate(model, [[1, 2, 3], [4]], max_new_tokens=5).shape
    torch.Size([2, 5])

    Args:
        model: A whole `Llama`, plain or tensor parallel; also in DDP, or sharded by FSDP2.
        prompts: The numbers of each prompt's tokens; on the tensor-parallel ranks the same.
        max_new_tokens: How many to add.
        temperature: 0 takes the likeliest token. Above it, tokens are drawn, after the logits are
            divided by it.
        top_k: Draw from so many of the likeliest.
        top_p: Draw from the likeliest that together have this probability (Holtzman et al.,
            arXiv:1904.09751).
        eos: What ends a row; of several tokens any.
        seed: Of what is drawn; torch's own generator is used if None.

    Returns:
        ``[batch, max_new_tokens]``, int64, on the model's device, the same on all tensor-parallel
        ranks. A row that has ended is filled with ``eos``, or with the first of them.

    Raises:
        ModelError: Prompts or options do not fit, or the model has a part of the layers or shares
            sequences.

    Collective, where the model is parallel or sharded: every rank of it calls this.
    """
    llama = _whole(model)
    rows = _rows(prompts, llama.config.vocab_size)
    longest = max(map(len, rows))
    _check_options(max_new_tokens, temperature, top_k, top_p)
    length = longest + max_new_tokens
    if length > llama.config.max_seq_len:
        raise ModelError(
            f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens}; expected at most "
            f"max_seq_len={llama.config.max_seq_len} together: shorten one of them"
        )
    device = next(llama.parameters()).device
    padding = [longest - len(row) for row in rows]
    tokens = torch.stack(
        [nn.functional.pad(row, (many, 0)) for row, many in zip(rows, padding, strict=True)]
    ).to(device)
    cache = Cache(length, torch.tensor(padding, device=device) if any(padding) else None)
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    ends = torch.tensor([] if eos is None else eos, dtype=torch.int64, device=device).view(-1)
    ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
    added = ends.new_zeros(len(rows), max_new_tokens)
    # Another rank of FSDP2 may have rows that go on, and needs this one's parts of the weights.
    sharded = any(hasattr(each, "device_mesh") for each in llama.parameters())
    with _generating(llama):
        for place in range(max_new_tokens):
            logits = llama(tokens, cache=cache)[:, -1]
            if llama.is_parallel:
                logits = ezpz_tp.gather_from_tensor_parallel_region(logits)
            # What pads the vocabulary is at its end.
            logits = logits[:, : llama.config.vocab_size].float()
            if temperature == 0:
                tokens = logits.argmax(-1, keepdim=True)
            else:
                tokens = _drawn(logits / temperature, top_k, top_p, generator)
                if llama.is_parallel:
                    tokens = _of_the_first_rank(tokens)
            if len(ends):
                tokens = torch.where(ended.unsqueeze(-1), ends[0], tokens)
                ended |= torch.isin(tokens[:, 0], ends)
            added[:, place] = tokens[:, 0]
            if len(ends) and not sharded and ended.all():
                added[:, place + 1 :] = ends[0]
                break
    return added


def _whole(model: nn.Module) -> Llama:
    """Return the Llama, if it can generate."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    name = type(model).__name__
    if not isinstance(model, Llama):
        if hasattr(model, "generate"):
            raise ModelError(f"{name} has its own way to generate; call model.generate(...)")
        raise ModelError(f"{name}; expected a Llama of ezpz.models, whole")
    whole = model.embed_tokens is not None and model.lm_head is not None
    if not whole or len(model.layers) < model.config.layers:
        part = f"a pipeline's stage, of {len(model.layers)} of {model.config.layers} layers"
    elif (ranks := model._share.degree) > 1:  # noqa: SLF001  # the model's own module next door
        part = f"a Llama whose sequences {ranks} context-parallel ranks share"
    else:
        return model
    raise ModelError(
        f"{part}; expected a whole Llama: load the weights into one that is built without a "
        "pipeline and without context parallelism"
    )


def _rows(prompts: Tensor | Sequence[Sequence[int] | Tensor], vocab_size: int) -> list[Tensor]:
    rows = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str) or not len(prompt):
            raise ModelError(
                f"prompt {number} is {prompt!r}; expected at least one token, as the tokenizer "
                "numbers them"
            )
        row = torch.as_tensor(prompt)
        if row.dim() != 1 or row.is_floating_point() or row.min() < 0 or row.max() >= vocab_size:
            raise ModelError(
                f"prompt {number} is {prompt!r}; expected whole numbers, 0 to {vocab_size - 1}: "
                "use the model's own tokenizer"
            )
        rows.append(row.long())
    if not rows:
        raise ModelError("no prompts; expected at least one")
    return rows


def _check_options(
    max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    draws = temperature > 0 or (top_k is None and top_p is None)
    finite = 0 <= temperature < torch.inf
    for name, value, fits, expected in (
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "at least 1"),
        ("temperature", temperature, finite, "0 (the likeliest token) or more"),
        ("temperature", temperature, draws, "more than 0 with top_k or top_p, or neither of these"),
        ("top_k", top_k, top_k is None or top_k >= 1, "at least 1, or None"),
        ("top_p", top_p, top_p is None or 0 < top_p <= 1, "more than 0 and at most 1, or None"),
    ):
        if not fits:
            raise ModelError(f"generate({name}={value!r}); expected {expected}")


def _drawn(
    scores: Tensor, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """Return a token for each row of scores ``[batch, vocabulary]``, ``[batch, 1]``."""
    if top_k is not None:
        least = scores.topk(min(top_k, scores.shape[-1])).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if top_p is not None:
        chances, order = scores.softmax(-1).sort(descending=True)
        # Those before it have the probability already; of the first there are none.
        left_out = chances.cumsum(-1) - chances >= top_p
        scores = scores.masked_fill(left_out.scatter(-1, order, left_out), -torch.inf)
    return torch.multinomial(scores.softmax(-1), 1, generator=generator)


def _of_the_first_rank(tokens: Tensor) -> Tensor:
    # The ranks' generators may differ, and so may the last bits of a device's sums.
    if ezpz_tp.get_tensor_parallel_rank() > 0:
        tokens = torch.zeros_like(tokens)
    return ezpz_tp.reduce_from_tensor_parallel_region(tokens)


@contextmanager
def _generating(model: Llama) -> Iterator[None]:
    """Let the model take one token at a time, which is no sequence that ranks could share."""
    before, modules = model._build, list(model.modules())  # noqa: SLF001  # as above
    built = [vars(each) for each in modules if vars(each).get("_build") is before]
    layers = [vars(each) for each in modules if vars(each).get("sequence_parallel")]
    for each in built:
        each["_build"] = replace(before, sequence_parallel=False)
    for each in layers:
        each["sequence_parallel"] = False
    try:
        with _uncompiled(modules):
            yield
    finally:
        for each in built:
            each["_build"] = before
        for each in layers:
            each["sequence_parallel"] = True
        for module in modules:
            # FSDP2 keeps the root's weights whole until a backward, so that what an optimizer
            # changes in the parts would not be seen.
            if (reshard := getattr(module, "reshard", None)) is not None:
                reshard()


def _uncompiled(modules: Iterable[nn.Module]) -> AbstractContextManager[object]:
    """Let nothing be compiled: each length would be, until they are too many."""
    compiled = any(
        "forward" in vars(each) or getattr(each, "_compiled_call_impl", None) is not None
        for each in modules
    )
    # Asked only then, because it imports torch's compiler, for seconds.
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
