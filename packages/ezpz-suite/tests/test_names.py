"""The table, the stub and reality say the same; importing ezpz loads nothing."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import ezpz
from ezpz._names import HOMES


def test_table_stub_and_all_are_equal():
    stub = ast.parse(Path(ezpz.__file__).with_suffix(".pyi").read_text())
    imported = {
        alias.asname: statement.module
        for statement in stub.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert imported == {**HOMES, "__version__": "_version"}
    (listed,) = (node.value for node in stub.body if isinstance(node, ast.Assign))
    assert set(ast.literal_eval(listed)) == set(imported) == set(ezpz.__all__)


@pytest.mark.parametrize("name", HOMES)
def test_every_name_is_the_one_of_its_home(name):
    home = importlib.import_module(HOMES[name])
    assert getattr(ezpz, name) is getattr(home, name)
    assert name in home.__all__
    assert name in dir(ezpz)
    assert vars(ezpz)[name] is getattr(home, name), "fetched once, then kept"


def test_a_misspelt_name_suggests_the_right_one():
    with pytest.raises(
        AttributeError, match="no attribute 'setup_troch'; did you mean 'setup_torch'"
    ):
        ezpz.setup_troch  # noqa: B018


def test_importing_ezpz_loads_nothing():
    code = "import sys; before = set(sys.modules); import ezpz; print(*(set(sys.modules) - before))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(out.stdout.split()) == {"ezpz", "ezpz._names", "ezpz._version"}


def test_the_version_is_that_of_the_distribution():
    from importlib.metadata import version

    assert ezpz.__version__ == version("ezpz-suite")
