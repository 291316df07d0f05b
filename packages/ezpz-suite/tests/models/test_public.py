"""The faces of ezpz.models and ezpz.data: what they promise is there, and loads when it is used."""

import ast
import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import ezpz.data
import ezpz.models


@pytest.mark.parametrize("face", [ezpz.models, ezpz.data])
def test_names(face):
    tree = ast.parse(Path(face.__file__).read_text())
    (checking,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {alias.name for node in checking.body for alias in node.names}
    assert imported == set(face.__all__)
    for name in face.__all__:
        value = getattr(face, name)
        assert vars(face)[name] is value, "fetched once, then kept"
        assert value.__doc__
        assert name in dir(face)
    with pytest.raises(AttributeError, match="has no attribute 'MPL'"):
        face.MPL  # noqa: B018


@pytest.mark.parametrize("name", ["models", "data"])
def test_importing_the_face_loads_nothing_heavy(name):
    code = f"import sys, ezpz.{name}; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "ezpz_tp", "ezpz_dist"} & set(out.stdout.split())


def modules():
    for face in (ezpz.models, ezpz.data):
        for found in pkgutil.walk_packages(face.__path__, f"{face.__name__}."):
            yield found.name


@pytest.mark.parametrize("name", list(modules()))
def test_the_examples_of_docstrings(name):
    if "_digits" in name:
        pytest.importorskip("sklearn")
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0
