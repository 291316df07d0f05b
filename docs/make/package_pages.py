"""One page a package: its README, and the way to its API."""

from __future__ import annotations

import re
from pathlib import Path


def package_pages(root: Path, names: list[str]) -> dict[str, str]:
    """The text of each package's page, by distribution."""
    return {name: _page(name, root / "packages" / name / "README.md") for name in names}


def _page(name: str, readme: Path) -> str:
    text = readme.read_text(encoding="utf-8")
    text = text.replace("](../../docs/", "](../")
    # What is relative to the package's folder is not on the site.
    text = re.sub(r"\[([^\]]+)\]\((?!https?://|#|\.\./[a-z])[^)]+\)", r"\1", text)
    title, _, rest = text.partition("\n")
    return f"{title}\n\nAll its public names: [API](../api/{name}.md).\n{rest}"
