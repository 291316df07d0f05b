import subprocess
import sys

import pytest

from ezpz_obs import SinkError
from ezpz_obs._sinks import make_sinks
from ezpz_obs._sinks.libraries import LIBRARY_SINKS


def test_names_and_objects():
    class Mine:
        name = "mine"

        def open(self, header, folder): ...

        def write(self, records): ...

        def close(self): ...

    mine = Mine()
    named, given = make_sinks(["csv", "jsonl", mine])
    assert named.name == "csv"
    assert given is mine


def test_an_unknown_name():
    with pytest.raises(SinkError, match="'tensorbord'; expected one of csv, mlflow, tensorboard"):
        make_sinks(["tensorbord"])


def test_something_that_is_no_sink():
    with pytest.raises(SinkError, match="an object with name, open, write and close"):
        make_sinks([print])


def test_one_string_instead_of_a_list():
    with pytest.raises(SinkError, match=r"expected a list: sinks=\['csv'\]"):
        make_sinks("csv")


@pytest.mark.parametrize("name", LIBRARY_SINKS)
def test_what_is_not_installed_is_named_with_the_command(name, tmp_path):
    needed = LIBRARY_SINKS[name][0]
    (tmp_path / needed).mkdir()  # W&B's own ./wandb is no package
    program = (
        f"import sys, importlib.machinery as m\n"
        f"class Hide(m.PathFinder):\n"
        f"    @classmethod\n"
        f"    def find_spec(cls, name, path=None, target=None):\n"
        f"        path = ['.'] if name == {needed!r} else path\n"
        f"        return m.PathFinder.find_spec(name, path, target)\n"
        f"sys.meta_path = [f for f in sys.meta_path if f is not m.PathFinder] + [Hide]\n"
        f"from ezpz_obs import History\n"
        f"History(sinks=[{name!r}])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert f'pip install "ezpz-obs[{name}]"' in done.stderr
    assert "SinkError" in done.stderr


def test_making_sinks_imports_no_library():
    program = (
        "import sys; from ezpz_obs._sinks import make_sinks; "
        "print({'wandb', 'mlflow', 'tensorboard', 'trackio', 'requests'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
