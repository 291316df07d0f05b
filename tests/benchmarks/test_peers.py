"""Environments by real venv and pip, offline; a peer that cannot be had is said."""

import importlib.util
import subprocess
import zipfile
from pathlib import Path

import peers
import pytest
from peers import Recipe, peer, present


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """Peers in a folder of the test's, from a folder of wheels and nowhere else."""
    wheel = tmp_path / "toy-1.5-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("toy.py", "said = 'here'\n")
        for name, text in {
            "METADATA": "Metadata-Version: 2.1\nName: toy\nVersion: 1.5\n",
            "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "",
        }.items():
            file.writestr(f"toy-1.5.dist-info/{name}", text)
    monkeypatch.setattr(peers, "HOME", tmp_path / "peers")
    recipes = {"toy": Recipe("toy"), "by torch": Recipe("toy", torch=True)}
    monkeypatch.setattr(peers, "RECIPES", {**recipes, "nobody": Recipe("nobody-9")})
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def asked(python, code):
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout


def test_a_peer_has_an_environment_of_its_own_which_is_kept(alone):
    toy = peer("toy")
    assert toy.name == "toy 1.5"
    assert asked(toy.python, "import toy; print(toy.__file__)").startswith(str(alone))
    assert (Path(toy.site_packages) / "toy.py").is_file()
    for left in (None, '{"key": ['):  # an interrupted installation is made again
        made = alone / "peers" / "toy" / "made.json"
        made.unlink() if left is None else made.write_text(left)
        (Path(toy.site_packages) / "toy.py").unlink()
        assert asked(peer("toy").python, "import toy; print(toy.said)") == "here\n"
    (alone / "toy-1.5-py3-none-any.whl").unlink()  # nothing is installed again
    assert peer("toy") == toy
    # Neither our packages nor what the tests have.
    code = "import importlib.util as u; print(u.find_spec('ezpz_topo'), u.find_spec('fire'))"
    assert asked(toy.python, code) == "None None\n"

    # One that cannot be installed is told.
    there, missing = present(["toy", "nobody"])
    assert list(there) == ["toy"]
    assert missing["nobody"].startswith("not installable: ")
    assert "nobody-9" in missing["nobody"]
    assert not (alone / "peers" / "nobody").exists()


def test_a_peer_of_torch_sees_the_tests_own_behind_its_own_and_none_of_ours(alone):
    found = "getattr(u.find_spec(each), 'origin', '') for each in ('torch', 'ezpz_topo')"
    code = f"import importlib.util as u; print(*({found}))"
    expected = importlib.util.find_spec("torch").origin
    assert asked(peer("by torch").python, code).split() == [expected]
