"""Documents as blocks: what is learned of texts, prompts and chats."""

import json

import pytest

from ezpz.data import NOT_LEARNED, pack_documents
from ezpz_dist import DataError

transformers = pytest.importorskip("transformers", reason="the extra huggingface")
tokenizers = pytest.importorskip("tokenizers", reason="the extra huggingface")

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer():
    """Bytes as tokens; it adds an end of its own."""
    made = transformers.ByT5Tokenizer()
    made.chat_template = TEMPLATE
    return made


def written(tmp_path, *rows):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def chat(*said):
    rows = enumerate(said)
    return {"messages": [{"role": ("user", "assistant")[n % 2], "content": s} for n, s in rows]}


def learned(blocks, tokenizer):
    """Return the text that is learned, with a dot for each other token."""
    targets = blocks["targets"].flatten().tolist()
    one = ["." if each == NOT_LEARNED else tokenizer.decode([each]) for each in targets]
    return "".join(one).replace("</s>", "|")


def test_of_chats_the_assistants_words_are_learned_and_of_prompts_the_completions(
    tmp_path, tokenizer
):
    path = written(
        tmp_path,
        {"text": "abc"},
        {"prompt": "de", "completion": "fg"},
        chat("hi", "ho", "so", "no"),
        {"text": "x" * 20},
    )
    blocks = pack_documents(path, tokenizer, 4)
    whole = "bc|..fg|" + "." * 20 + "ho\n" + "." * 20 + "no\n|" + "x" * 20 + "|"
    found = learned(blocks, tokenizer)
    assert whole.startswith(found)
    assert len(whole) - len(found) < 4 + 1
    tokens, targets = blocks["tokens"].flatten(), blocks["targets"].flatten()
    is_learned = targets[:-1] != NOT_LEARNED
    assert bool((tokens[1:] == targets[:-1])[is_learned].all())


@pytest.mark.parametrize(("row", "why"), [
    ({"txt": "abc"}, "line 1: 'prompt'; expected an object with text"),
    ({"messages": [{"content": "hi"}]}, "line 1: 'role'"),
    ({"text": "abc"}, "4 tokens; expected at least two blocks of 4"),
], ids=str)  # fmt: skip
def test_what_cannot_be_learned_is_told(row, why, tmp_path, tokenizer):
    with pytest.raises(DataError, match=why):
        pack_documents(written(tmp_path, row), tokenizer, 4)


def test_a_template_that_changes_a_question_with_its_answer_is_refused(tmp_path, tokenizer):
    tokenizer.chat_template = "{{ messages | length }}" + TEMPLATE
    path = written(tmp_path, chat("hi", "ho"))
    with pytest.raises(DataError, match="message 2: the chat template changes"):
        pack_documents(path, tokenizer, 4)
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="has no chat template"):
        pack_documents(path, tokenizer, 4)


def test_answers_that_a_template_changes_later_are_documents_of_their_own(tmp_path, tokenizer):
    """As Qwen 3's, which drops the thoughts of the answers before the last question."""
    thinks = "{% if loop.last and m.role == 'assistant' %}*{% endif %}{{ m.content }}"
    tokenizer.chat_template = TEMPLATE.replace("{{ m.content }}", thinks)
    path = written(tmp_path, chat("hi", "ho", "so", "no"), {"text": "x" * 8})
    found = learned(pack_documents(path, tokenizer, 4), tokenizer)
    whole = "." * 19 + "*ho\n|" + "." * 43 + "*no\n|"
    assert found.startswith(whole)


def test_what_a_template_refuses_is_told_with_its_line(tmp_path, tokenizer):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    path = written(tmp_path, {"text": "abc"}, chat("hi", "ho"))
    with pytest.raises(DataError, match="line 2: roles must alternate"):
        pack_documents(path, tokenizer, 4)


def test_lines_end_where_jsonl_ends_them(tmp_path, tokenizer):
    path = tmp_path / "data.jsonl"
    text = "a\u2028b\u2029c\u0085d"  # which JSON allows as they are
    path.write_text(f'{{"text": "{text}"}}\r\n\n{{"text": "{text}"}}\n\n', encoding="utf-8")
    found = pack_documents(path, tokenizer, 4)["tokens"].flatten().tolist()
    assert tokenizer.decode(found).startswith(f"{text}</s>")


def test_a_completion_has_the_tokens_that_it_has_behind_its_prompt(tmp_path):
    """Not those of a text that begins, before which tokenizers as Llama's put a space."""
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({one: at for at, one in enumerate("|▁2+=4")}, merges=[])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="|")
    rows = [{"prompt": "2+2=", "completion": "4"}] * 4
    blocks = pack_documents(written(tmp_path, *rows), tokenizer, 7)
    assert tokenizer.convert_ids_to_tokens(blocks["tokens"][0].tolist()) == list("▁2+2=4|")
    assert learned(blocks, tokenizer).startswith("....4|.....4|")


@pytest.mark.parametrize(("template", "said", "whole"), [
    (TEMPLATE, ("hi", "ho", "so"), "." * 19 + "ho\n|x"),
    (TEMPLATE.replace("\n", "</s>\n"), ("hi", "ho"), "." * 19 + "ho|x"),
], ids=["a question is last", "the template ends it"])  # fmt: skip
def test_a_chat_has_one_end_and_it_is_an_answers(*, tmp_path, tokenizer, template, said, whole):
    tokenizer.chat_template = template
    path = written(tmp_path, chat(*said), {"text": "x" * 8})
    assert learned(pack_documents(path, tokenizer, 4), tokenizer).startswith(whole)
