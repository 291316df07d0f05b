"""Plain words: every page has short sentences, few semicolons and colons, and the field's terms."""

import re
from statistics import mean

import pytest
from tests.docs.blocks import PAGES, ROOT, name_of

MEAN, LONGEST = 16, 30
MEANS = {ROOT / "README.md": 14}
ODD = re.compile(
    r"(?i)check-point|\b(?:anew|nobody|in vain|whose part|harmless twice|there twice)\b"
)
_ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+")


def paragraphs_of(text):
    """The text between blank lines and list items, without code, tables, headings and pictures."""
    text = re.sub(r"^( *)```.*?^\1```$|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    paragraph = []
    for line in [*text.splitlines(), ""]:
        starts = _ITEM.match(line)
        skipped = not line.strip() or line.startswith(("|", "#", "!"))
        if (starts or skipped) and paragraph:
            yield " ".join(paragraph)
            paragraph = []
        if not skipped:
            paragraph.append(line[starts.end() :] if starts else line.strip())


def sentences_of(text):
    """Each sentence with its number of words; code counts as one word."""
    for paragraph in paragraphs_of(text):
        for sentence in re.split(r"(?<=[.!?])\s+", re.sub(r"`[^`]*`", "it", paragraph)):
            words = len(re.findall(r"[A-Za-z][\w'-]*", sentence))
            if words > 2:
                yield words, sentence


def problems_of(text, most):
    """What is hard to read in a page; ``most`` is the mean that its sentences may have."""
    found = list(sentences_of(text))
    problems = [f"{words} words: {sentence}" for words, sentence in found if words > LONGEST]
    if found and (average := mean(words for words, _ in found)) > most:
        problems.append(f"{average:.1f} words a sentence; expected at most {most}")
    marks = [sentence for _, sentence in found for mark in sentence if mark in ";:"]
    if len(found) > 2 and 3 * len(marks) >= len(found):
        problems.append(f"{len(marks)} semicolons and colons in {len(found)} sentences: {marks}")
    return problems + [f"odd: {odd}" for odd in ODD.findall(text)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_is_read_once(page):
    problems = problems_of(page.read_text(encoding="utf-8"), MEANS.get(page, MEAN))
    assert problems == [], "\n".join(problems)


def test_a_page_that_is_hard_to_read_is_seen():
    long = "word " * 31 + "\n"
    assert len(problems_of(f"{long}\n- nobody; here: yes.\n- a `b c` d e; f.\n", 9)) == 4
    assert problems_of(f"# {long}\n| {long}\n```text\n{long}```\n\nA [short](x.md).\n", 16) == []
