"""Names: what is public is there, and every name of the projects whose code is to run here.

Those take the same calls.

What the originals look like is in dialects.toml, with source and date.
"""

import importlib
import inspect
import pickle
import tomllib
import types
from pathlib import Path

import pytest
from torch.nn import init

import ezpz_tp as tp
from ezpz_tp import mpu, parallel_state

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


def ours(module, name):
    found = find(module, name)
    parameters = list(inspect.signature(found).parameters.values())
    method = "." in name and not isinstance(
        inspect.getattr_static(find(module, name.split(".")[0]), name.split(".")[1]), staticmethod
    )
    return parameters[1:] if method else parameters


@pytest.mark.parametrize(("module", "name", "text"), CALLS, ids=[f"{m}.{n}" for m, n, _ in CALLS])
def test_takes_every_call_of_the_original(module, name, text):
    original = inspect.signature(eval(f"lambda {text[1:-1]}: 0", {"init": init})).parameters
    parameters = ours(module, name)
    by_name = {parameter.name: parameter for parameter in parameters}
    for position, theirs in enumerate(original.values()):
        if theirs.kind is theirs.VAR_POSITIONAL:
            assert parameters[position].kind is theirs.VAR_POSITIONAL
            continue
        here, kinds = by_name[theirs.name], {theirs.KEYWORD_ONLY}
        if theirs.kind is not theirs.KEYWORD_ONLY:
            assert parameters[position] is here, f"{here.name} is not at {position}"
            kinds = {theirs.VAR_POSITIONAL}
        assert here.kind in {here.POSITIONAL_OR_KEYWORD, *kinds}
        if theirs.default is not theirs.empty:
            assert here.default == theirs.default, here
    for here in parameters:
        if here.name not in original and here.kind not in {here.VAR_POSITIONAL, here.VAR_KEYWORD}:
            assert here.default is not here.empty, f"{here.name} has to be given"


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{m}.{n}" for m, n in NAMES])
def test_name_is_there(module, name):
    assert callable(find(module, name))


def test_sources_are_dated():
    for module, known in KNOWN.items():
        assert known["source"], module
        assert known["date"].year >= 2025


@pytest.mark.parametrize("name", ["", ".testing", ".tensor_parallel", ".model_parallel"])
def test_all_is_what_is_there(name):
    face = importlib.import_module(f"ezpz_tp{name}")
    public = {
        name
        for name in dir(face)
        if not name.startswith("_") and not isinstance(getattr(face, name), types.ModuleType)
    }
    assert set(face.__all__) - {"__version__"} == public - {"TYPE_CHECKING"}


def test_names_of_megatrons_groups_are_there_once_and_told():
    assert set(parallel_state.__all__) < set(mpu.__all__)
    for name in mpu.__all__:
        found = getattr(mpu, name)
        assert inspect.getdoc(found), name
        assert pickle.loads(pickle.dumps(found)) is found, name
    for names in (parallel_state.__all__, mpu.__all__):
        assert len(set(names)) == len(names)


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="'ezpz_tp' has no attribute 'TensorParallel'"):
        tp.TensorParallel  # noqa: B018
