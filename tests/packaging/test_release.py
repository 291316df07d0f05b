"""Releases of a clone, by real git, towncrier, build, twine and pip; nothing of ours moves."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("packages", "scripts", "LICENSE", "CITATION.cff", ".gitignore")
IDENTITY = {
    "GIT_AUTHOR_NAME": "A", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "A",
    "GIT_COMMITTER_EMAIL": "a@b", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull,
}  # fmt: skip


def call(*words, cwd, status=0, env=None):
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env={**os.environ, **IDENTITY, **(env or {})},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == status, f"{words}\n{done.stdout}"
    return done.stdout


def release(clone, *words, status=0, env=None):
    # What Python itself keeps beside modules is no trace of a release.
    command = (sys.executable, "-B", "scripts/releases/release.py", *words)
    return call(*command, cwd=clone, status=status, env=env)


def commit(clone, files=None):
    """Write files, and commit whatever has changed."""
    for name, text in (files or {}).items():
        (clone / name).write_text(text, "utf-8")
    call("git", "add", "-A", cwd=clone)
    call("git", "commit", "-q", "-m", "a change", cwd=clone)


def state(clone):
    """All that a release may change, and all that it may leave behind."""
    asked = ("rev-parse HEAD", "status --porcelain --ignored", "tag", "worktree list", "branch -a")
    return tuple(call("git", *words.split(), cwd=clone) for words in asked)


@pytest.fixture(scope="session")
def origin(tmp_path_factory):
    """A repository of what is in the tree here, before any release."""
    here = tmp_path_factory.mktemp("origin")
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache", "tests", "dist")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, here / name, ignore=left_out)
        else:
            shutil.copy2(ROOT / name, here / name)
    for package in (here / "packages").iterdir():
        news = package / "news" / "+tested.added.md"
        news.write_text("Something new.\n", "utf-8")
    call("git", "init", "-q", "-b", "main", cwd=here)
    commit(here)
    return here


@pytest.fixture
def clone(origin, tmp_path):
    call("git", "clone", "-q", origin, tmp_path / "clone", cwd=tmp_path)
    return tmp_path / "clone"


def test_first_release_and_the_next_one_which_siblings_exclude(clone):
    before = call("git", "rev-parse", "HEAD", cwd=clone).strip()
    said = release(clone, "ezpz-topo", "0.1.0")
    assert "git push --atomic origin main ezpz-topo-v0.1.0" in said
    # One commit on the branch, which the tag is of, and a clean tree.
    assert call("git", "rev-parse", "HEAD^", cwd=clone).strip() == before
    head = call("git", "rev-parse", "HEAD", cwd=clone)
    assert call("git", "rev-parse", "ezpz-topo-v0.1.0^{commit}", cwd=clone) == head
    assert call("git", "status", "--porcelain", cwd=clone) == ""
    assert len(call("git", "worktree", "list", cwd=clone).splitlines()) == 1
    package = clone / "packages" / "ezpz-topo"
    changelog = (package / "CHANGELOG.md").read_text("utf-8")
    assert "\n## 0.1.0 (20" in changelog
    assert changelog.count("- Something new.\n") == 1
    assert [path.name for path in (package / "news").iterdir()] == ["README.md"]
    assert "- Something new." in call("git", "tag", "-n99", "-l", "ezpz-topo-v0.1.0", cwd=clone)
    (sdist,) = (clone / "dist").glob("ezpz_topo-0.1.0.tar.gz")
    with tarfile.open(sdist) as archive:
        assert archive.extractfile("ezpz_topo-0.1.0/CHANGELOG.md").read().decode() == changelog
    assert (clone / "dist" / "ezpz_topo-0.1.0-py3-none-any.whl").is_file()

    commit(clone, {"packages/ezpz-topo/news/7.fixed.md": "A bug\nless.\n"})
    before = state(clone)
    said = release(clone, "ezpz-topo", "minor", status=1)
    assert "ezpz-topo 0.2.0 is outside of what siblings allow: ezpz-device needs ezpz-topo" in said
    assert "ezpz-obs needs ezpz-topo<0.2,>=0.1" in said
    assert "--widen" in said
    assert state(clone) == before
    said = release(clone, "ezpz-topo", "minor", "--widen", "--dry-run")
    assert '-__version__ = "0.1.0"\n+__version__ = "0.2.0"' in said
    assert '"ezpz-topo>=0.1,<0.3"' in said
    assert "+## 0.2.0 (20" in said
    assert state(clone) == before
    release(clone, "ezpz-topo", "minor", "--widen")
    changelog = (package / "CHANGELOG.md").read_text("utf-8")
    assert "### Fixed\n\n- A bug\n  less. (#7)\n\n## 0.1.0 (20" in changelog
    assert '"0.2.0"' in (package / "src/ezpz_topo/_version.py").read_text("utf-8")
    assert call("git", "tag", cwd=clone).split() == ["ezpz-topo-v0.1.0", "ezpz-topo-v0.2.0"]
    for sibling in ("device", "dist", "launch", "obs", "suite"):
        other = clone / "packages" / f"ezpz-{sibling}"
        assert '"ezpz-topo>=0.1,<0.3"' in (other / "pyproject.toml").read_text("utf-8")
        told = (other / "news" / "+ezpz-topo-0.2.0.changed.md").read_text("utf-8")
        assert told == "Works with ezpz-topo 0.2.0, too.\n"
    # Only that sibling's range: ezpz-dist's other ranges stay.
    dist = (clone / "packages" / "ezpz-dist" / "pyproject.toml").read_text("utf-8")
    assert '"ezpz-tp>=0.1,<0.2"' in dist
    # A dependent package is tried with what was released, the newest that its range allows.
    release(clone, "ezpz-launch", "0.1.0")
    assert "ezpz-launch-v0.1.0" in call("git", "tag", cwd=clone).split()


def test_the_suite_s_version_and_date_are_those_of_the_citation(clone):
    commit(clone, {"CITATION.cff": "version: 0.0.1\ndate-released: 2000-01-01\n"})
    said = release(clone, "ezpz-suite", "0.9.0", "--dry-run")
    assert re.search(r"^\+version: 0\.9\.0\n\+date-released: 20[2-9].-", said, re.MULTILINE), said


@pytest.mark.parametrize(
    "address",
    ["git@github.invalid:someone/ezpz.git", "https://me:hunter2@github.invalid/someone/ezpz"],
)
def test_a_release_names_the_repository_it_is_pushed_to(clone, address):
    call("git", "remote", "set-url", "origin", address, cwd=clone)
    said = release(clone, "ezpz-topo", "0.1.0", "--dry-run")
    assert '+[project.urls]\n+Repository = "https://github.invalid/someone/ezpz"\n' in said
    assert '/someone/ezpz/blob/main/packages/ezpz-topo/CHANGELOG.md"' in said
    assert "hunter2" not in said


def test_command_takes_words_and_options(clone):
    """With a hatch that is there already: it is told to run ``release:make``."""
    tools = clone / ".hatch" / "tools"
    (tools / "bin").mkdir(parents=True)
    bootstrap = (clone / "scripts" / "bootstrap").read_text("utf-8")
    (tools / "made").write_text(bootstrap.split("hatch_version=")[1].split()[0], "utf-8")
    hatch = f'#!/bin/sh\n[ "$1 $2" = "run release:make" ] && shift 2\n"{sys.executable}" '
    (tools / "bin" / "hatch").write_text(f'{hatch}scripts/releases/release.py "$@"\n', "utf-8")
    (tools / "bin" / "hatch").chmod(0o755)
    command = clone / "scripts" / "release"
    assert "would build, try and commit this, and tag ezpz-topo-v0.1.1" in call(
        command, "ezpz-topo", "patch", "--dry-run", cwd=clone.parent
    )
    assert "expected PACKAGE BUMP" in call(command, "ezpz-topo", cwd=clone, status=2)
    assert "usage: scripts/release PACKAGE BUMP" in call(command, "--help", cwd=clone)


def replace(clone, name, old, new):
    text = (clone / name).read_text("utf-8")
    assert old in text
    commit(clone, {name: text.replace(old, new)})


def broken_import(clone):
    name = "packages/ezpz-topo/src/ezpz_topo/__init__.py"
    line = "    from ._rank import Ancestor as Ancestor\n"
    replace(clone, name, line, line.replace("Ancestor", "missing") + line)


def broken_readme(clone):
    readme = '{ text = "a `b\\n===", content-type = "text/x-rst" }'
    new = f"{readme}\nrequires"
    replace(clone, "packages/ezpz-topo/pyproject.toml", '"README.md"\nrequires', new)


def no_fragment(clone):
    for path in (clone / "packages/ezpz-topo/news").glob("[+0-9]*.md"):
        path.unlink()
    commit(clone)


def hook_refuses(clone):
    hook = clone / ".git/hooks/pre-commit"
    hook.write_text("#!/bin/sh\necho 'the hook says no'\nexit 1\n", "utf-8")
    hook.chmod(0o755)


SPOIL = {
    "kind": lambda clone: commit(clone, {"packages/ezpz-topo/news/8.feature.md": "What kind?\n"}),
    "branch": lambda clone: call("git", "switch", "-q", "-c", "topic", cwd=clone),
    "file": lambda clone: (clone / "packages/ezpz-topo/new.txt").write_text("not committed"),
    "tag": lambda clone: call("git", "tag", "ezpz-topo-v0.1.0", cwd=clone),
    # A lock that another git has left: found when everything else is done.
    "lock": lambda clone: (clone / ".git/refs/heads/main.lock").touch(),
}


@pytest.mark.parametrize(
    ("words", "spoil", "said"),
    [
        (("ezpz-topos", "minor"), None, "no package 'ezpz-topos'; expected one of: ezpz-device"),
        (("ezpz-topo", "mini"), None, "'mini': expected major, minor, patch, or a version"),
        (("ezpz-topo", "0.0.9"), None, "0.0.9 is not above what is there (in the tree 0.1.0"),
        (("ezpz-topo", "0.1.0"), SPOIL["tag"], "released: 0.1.0)"),
        (("ezpz-launch", "0.1.0"), None, "ezpz-launch needs ezpz-topo<0.2,>=0.1, and no such"),
        (("ezpz-topo", "0.1.0"), SPOIL["branch"], "on branch 'topic': releases are made on main"),
        (("ezpz-topo", "0.1.0"), SPOIL["file"], "not clean; commit or remove first:\n?? packages/"),
        (("ezpz-topo", "0.1.0"), no_fragment, "packages/ezpz-topo/news has no fragment"),
        (("ezpz-topo", "0.1.0"), SPOIL["kind"], "Invalid news fragment name: 8.feature.md"),
        (("ezpz-topo", "0.1.0"), broken_import, "has no attribute 'missing'"),
        (("ezpz-topo", "0.1.0"), broken_readme, "long_description"),
        (("ezpz-topo", "0.1.0"), hook_refuses, "the hook says no"),
        (("ezpz-topo", "0.1.0"), SPOIL["lock"], "main.lock"),
    ],
)
def test_what_fails_leaves_no_trace(clone, words, spoil, said):
    if callable(spoil):
        spoil(clone)
    before = state(clone)
    scratch = clone.parent / "scratch"
    scratch.mkdir()
    assert said in release(clone, *words, status=1, env={"TMPDIR": str(scratch)})
    assert state(clone) == before
    assert list(scratch.iterdir()) == []


def test_news_of_this_repository_can_be_released():
    """Fragments have kinds that towncrier knows, and nobody writes into the changelog by hand."""
    for package in sorted((ROOT / "packages").iterdir()):
        assert "(unreleased)" not in (package / "CHANGELOG.md").read_text("utf-8"), (
            f"{package.name}: what is not released yet is a file in news/"
        )
        for fragment in (package / "news").glob("*.md"):
            # towncrier takes whatever else comes first for an issue's number.
            assert re.fullmatch(r"(\+[^.].*|\d+)\.[a-z]+\.md|README\.md", fragment.name), fragment
        call(
            sys.executable, "-m", "towncrier", "build", "--draft", "--version", "9.9.9",
            "--config", ROOT / "scripts/releases/towncrier.toml", "--dir", package, cwd=ROOT,
        )  # fmt: skip
