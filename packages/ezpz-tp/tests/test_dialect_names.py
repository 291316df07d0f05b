"""Every name of the projects whose code is to run here is there, and takes the same calls.

What the originals look like is in dialects.toml, with source and date.
"""

import ast
import importlib
import inspect
import tomllib
from pathlib import Path

import pytest

KNOWN = tomllib.loads((Path(__file__).parent / "dialects.toml").read_text(encoding="utf-8"))
FACTS = {"source", "date", "names"}
CALLS = [
    (module, name, known[name])
    for module, known in KNOWN.items()
    for name in known
    if name not in FACTS
]
NAMES = [(module, name) for module, known in KNOWN.items() for name in known.get("names", [])]


def find(module, name):
    package = "ezpz_tp" if module == "ezpz_tp" else f"ezpz_tp.{module}"
    found = importlib.import_module(package)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def original(text):
    """The parameters of a signature as text, without its defaults' values evaluated."""
    arguments = ast.parse(f"def f{text}: ...").body[0].args
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
    positional = list(zip([one.arg for one in arguments.args], defaults, strict=True))
    keyword = list(
        zip([one.arg for one in arguments.kwonlyargs], arguments.kw_defaults, strict=True)
    )
    return positional, arguments.vararg is not None, keyword


def ours(module, name):
    found = find(module, name)
    parameters = list(inspect.signature(found).parameters.values())
    method = "." in name and not isinstance(
        inspect.getattr_static(find(module, name.split(".")[0]), name.split(".")[1]), staticmethod
    )
    return parameters[1:] if method else parameters


def default_of(node):
    """A default as it is written there: a literal, or the last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else ast.literal_eval(node)


def same_default(parameter, node):
    default = parameter.default
    return getattr(default, "__name__", default) == default_of(node)


@pytest.mark.parametrize(("module", "name", "text"), CALLS, ids=[f"{m}.{n}" for m, n, _ in CALLS])
def test_takes_every_call_of_the_original(module, name, text):
    positional, takes_rest, keyword = original(text)
    parameters = ours(module, name)
    by_name = {parameter.name: parameter for parameter in parameters}
    for position, (wanted, default) in enumerate(positional):
        here = parameters[position]
        assert here.name == wanted, f"{here.name} instead of {wanted} at {position}"
        assert here.kind in {here.POSITIONAL_OR_KEYWORD, here.VAR_POSITIONAL}
        if default is not None:
            assert same_default(here, default), f"{wanted}={here.default!r}"
    for wanted, default in keyword:
        here = by_name[wanted]
        assert here.kind in {here.POSITIONAL_OR_KEYWORD, here.KEYWORD_ONLY}
        if default is not None:
            assert same_default(here, default), f"{wanted}={here.default!r}"
    if takes_rest:
        assert parameters[len(positional)].kind is inspect.Parameter.VAR_POSITIONAL
    known = {one for one, _ in positional + keyword}
    for here in parameters:
        if here.name not in known and here.kind not in {here.VAR_POSITIONAL, here.VAR_KEYWORD}:
            assert here.default is not here.empty, f"{here.name} has to be given"


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{m}.{n}" for m, n in NAMES])
def test_name_is_there(module, name):
    assert callable(find(module, name))


def test_sources_are_dated():
    for module, known in KNOWN.items():
        assert known["source"], module
        assert known["date"].year >= 2025
