"""Each wheel is built, installed alone in a fresh environment, imported, and tested there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = {
    "ezpz-topo": "ezpz_topo",
    "ezpz-device": "ezpz_device",
    "ezpz-tp": "ezpz_tp",
    "ezpz-dist": "ezpz_dist",
    "ezpz-launch": "ezpz_launch",
    "ezpz-obs": "ezpz_obs",
    "ezpz-suite": "ezpz",
}
# What the tests of a package need beside the package: pytest, and an MPI where ranks are started.
TEST_NEEDS = {
    "ezpz-topo": ["hypothesis", "pytest-xdist"],
    "ezpz-tp": ["numpy", "pytest-xdist", "safetensors"],
    "ezpz-launch": ["mpich", "mpi4py", "py-spy", "pytest-xdist"],
    "ezpz-dist": ["mpich"],
    "ezpz-obs": ["numpy"],
}
# How many of its tests run at once, where they mostly wait for each other.
AT_ONCE = {"ezpz-topo": 4, "ezpz-launch": 4, "ezpz-tp": 2}
EXTRAS = {"ezpz-suite": "[examples]"}
SIBLINGS = {
    "ezpz-topo": set(),
    "ezpz-tp": set(),
    "ezpz-device": {"ezpz-topo"},
    "ezpz-launch": {"ezpz-topo"},
    "ezpz-obs": {"ezpz-topo"},
    "ezpz-dist": {"ezpz-topo", "ezpz-device", "ezpz-tp"},
    "ezpz-suite": set(IMPORTS) - {"ezpz-suite"},
}


def run(words: list[str], **kwargs: object) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env=env, timeout=900, **kwargs
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of every package, and the wheel built from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    for name in IMPORTS:
        run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out),
             str(ROOT / "packages" / name)])  # fmt: skip
    return out


def wheel_of(built: Path, name: str) -> Path:
    (wheel,) = built.glob(f"{name.replace('-', '_')}-*.whl")
    return wheel


@pytest.mark.parametrize("name", IMPORTS)
def test_wheel_holds_the_package_and_nothing_else(built: Path, name: str) -> None:
    package = IMPORTS[name]
    source = ROOT / "packages" / name / "src" / package
    held = {n for n in zipfile.ZipFile(wheel_of(built, name)).namelist() if ".dist-info/" not in n}
    expected = {
        f"{package}/{path.relative_to(source)}"
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == expected
    assert f"{package}/py.typed" in held


@pytest.mark.parametrize("name", IMPORTS)
def test_sdist_can_be_tested(built: Path, name: str) -> None:
    (sdist,) = built.glob(f"{name.replace('-', '_')}-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"} <= names
    assert any(n.startswith("tests/test_") for n in names)


@pytest.mark.parametrize("name", IMPORTS)
def test_alone(built: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    venv, package = tmp_path / "venv", IMPORTS[name]
    # The environment's own pip is not needed: the one here installs into it, and sooner.
    run([sys.executable, "-m", "venv", "--without-pip", str(venv)])
    python = str(venv / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet",
           "--no-compile", "--find-links", str(built)]  # fmt: skip
    run([*pip, f"{wheel_of(built, name)}{EXTRAS.get(name, '')}"])

    code = f"import {package}, sys; print({package}.__file__)"
    assert str(venv) in run([python, "-c", code], cwd=tmp_path)
    installed = {
        path.name.split("-")[0].replace("_", "-") for path in venv.rglob("ezpz_*.dist-info")
    }
    assert installed == {name} | SIBLINGS[name], "only itself, and the siblings that it needs"

    run([*pip, "pytest", "pytest-timeout", *TEST_NEEDS.get(name, [])])
    # Away from the source tree, so that nothing but the wheel can be imported.
    shutil.copytree(ROOT / "packages" / name / "tests", tmp_path / "tests")
    shutil.copy(ROOT / "pytest.ini", tmp_path)
    at_once = ["-n", str(AT_ONCE[name])] if name in AT_ONCE else []
    said = run(
        [python, "-m", "pytest", "-q", "--timeout=120", "-o", "testpaths=", *at_once, "tests"],
        cwd=tmp_path,
    )
    assert " passed" in said
    skipped = [f"\n{line} ({name} alone)" for line in said.splitlines() if line[:7] == "SKIPPED"]
    if skipped:
        with capsys.disabled():
            # scripts/test gathers what was skipped, in there too
            print(*skipped)
