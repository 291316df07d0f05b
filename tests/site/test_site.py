"""The built site: complete, without a link to nowhere, and readable on a phone."""

import ast
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKE = ROOT / "docs" / "make"


@pytest.fixture
def links(monkeypatch):
    monkeypatch.syspath_prepend(str(MAKE))
    import links

    yield links
    del sys.modules["links"]


def public_names(package):
    """The names of ``__all__``, or those imported as themselves, read and not imported."""
    text = (package / "__init__.py").read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [
                each.value
                for each in getattr(node.value, "elts", ())
                if isinstance(each, ast.Constant) and not each.value.startswith("__")
            ]
    return re.findall(r"^ +from \S+ import \w+ as (\w+)$", text, re.MULTILINE)


def test_every_link_leads_somewhere(built, links):
    assert links.problems_of(built / "site") == []


def test_a_broken_link_is_found(links, tmp_path):
    (tmp_path / "a.css").write_text("@import url(https://fonts.invalid/x.css);")
    (tmp_path / "a.html").write_text(
        '<h1 id="top">A</h1><a href="#top">1</a><a href="b.html">2</a><a href="#no">3</a>'
        '<a href="https://example.org/">4</a><script src="https://cdn.invalid/x.js"></script>'
        '<img src="no.svg"><link rel="stylesheet" href="a.css"><a href="./">5</a>'
    )
    assert sorted(links.problems_of(tmp_path)) == [
        "a.css: loads https://fonts.invalid/x.css",
        "a.html: #no: no such anchor",
        "a.html: ./: no such file",
        "a.html: b.html: no such file",
        "a.html: loads https://cdn.invalid/x.js",
        "a.html: no.svg: no such file",
    ]


def test_every_page_is_in_the_navigation(built):
    configuration = tomllib.loads((built / "zensical.toml").read_text(encoding="utf-8"))
    named = set(re.findall(r"[\w./-]+\.md", json.dumps(configuration["project"]["nav"])))
    assert named == {
        page.relative_to(built / "pages").as_posix() for page in (built / "pages").rglob("*.md")
    }


def test_every_package_has_its_page_and_every_public_name_its_place(built):
    packages = sorted(ROOT.glob("packages/*/src/*/__init__.py"))
    assert {path.parents[2].name for path in packages} == {
        page.stem for page in (built / "pages" / "api").glob("*.md")
    }
    counted = 0
    for path in packages:
        name = path.parent.name
        page = (built / "site" / "api" / f"{path.parents[2].name}.html").read_text()
        for each in public_names(path.parent):
            counted += 1
            place = f'id="{name}.{each}"' if name != "ezpz" else f">{each}<"
            assert place in page, f"{name}.{each}"
    assert counted > 200


def test_every_machine_has_its_page_with_its_facts(built):
    files = sorted(ROOT.glob("packages/ezpz-topo/src/ezpz_topo/machines/*.toml"))
    assert len(files) > 10
    for file in files:
        facts = tomllib.loads(file.read_text(encoding="utf-8"))
        page = (built / "pages" / "machines" / f"{file.stem}.md").read_text(encoding="utf-8")
        assert f"ezpz-launch --dry-run --machine {file.stem} " in page
        assert facts["date"] in page
        for value in (*facts["source"], *facts.get("modules", ()), *facts.get("environment", ())):
            assert value in page, f"{file.stem}: {value}"
        for key in facts.get("inferred", ()):
            assert "inferred" in page, key
        assert ("Not run on this machine" in page) == (facts.get("site") != "any")


def test_no_page_is_wider_than_a_phone(built, in_browser):
    site, width = built / "site", 360
    pages = [path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html"))]
    found = in_browser(f"""
        const pages = {json.dumps(pages)}, found = {{}}, frame = document.createElement("iframe");
        frame.width = {width}; frame.height = 800; frame.style.border = 0;
        // The pages' scripts take most of the time: one page of each folder runs them.
        let at = -1, folder = null;
        const next = () => {{
            if (++at >= pages.length) return tell(found);
            const before = folder;
            folder = pages[at].replace(/[^/]*$/, "");
            frame.sandbox = "allow-same-origin" + (folder === before ? "" : " allow-scripts");
            frame.src = "/" + pages[at];
        }};
        frame.onload = () => {{
            if (at < 0) return;
            found[pages[at]] = frame.contentDocument.documentElement.scrollWidth;
            next();
        }};
        document.body.append(frame);
        next();
    """)
    assert list(found) == pages
    assert {page: wide for page, wide in found.items() if wide > width} == {}


@pytest.mark.parametrize(
    ("words", "page", "first"),
    [
        ("ring_attention", "guides/context.html", False),
        ("checkpoint resume", "guides/checkpoints.html", True),
    ],
)
def test_search_finds_without_any_network(in_browser, words, page, first):
    found = in_browser(
        """
        const frame = document.createElement("iframe");
        frame.width = 1200; frame.height = 800;
        const later = (test, then, left = 150) => {
            const value = test();
            if (value) then(value);
            else if (left) setTimeout(() => later(test, then, left - 1), 100);
            else tell("not there: " + test);
        };
        // The window of the search is drawn in a shadow of the page.
        const all = (where, selector) => [
            ...where.querySelectorAll(selector),
            ...[...where.querySelectorAll("*")].flatMap(
                each => each.shadowRoot ? all(each.shadowRoot, selector) : []),
        ];
        frame.onload = () => {
            const page = frame.contentDocument;
            const typed = input => {
                input.focus();
                input.value = WORDS;
                input.dispatchEvent(new frame.contentWindow.Event("input", {bubbles: true}));
                // A hit's link has what was searched for behind a question mark.
                const hits = () => all(page, "a").map(link => link.href || "")
                    .filter(href => href.includes(".html?"));
                later(() => hits().some(href => href.includes(PAGE)) && hits(), tell);
            };
            page.querySelector("button.md-search__button").click();
            later(() => all(page, "input[aria-label=Search]")[0], typed);
        };
        frame.src = "/index.html";
        document.body.append(frame);
    """.replace("WORDS", json.dumps(words)).replace("PAGE", json.dumps(f"{page}?"))
    )
    assert isinstance(found, list), found
    assert page in found[0] or not first, found
