"""The code blocks of a Markdown file, and what stands beside each that says how to run it.

A comment before a block (``<!-- ranks: 2 train.py -->``) marks it:

- ``python``: run in order, in one process and one namespace a page. ``ranks: N NAME``: a script
  of its own, saved as NAME and run on N ranks. ``given: CODE``: not run, but
  type-checked after CODE; so is ``py``, whose marker must have it.
- ``text`` is what the block before it prints. Where that is a shell's, it is what the script that
  it launches has printed. ``message``: an error that our sources hold; ``message: torch``, torch's.
  ``drawing``: a picture, or lines of a file.
- ``diff``: what it makes is run on two ranks, and so is what it is made of, by the page's command
  that ends with ``# before``; DeepSpeed's is compiled only.
- ``bash``, ``console``: every command is known here, and what can be run without harm is run.
- ``toml`` parses; ``markdown`` is a text for people.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/*.md"),
                 *ROOT.glob("packages/*/news/README.md")]
    if path.name != "CHANGELOG.md"
)  # fmt: skip

_FENCE = re.compile(r"^( *)(`{3,})([^`]*)$")
_COMMENT = re.compile(r"<!--\s*(.*?)\s*-->\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its lines, and the comment right before it."""

    page: Path
    line: int
    language: str
    code: str
    marker: str

    @property
    def place(self):
        """File and line, as editors open them."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def marked(self, kind):
        """What follows ``kind`` in the comment; None where the comment is not of that kind."""
        if self.marker == kind:
            return ""
        return self.marker[len(kind) + 1 :].strip() if self.marker.startswith(f"{kind}:") else None


def blocks_of(page):
    """All fenced blocks of a page, in order."""
    found = []
    before = []
    inside = None
    fence, indent, language, start = "", "", "", 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        match = _FENCE.match(line)
        if inside is None and match:
            inside, start = [], number
            indent, fence, language = match[1], match[2], match[3].strip().split(" ")[0]
        elif inside is not None and line.strip() == fence:
            marker = _COMMENT.search("\n".join(before))
            code = "".join(f"{each.removeprefix(indent)}\n" for each in inside)
            found.append(Block(page, start, language, code, marker[1] if marker else ""))
            inside, before = None, []
        elif inside is not None:
            inside.append(line)
        else:
            before.append(line)
    assert inside is None, f"{page}:{start}: a block without end"
    return found


def name_of(page):
    """A page's name in the tests' names."""
    return str(page.relative_to(ROOT))
