"""Each wheel is built, installed alone in a fresh environment, imported, and tested there."""

import ast
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("topo", "device", "tp", "spmd", "dist", "launch", "obs")
IMPORTS = {f"ezpz-{name}": f"ezpz_{name}" for name in NAMES}
IMPORTS["ezpz-suite"] = "ezpz"
# What of its tests is run where it is alone: that all of it is there and starts, with no more than
# it asks for. What it does then is the same beside its siblings, where `unit` runs all of them.
TESTS = {
    "ezpz-topo": ["test_public.py", "test_cli.py"],
    "ezpz-device": ["test_public.py", "test_select.py", "test_peaks.py"],
    "ezpz-tp": ["test_public.py", "test_linear.py"],
    "ezpz-spmd": ["test_check.py"],
    "ezpz-launch": ["test_launch.py"],
    "ezpz-dist": ["test_public.py", "test_info.py"],
    "ezpz-obs": ["test_public.py", "test_sinks.py"],
    "ezpz-suite": ["test_names.py", "test_cli.py", "examples/test_settings.py"],
}
# What they need beside the package and pytest: an MPI where ranks are started.
TEST_NEEDS = {"ezpz-launch": ["mpich"], "ezpz-dist": ["mpich"]}
EXTRAS = {"ezpz-suite": "[examples]"}
SIBLINGS = {
    "ezpz-topo": set(),
    "ezpz-tp": set(),
    "ezpz-spmd": {"ezpz-tp"},
    "ezpz-device": {"ezpz-topo"},
    "ezpz-launch": {"ezpz-topo"},
    "ezpz-obs": {"ezpz-topo"},
    "ezpz-dist": {"ezpz-topo", "ezpz-device", "ezpz-tp"},
    "ezpz-suite": set(IMPORTS) - {"ezpz-suite"},
}


# Nothing but the wheel is to be imported; and what is imported is compiled once, as for a user.
NOT_OURS = {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}


