"""Bring what is written and what is generated into one folder that zensical can build."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from api_pages import PACKAGES, api_pages
from machine_pages import machine_pages
from package_pages import package_pages

WRITTEN = (".md", ".svg", ".css", ".js")


def stage(root: Path, folder: Path) -> Path:
    """Write pages and configuration to ``folder`` and return the configuration's path."""
    pages = folder / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    for source in sorted((root / "docs").rglob("*")):
        if source.suffix in WRITTEN:
            target = pages / source.relative_to(root / "docs")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    generated = {
        "machines": machine_pages(),
        "packages": package_pages(root, list(PACKAGES)),
        "api": api_pages(root),
    }
    for kind, texts in generated.items():
        (pages / kind).mkdir(exist_ok=True)
        for name, text in texts.items():
            (pages / kind / f"{name}.md").write_text(text, encoding="utf-8")
    configuration = folder / "zensical.toml"
    written = (root / "docs" / "zensical.toml").read_text(encoding="utf-8")
    configuration.write_text(_configured(written, root, generated), encoding="utf-8")
    return configuration


def _configured(text: str, root: Path, generated: Mapping[str, Mapping[str, str]]) -> str:
    """Name the generated pages and the packages' sources, which the written file cannot."""
    named = {
        f'"{kind}/*.md"': ", ".join(json.dumps(f"{kind}/{name}.md") for name in texts)
        for kind, texts in generated.items()
    }
    named['"packages/*/src"'] = ", ".join(
        json.dumps(str(path)) for path in sorted(root.glob("packages/*/src"))
    )
    named['"docstrings.py"'] = json.dumps(str(Path(__file__).with_name("docstrings.py")))
    for pattern, names in named.items():
        if pattern not in text:
            raise SystemExit(f"docs/zensical.toml does not name {pattern}")
        text = text.replace(pattern, names)
    return text
