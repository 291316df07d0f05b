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

    Each document ends with the tokenizer's end of text, a chat with its last answer and that.
    Attention sees a whole block, also where several documents are in it. What is left over at the
    end is dropped.

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
    tokens, learned = list[int](), list[int]()
    for its_tokens, its_learned in _documents(path, tokenizer):
        tokens += its_tokens
        learned += its_learned
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
            tokens += _end(tokenizer)
            yield tokens, tokens
        return
    # Not splitlines(): JSON allows other line separators within a text, as they are.
    with path.open(encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
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
    end = _end(tokenizer)
    if "text" in row:
        tokens = _tokens(row["text"], tokenizer) + end
        yield tokens, tokens
    elif "messages" not in row:
        prompt = _tokens(row["prompt"], tokenizer)
        tokens = _tokens(row["prompt"] + row["completion"], tokenizer) + end
        yield tokens, _after(prompt, tokens)
    elif not tokenizer.chat_template:
        raise ValueError("the model's tokenizer has no chat template: use one of a chat model")
    else:
        yield from _chats(row["messages"], tokenizer, end)


def _chats(
    messages: Sequence[Any], tokenizer: Any, end: list[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield a chat up to its last answer, and up to each that the template changes later."""
    tokens, learned, closing = list[int](), list[int](), list[int]()
    for number, message in enumerate(messages, 1):
        if message["role"] != "assistant":
            continue
        asked = _templated(messages[: number - 1], tokenizer, add_generation_prompt=True)
        text = _templated(messages[:number], tokenizer)
        if not text.startswith(asked):
            raise ValueError(
                f"message {number}: the chat template changes what it made of those before it"
            )
        before, so_far = (
            tokenizer(one, add_special_tokens=False)["input_ids"] for one in (asked, text)
        )
        if so_far[: len(tokens)] != tokens:  # as Qwen 3's, which drops the thoughts of old answers
            yield tokens + closing, learned + closing
            tokens, learned = [], []
        learned += _after(before, so_far)[len(tokens) :]
        tokens = so_far
        closing = [] if text.rstrip().endswith(tokenizer.eos_token or "\0") else end
    yield tokens + closing, learned + closing


def _after(known: list[int], tokens: list[int]) -> list[int]:
    """Return tokens with -100 for those that a known beginning has, too."""
    # A text's last token may differ where the text goes on: it is learned with what follows.
    pairs = enumerate(zip(known, tokens, strict=False))
    same = next((at for at, (one, other) in pairs if one != other), len(known))
    return [NOT_LEARNED] * same + tokens[same:]


def _end(tokenizer: Any) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _tokens(text: str, tokenizer: Any) -> list[int]:
    """Return a text's tokens, without the end that some tokenizers add."""
    tokens: list[int] = tokenizer(text)["input_ids"]
    return tokens[:-1] if tokens and tokens[-1] == tokenizer.eos_token_id else tokens


def _templated(messages: Sequence[Any], tokenizer: Any, **options: Any) -> str:
    if not messages:
        return ""
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return text