def run(words, *, cwd=None, more=None):
    env = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=900, cwd=cwd,
        env={**env, **(more or {})},
    )  # fmt: skip
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """A folder with the sdist of every package, and the wheel built from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: run([*build, str(ROOT / "packages" / name)]), IMPORTS))
    return out


def wheel_of(built, name):
    (wheel,) = built.glob(f"{name.replace('-', '_')}-*.whl")
    return str(wheel)


@pytest.mark.parametrize("name", IMPORTS)
def test_wheel_holds_the_package_and_nothing_else(built, name):
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
def test_sdist_holds_what_a_wheel_is_built_from(built, name):
    (sdist,) = built.glob(f"{name.replace('-', '_')}-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"} <= names
    assert f"src/{IMPORTS[name]}/py.typed" in names


THERE = ROOT / ".hatch" / "test"  # where pip has installed what all packages ask for, for `unit`


class Environment:
    """A virtual environment without pip: the one here installs our wheels into it, and sooner."""

    def __init__(self, folder):
        self.folder = folder
        run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
        self.python = str(folder / "bin" / "python")
        (self.packages,) = folder.glob("lib/python*/site-packages")

    def pip(self, *words):
        run([sys.executable, "-m", "pip", "--python", self.python, *words])

    def link(self, words):
        """Take over by links what is asked for, and what that asks for: quicker than to install."""
        (packages,) = THERE.glob("lib/python*/site-packages")
        for name in asked_for(words, packages):
            (each,) = importlib.metadata.distributions(name=name, path=[str(packages)])
            for file in () if name.startswith("ezpz-") else each.files or []:
                source = Path(os.path.normpath(packages / file))
                _link(source, self.folder / source.relative_to(THERE))
                if source.suffix == ".py":  # compiled, for whoever made the other
                    kept = Path(importlib.util.cache_from_source(str(source)))
                    _link(kept, self.folder / kept.relative_to(THERE))

    def installed(self):
        return {
            canonicalize_name(each.name)
            for each in importlib.metadata.distributions(path=[str(self.packages)])
        }


def asked_for(words, packages):
    """Return a package, what it asks for, what that asks for, and so on: all is installed."""
    found, left = set(), [Requirement(words)]
    while left:
        wanted = left.pop()
        name, extras = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if (name, extras) in found:
            continue
        found.add((name, extras))
        (each,) = importlib.metadata.distributions(name=name, path=[str(packages)])
        for asked in map(Requirement, each.requires or []):
            under = [{"extra": extra} for extra in (*extras, "")]
            if asked.marker is None or any(map(asked.marker.evaluate, under)):
                left.append(asked)
    return {name for name, _ in found}


def _link(source, target):
    if not source.exists() or target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    start = source.read_bytes() if source.parent == THERE / "bin" else b""
    if start.startswith(b"#!"):  # a command: with this Python
        target.write_bytes(start.replace(os.fsencode(THERE), os.fsencode(target.parents[1])))
        target.chmod(0o755)
    else:
        os.link(source, target)


def make(name, built, folder):
    """Make the environment of a wheel: with it, with what it asks for, and what its tests need."""
    made = Environment(folder / name)
    wanted, ours = name + EXTRAS.get(name, ""), {name} | SIBLINGS[name]
    made.link(wanted)
    made.pip("install", "--quiet", "--no-deps", "--no-compile", *(wheel_of(built, n) for n in ours))
    made.pip("check")
    code = f"import {IMPORTS[name]} as package; print(package.__file__)"
    assert str(made.folder) in run([made.python, "-c", code], cwd=folder)
    installed = made.installed()
    assert installed == asked_for(wanted, made.packages), "only what it asks for"
    assert {each for each in installed if each.startswith("ezpz-")} == ours
    for each in ("pytest", "pytest-timeout", *TEST_NEEDS.get(name, ())):
        made.link(each)
    return made


@pytest.fixture(scope="session")
def environments(built, request, tmp_path_factory):
    """The environments of the packages to be tested: one after the other, ahead of the tests."""
    folder = tmp_path_factory.mktemp("alone")
    names = [item.callspec.params["name"] for item in request.session.items
             if item.originalname == "test_alone"]  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        yield {name: pool.submit(make, name, built, folder) for name in names}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", IMPORTS)
def test_alone(environments, name, tmp_path):
    python = environments[name].result().python
    # Away from the source tree, so that nothing but the wheel can be imported.
    shutil.copytree(ROOT / "packages" / name / "tests", tmp_path / "tests")
    shutil.copytree(ROOT / "tests" / "harness", tmp_path / "tests" / "harness")
    shutil.copy(ROOT / "pytest.ini", tmp_path)
    words = [python, "-m", "pytest", "-q", "-o", "testpaths="]
    assert " passed" in run([*words, *(f"tests/{each}" for each in TESTS[name])], cwd=tmp_path)


# What is imported by another name than it is asked for; what comes with something else.
KNOWN_AS = {
    "PIL": "pillow", "mlflow": "mlflow-skinny", "requests": "wandb", "sklearn": "scikit-learn",
}  # fmt: skip
# Programs of nodes, which are started without their package, import these by the bare name.
SENT: dict[str, set[str]] = {}


@pytest.mark.parametrize("name", IMPORTS)
def test_what_is_imported_is_asked_for(name):
    """In functions, too: a library that only happens to be there would be missing for a user."""
    package = ROOT / "packages" / name
    project = tomllib.loads((package / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project.get("optional-dependencies", {}).values()
    asked = {canonicalize_name(Requirement(words).name)
             for words in sum(extras, project["dependencies"])}  # fmt: skip
    unknown = set()
    for path in (package / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            imported = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                imported = [str(node.module)]
            for top in {each.partition(".")[0] for each in imported} - sys.stdlib_module_names:
                if canonicalize_name(KNOWN_AS.get(top, top)) not in asked:
                    unknown.add(top)
    assert unknown - {IMPORTS[name]} <= SENT.get(name, set())
