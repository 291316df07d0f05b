"""Every public name has a docstring, and the docstring has a form; private ones are free."""

import importlib
import inspect
import re

import pytest

PACKAGES = [
    *("ezpz_topo", "ezpz_device", "ezpz_tp", "ezpz_spmd", "ezpz_dist", "ezpz_launch", "ezpz_obs"),
    *("ezpz", "ezpz.data", "ezpz.models"),
]


def contracts(name, value):
    """Return a function, or a class and its public methods and properties."""
    yield name, value
    for member, held in vars(value).items() if inspect.isclass(value) else ():
        method = getattr(held, "fget", None) or getattr(held, "__func__", held)
        if not member.startswith("_") and inspect.isfunction(method):
            yield f"{name}.{member}", method


def fault(value):
    """Return what is wrong with the docstring; empty if nothing is."""
    text = inspect.getdoc(value) or ""
    summary, _, rest = text.partition("\n")
    if not summary.endswith((".", "?", "!")):
        return f"expected a summary on one line that ends with a period; got {summary!r}"
    if rest and not rest.startswith("\n"):
        return f"expected an empty line after the summary; got {rest.partition(chr(10))[0]!r}"
    told = re.search(r"^Args:\n((?:[ ]+.*\n|\n)+)", f"{text}\n", re.MULTILINE)
    if told and inspect.isfunction(value):
        # Only its own parameters: self, and what is passed on as it is, are told by their names.
        named = {name for part in re.findall(r"^    ([\w*, ]+):", told[1], re.MULTILINE)
                 for name in part.replace("*", "").replace(" ", "").split(",")}  # fmt: skip
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        taken = [one.name for one in inspect.signature(value).parameters.values()
                 if one.kind not in kinds and one.name not in ("self", "cls")]  # fmt: skip
        if missing := [name for name in taken if name not in named and name[0] != "_"]:
            return f"expected all of its parameters in Args; got none of {missing}"
    return ""


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_have_docstrings(package):
    """A name in a package's `__all__` is a contract: with its methods and properties."""
    module = importlib.import_module(package)
    values = {name: getattr(module, name) for name in module.__all__}
    faults = {
        name: why
        for public, value in values.items()
        if callable(value)
        for name, held in contracts(public, value)
        if (why := fault(held))
    }
    assert faults == {}
