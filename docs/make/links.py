"""What leads nowhere in a built site, and what would be loaded from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADING = {"img", "script", "iframe", "source", "video", "audio", "embed", "object"}
# A link element only names these; nothing is fetched.
NAMING = {"canonical", "prev", "next", "alternate"}


class Page(HTMLParser):
    """The anchors of a page, its links, and what it loads."""

    def __init__(self, text: str) -> None:
        """Read one page."""
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what one element names, links to and loads."""
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        address = found.get("href") or found.get("src") or found.get("data")
        if address:
            named = tag == "link" and set(found.get("rel", "").split()) & NAMING
            loads = tag in LOADING or (tag == "link" and not named)
            (self.loads if loads else self.links).append(address)


def problems_of(site: Path) -> list[str]:
    """Every link of the site without a target, and everything that it loads from elsewhere."""
    pages = {
        path.resolve(): Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")
    }
    if not pages:
        return [f"{site}: no page"]
    found = [
        f"{path.relative_to(site.resolve())}: {problem}"
        for path, page in sorted(pages.items())
        for problem in _of_page(path, page, pages, site.resolve())
    ]
    return found + [
        f"{path.relative_to(site)}: loads {address}"
        for path in sorted(site.rglob("*.css"))
        for address in re.findall(
            r"(?:url\(|@import\s*)[\"']?((?:https?:)?//[^\"')]+)", path.read_text(encoding="utf-8")
        )
    ]


def _of_page(path: Path, page: Page, pages: dict[Path, Page], site: Path) -> Iterator[str]:
    yield from (f"loads {address}" for address in page.loads if urlsplit(address).netloc)
    for address in {*page.links, *page.loads}:
        parts = urlsplit(address)
        if parts.scheme or parts.netloc:
            continue
        name = unquote(parts.path)
        start = site if name.startswith("/") else path.parent
        target = (start / name.lstrip("/")).resolve() if name else path
        if target.is_dir():
            target /= "index.html"
        if not target.is_file():
            yield f"{address}: no such file"
        elif parts.fragment and target in pages:
            anchors = pages[target].anchors
            yield from () if unquote(parts.fragment) in anchors else (f"{address}: no such anchor",)
