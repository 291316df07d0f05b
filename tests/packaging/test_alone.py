"""Each wheel is built, installed alone in a fresh environment, imported, and tested there."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
    "ezpz-dist": ["mpich", "numpy", "pytest-xdist", "safetensors"],
    "ezpz-obs": ["hypothesis", "pytest-xdist"],
    "ezpz-suite": ["pytest-xdist"],
}
# How many of its tests run at once, where they mostly wait for each other.
AT_ONCE = {
    "ezpz-topo": 4, "ezpz-launch": 4, "ezpz-tp": 2, "ezpz-dist": 2, "ezpz-obs": 2, "ezpz-suite": 2,
}  # fmt: skip
# Two that compute, with a thread for each core of their own, would be in each other's way.
ENVIRONMENT = {"ezpz-tp": {"OMP_NUM_THREADS": "1"}}
EXTRAS = {"ezpz-suite": "[examples]"}
# Those that ask for torch, by themselves or by a sibling: `installed` would tell of another.
WITH_TORCH = {"ezpz-device", "ezpz-tp", "ezpz-dist", "ezpz-suite"}
# Those that use torch where the user's is there: their tests have one.
TORCH_FOR_TESTS = {"ezpz-obs"}
SIBLINGS = {
    "ezpz-topo": set(),
    "ezpz-tp": set(),
    "ezpz-device": {"ezpz-topo"},
    "ezpz-launch": {"ezpz-topo"},
    "ezpz-obs": {"ezpz-topo"},
    "ezpz-dist": {"ezpz-topo", "ezpz-device", "ezpz-tp"},
    "ezpz-suite": set(IMPORTS) - {"ezpz-suite"},
}


# Nothing but the wheel is to be imported; and what is imported is compiled once, as for a user.
NOT_OURS = {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}


def run(words: list[str], *, cwd: Path | None = None, more: dict[str, str] | None = None) -> str:
    env = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=900, cwd=cwd,
        env={**env, **(more or {})},
    )  # fmt: skip
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of every package, and the wheel built from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: run([*build, str(ROOT / "packages" / name)]), IMPORTS))
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


class Environment:
    """A virtual environment without pip: the one here installs into it, and sooner."""

    def __init__(self, folder: Path, built: Path) -> None:
        self.folder, self.built = folder, built
        run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
        self.python = str(folder / "bin" / "python")
        (self.packages,) = folder.glob("lib/python*/site-packages")

    def install(self, *what: str) -> None:
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet"]
        run([*pip, "--no-compile", "--find-links", str(self.built), *what])

    def link(self, other: Environment) -> None:
        """Take over what is installed in another: files by links, commands with this Python."""
        shutil.copytree(other.packages, self.packages, copy_function=_link, dirs_exist_ok=True)
        for command in (other.folder / "bin").iterdir():
            here = self.folder / "bin" / command.name
            if not here.exists():
                words = command.read_text(encoding="utf-8")
                here.write_text(words.replace(str(other.folder), str(self.folder)), "utf-8")
                here.chmod(0o755)

    def installed(self) -> set[str]:
        return {
            canonicalize_name(each.name)
            for each in importlib.metadata.distributions(path=[str(self.packages)])
        }

    def asked_for(self, words: str) -> set[str]:
        """Return a package, what it asks for, what that asks for, and so on: all is installed."""
        found: set[tuple[str, frozenset[str]]] = set()
        left = [Requirement(words)]
        while left:
            wanted = left.pop()
            name, extras = canonicalize_name(wanted.name), frozenset(wanted.extras)
            if (name, extras) in found:
                continue
            found.add((name, extras))
            (each,) = importlib.metadata.distributions(name=name, path=[str(self.packages)])
            for asked in map(Requirement, each.requires or []):
                under = [{"extra": extra} for extra in (*extras, "")]
                if asked.marker is None or any(map(asked.marker.evaluate, under)):
                    left.append(asked)
        return {name for name, _ in found}


def _link(source: str, target: str) -> None:
    # What both ask for, in the version that the constraints give both.
    if not os.path.exists(target):
        os.link(source, target)


class Environments:
    """An environment for each wheel, with it and with what it asks for, and nothing else."""

    def __init__(self, built: Path, folder: Path) -> None:
        self.built, self.folder = built, folder

    @cached_property
    def torch(self) -> Environment:
        """Torch alone, to be linked: it takes longer to install, and to compile, than the rest."""
        made = Environment(self.folder / "torch", self.built)
        made.install("--compile", "torch")
        return made

    def make(self, name: str) -> Environment:
        """Make the environment of a package, with what its tests need."""
        package = IMPORTS[name]
        made = Environment(self.folder / name, self.built)
        if name in WITH_TORCH:
            made.link(self.torch)
        made.install(f"{wheel_of(self.built, name)}{EXTRAS.get(name, '')}")

        code = f"import {package}, sys; print({package}.__file__)"
        assert str(made.folder) in run([made.python, "-c", code], cwd=self.folder)
        installed = made.installed()
        assert installed == made.asked_for(name + EXTRAS.get(name, "")), "only what it asks for"
        ours = {each for each in installed if each.startswith("ezpz-")}
        assert ours == {name} | SIBLINGS[name], "only itself, and the siblings that it needs"

        if name in TORCH_FOR_TESTS:
            made.link(self.torch)
        made.install("pytest", "pytest-timeout", *TEST_NEEDS.get(name, []))
        return made


@pytest.fixture(scope="session")
def environments(
    built: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Environment]]]:
    """The environments of the packages to be tested: one after the other, ahead of the tests."""
    making = Environments(built, tmp_path_factory.mktemp("alone"))
    names = [item.callspec.params["name"] for item in request.session.items
             if item.originalname == "test_alone"]  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        yield {name: pool.submit(making.make, name) for name in names}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", IMPORTS)
def test_alone(
    environments: dict[str, Future[Environment]],
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    python = environments[name].result().python
    # Away from the source tree, so that nothing but the wheel can be imported.
    shutil.copytree(ROOT / "packages" / name / "tests", tmp_path / "tests")
    shutil.copy(ROOT / "pytest.ini", tmp_path)
    at_once = ["-n", str(AT_ONCE[name])] if name in AT_ONCE else []
    said = run(
        [python, "-m", "pytest", "-q", "--timeout=120", "-o", "testpaths=", *at_once, "tests"],
        cwd=tmp_path, more=ENVIRONMENT.get(name),
    )  # fmt: skip
    assert " passed" in said
    skipped = [f"\n{line} ({name} alone)" for line in said.splitlines() if line[:7] == "SKIPPED"]
    if skipped:
        with capsys.disabled():
            # scripts/test gathers what was skipped, in there too
            print(*skipped)
