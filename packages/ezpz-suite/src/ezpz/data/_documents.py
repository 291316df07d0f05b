"""Documents and chats as blocks of tokens, with the tokens that are learned."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ezpz_dist import DataError

from ._tokens import text_files

NOT_LEARNED = -100
"""The target of a token that is not learned, as torch's cross entropy has it."""


def pack_documents(path: str | Path, tokenizer: Any, block: int) -> dict[str, Tensor]:
    """Return documents one after the other, cut into blocks: what a causal language model learns.

    Each document ends with the tokenizer's end of text. Attention sees a whole block, also where
    several documents are in it. What is left over at the end is dropped.

    Args:
        path: A JSONL file whose lines have ``text``; or ``prompt`` and ``completion``; or
            ``messages`` of a chat, each with ``role`` and ``content``, which the tokenizer's chat
            template puts into words: one document, or one up to each answer that the template
            changes later. Or a text file, or a folder of them. Of a prompt nothing is
            learned, and of a chat what the assistant says.
        tokenizer: Of transformers.
        block: Tokens of a block.

    Returns:
        ``tokens`` and ``targets``, int64, ``[blocks, block]``: the targets are the tokens that
        follow, or -100 where they are not learned.

    Raises:
        DataError: A line is none of these, there is no chat template, or there are fewer than two
            blocks.
    """
    path = Path(path)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    tokens, learned = list[int](), list[int]()
    for its_tokens, its_learned in _documents(path, tokenizer):
        tokens += its_tokens + end
        learned += its_learned + end
    count = (len(tokens) - 1) // block
    if count < 2:
        raise DataError(
            f"{path}: {len(tokens)} tokens; expected at least two blocks of {block}: give more "
            "text, or a smaller --block"
        )
    whole = count * block
    return {
        "tokens": torch.tensor(tokens[:whole]).view(count, block),
        "targets": torch.tensor(learned[1 : whole + 1]).view(count, block),
    }


def _documents(path: Path, tokenizer: Any) -> Iterator[tuple[list[int], list[int]]]:
    """Yield of each document its tokens, and those of them that are learned (others: -100)."""
    if path.suffix != ".jsonl":
        for file in text_files(path, ""):
            tokens = _tokens(file.read_text(encoding="utf-8", errors="replace"), tokenizer)
            yield tokens, tokens
        return
    # Not splitlines(): JSON allows other line separators within a text, as they are.
    with path.open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield from _of_row(json.loads(line), tokenizer)
            except Exception as error:  # a chat template raises what it likes
                raise DataError(
                    f"{path}, line {number}: {error}; expected an object with text, with prompt "
                    "and completion, or with messages of role and content"
                ) from error


def _of_row(row: dict[str, Any], tokenizer: Any) -> Iterator[tuple[list[int], list[int]]]:
    if "text" in row:
        tokens = _tokens(row["text"], tokenizer)
        yield tokens, tokens
        return
    if "messages" not in row:
        prompt = _tokens(row["prompt"], tokenizer)
        learned = tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
        yield prompt + learned, [NOT_LEARNED] * len(prompt) + learned
        return
    if not tokenizer.chat_template:
        raise ValueError("the model's tokenizer has no chat template: use one of a chat model")
    messages, tokens, learned = row["messages"], list[int](), list[int]()
    for number, message in enumerate(messages, 1):
        # What the template makes of the chat so far: what a message adds is its part.
        so_far = _templated(messages[:number], tokenizer)
        if message["role"] == "assistant":
            asked = _templated(messages[: number - 1], tokenizer, add_generation_prompt=True)
        else:
            asked = so_far
        if so_far[: len(asked)] != asked:
            raise ValueError(
                f"message {number}: the chat template changes what it made of those before it"
            )
        if asked[: len(tokens)] != tokens:  # as Qwen 3's, which drops the thoughts of old answers
            yield tokens, learned
            tokens, learned = [], []
        learned += [NOT_LEARNED] * (len(asked) - len(tokens)) + so_far[len(asked) :]
        tokens = so_far
    yield tokens, learned


def _tokens(text: str, tokenizer: Any) -> list[int]:
    """Return a text's tokens, without the end that some tokenizers add."""
    tokens: list[int] = tokenizer(text)["input_ids"]
    return tokens[:-1] if tokens and tokens[-1] == tokenizer.eos_token_id else tokens


def _templated(messages: Sequence[Any], tokenizer: Any, **options: Any) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options) if messages else ""
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens
