"""Every name that type checkers see is there; importing ezpz loads nothing."""

import subprocess
import sys
from importlib import import_module
from operator import attrgetter

import pytest

import ezpz
import ezpz_tp
from ezpz import _former


@pytest.mark.parametrize("face", [ezpz, ezpz.data, ezpz.models])
def test_every_name_is_there_and_kept(face):
    assert len(face.__all__) >= 5
    for name in face.__all__:
        value = getattr(face, name)
        assert vars(face)[name] is value, "fetched once, then kept"
        assert name in dir(face)
        home = getattr(value, "__module__", "")
        public = sys.modules[home.partition(".")[0]] if home.startswith("ezpz_") else face
        assert name in public.__all__


@pytest.mark.parametrize(
    ("face", "meant"), [(ezpz, "setup_torch"), (ezpz.tp, "get_tensor_parallel_rank")]
)
def test_a_misspelt_name_suggests_the_right_one(face, meant, capsys):
    with pytest.raises(AttributeError) as caught:
        getattr(face, meant.replace("o", "oo", 1))
    sys.__excepthook__(caught.type, caught.value, caught.tb)  # as the interpreter prints it
    said = capsys.readouterr().err
    assert f"'{face.__name__}' has no attribute" in said
    assert said.endswith(f"Did you mean: {meant!r}?\n")


def test_modules_of_the_earlier_ezpz_are_found():
    code = """
import ezpz.tplot
from ezpz.log import getLogger
from ezpz import history, distributed
import ezpz
assert history.History is ezpz.History and distributed.setup_torch is ezpz.setup_torch
assert getLogger is ezpz.get_logger and ezpz.tplot.plot
assert dir(ezpz) == list(ezpz.__all__), "public names only"
for module, name in (ezpz, "compute_mfu"), (ezpz.tplot, "tplot"), (distributed, "nothing"):
    try:
        getattr(module, name)
    except AttributeError as error:
        print(error)
import ezpz.nothing
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = "has no attribute {!r}; the earlier ezpz had it, here it is {}"
    assert done.stdout.splitlines() == [
        f"module 'ezpz' {said.format('compute_mfu', 'ezpz.Throughput')}",
        f"module 'ezpz.tplot' {said.format('tplot', 'ezpz_obs.plot')}",
        "module 'ezpz.distributed' has no attribute 'nothing'",
    ]
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'ezpz.nothing'\n")


def test_what_stands_for_a_name_is_there():
    for ours in _former.OURS.values():
        package, _, name = ours.partition("(")[0].partition(".")
        if package.startswith("ezpz") and "-" not in package and " " not in ours:
            assert attrgetter(name)(import_module(package)), ours


def test_tp_is_all_of_ezpz_tp():
    assert ezpz.tp.__all__ == ezpz_tp.__all__
    assert set(ezpz_tp.__all__) <= set(dir(ezpz.tp))
    for name in ezpz_tp.__all__:
        assert getattr(ezpz.tp, name) is getattr(ezpz_tp, name)


def test_importing_it_loads_nothing():
    code = """
import sys
before = set(sys.modules)
for name in ("ezpz", "ezpz.data", "ezpz.models"):
    __import__(name)
    print(*sorted(set(sys.modules) - before))
print(sys.modules["ezpz"].doctor.__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, topo = "ezpz ezpz._version", "ezpz_topo ezpz_topo._version"
    loaded = [
        f"{first} {topo}",
        f"{first} ezpz.data {topo}",
        f"{first} ezpz.data ezpz.models {topo}",
    ]
    assert done.stdout.splitlines() == [*loaded, "ezpz.doctor"]
