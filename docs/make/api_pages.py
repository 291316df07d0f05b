"""One page a package: its public names, with signatures and docstrings, for mkdocstrings."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import griffe

# In the order in which a reader meets them; a test holds it to packages/.
PACKAGES = {
    "ezpz-suite": ("ezpz", "ezpz.models", "ezpz.data", "ezpz.doctor"),
    "ezpz-launch": ("ezpz_launch",),
    "ezpz-dist": ("ezpz_dist",),
    "ezpz-tp": ("ezpz_tp", "ezpz_tp.testing", "ezpz_tp.layouts"),
    "ezpz-spmd": ("ezpz_spmd",),
    "ezpz-obs": ("ezpz_obs",),
    "ezpz-topo": ("ezpz_topo",),
    "ezpz-device": ("ezpz_device",),
}


def api_pages(root: Path) -> dict[str, str]:
    """The text of each package's page, by distribution."""
    sources = sorted(str(path) for path in root.glob("packages/*/src"))
    loader = griffe.GriffeLoader(search_paths=sources, docstring_parser="google")
    for modules in PACKAGES.values():
        loader.load(modules[0])
    loader.resolve_aliases(external=True)
    return {name: _page(name, loader, root / "packages" / name) for name in PACKAGES}


def public_names(module: griffe.Module) -> list[str]:
    """The names of ``__all__``, or what is imported under its own name, without dunders."""
    names = list(map(str, module.exports or ())) or lazy_names(Path(str(module.filepath)))
    return [name for name in names if not name.startswith("__")]


def lazy_names(source: Path) -> list[str]:
    """The names that a module imports for type checkers alone, as `ezpz._names` reads them."""
    text = source.read_text(encoding="utf-8")
    return re.findall(r"^ +from \S+ import (\w+) as \1$", text, re.MULTILINE)


def _page(name: str, loader: griffe.GriffeLoader, folder: Path) -> str:
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    about = f"The public names of [{name}](../packages/{name}.md): {project['description']}"
    parts = [f"# API of {name}", about]
    for path in PACKAGES[name]:
        module = loader.modules_collection[path]
        parts += _module(module, several=len(PACKAGES[name]) > 1)
    return "\n\n".join(parts) + "\n"


def _module(module: griffe.Module, *, several: bool) -> Iterator[str]:
    if several:
        yield f"## {module.path}"
    names = public_names(module)
    missing = [name for name in names if name not in module.members]
    if missing:
        raise SystemExit(f"{module.path}: griffe does not find {', '.join(missing)}")
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(_kind(module, name), []).append(name)
    level = 3 if several else 2
    for kind in ("Functions", "Classes", "Errors", "Values", "From the other packages", "Modules"):
        if not (group := sorted(kinds.get(kind, ()))):
            continue
        yield f"{'#' * level} {kind}"
        yield "| | |\n|---|---|\n" + "\n".join(_row(module, name, kind) for name in group)
        if kind not in ("From the other packages", "Modules"):
            for name in group:
                yield f"::: {module.path}.{name}\n    options:\n      heading_level: {level + 1}"


def _row(module: griffe.Module, name: str, kind: str) -> str:
    member = module.members[name]
    target = f"{_home(member)}.{name}" if kind.startswith("From") else f"{module.path}.{name}"
    link = f"`{name}`" if kind == "Modules" else f"[`{name}`][{target}]"
    return f"| {link} | {_summary(member)} |"


def _home(member: griffe.Object | griffe.Alias) -> str:
    """The package that a name comes from."""
    return member.canonical_path.partition(".")[0]


def _kind(module: griffe.Module, name: str) -> str:
    member = module.members[name]
    if member.is_module:
        return "Modules"
    if _home(member) != module.path.partition(".")[0]:
        return "From the other packages"
    if member.is_class:
        return "Errors" if name.endswith("Error") else "Classes"
    return "Functions" if member.is_function else "Values"


def _summary(member: griffe.Object | griffe.Alias) -> str:
    text = member.docstring.value.strip() if member.docstring else ""
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")
