"""Make a release of one package; ``scripts/release`` calls this.

All of it happens in a worktree of its own. The branch moves once everything is done: until then
nothing that fails leaves a trace.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import fire
from package import Package, ReleaseError, next_version, widen
from packaging.version import Version

BRANCH = "main"


def run(*words: str | Path, cwd: Path) -> str:
    """Run a command and return what it printed; what it printed is the error if it fails."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        command = " ".join(str(word) for word in words)
        raise ReleaseError(f"{command}: exit status {done.returncode}\n{done.stdout}".strip())
    return done.stdout.strip()


class Release:
    """One release, made in a worktree."""

    def __init__(self, root: Path, tree: Path, name: str) -> None:
        self.root, self.tree = root, tree
        self.package = Package(tree / "packages" / name)
        self.version = Version("0")

    @property
    def tag(self) -> str:
        """Its tag."""
        return f"{self.package.name}-v{self.version}"

    def released(self, name: str) -> dict[Version, str]:
        """Return the released versions of a package, and their tags."""
        tags = run("git", "tag", "--list", f"{name}-v*", cwd=self.root).split()
        return {Version(tag.removeprefix(f"{name}-v")): tag for tag in tags}

    def edit(self, bump: str, *, wide: bool) -> None:
        """Write version, changelog and, if asked, the siblings' ranges."""
        package = self.package
        self.version = next_version(package.version, bump, set(self.released(package.name)))
        if not package.news:
            raise ReleaseError(
                f"packages/{package.name}/news has no fragment: a release tells what changed; "
                "write one (CONTRIBUTING.md says how)"
            )
        self.check_ranges(wide=wide)
        package.write_version(self.version)
        origin = run("git", "config", "--default", "", "remote.origin.url", cwd=self.root)
        package.write_urls(origin)
        today = datetime.now(UTC).date().isoformat()
        if package.name == "ezpz-suite":  # all of it, which people cite
            cite = self.tree / "CITATION.cff"
            text = re.sub(r"(?m)^version: .*$", f"version: {self.version}", cite.read_text("utf-8"))
            cite.write_text(re.sub(r"(?m)^(date-released:) .*$", rf"\1 {today}", text), "utf-8")
            run("git", "add", cite, cwd=self.tree)
        run(
            sys.executable, "-m", "towncrier", "build", "--yes", "--date", today,
            "--config", "scripts/releases/towncrier.toml", "--version", str(self.version),
            "--dir", package.folder.relative_to(self.tree), cwd=self.tree,
        )  # fmt: skip

    def check_ranges(self, *, wide: bool) -> None:
        """Compare the new version with what the siblings ask for."""
        outside = {}
        for folder in sorted((self.tree / "packages").iterdir()):
            other = Package(folder)
            required = other.siblings(extras=True).get(self.package.name)
            if required and not required.specifier.contains(self.version, prereleases=True):
                outside[other] = required
        if not wide and outside:
            theirs = "; ".join(f"{other.name} needs {each}" for other, each in outside.items())
            raise ReleaseError(
                f"{self.package.name} {self.version} is outside of what siblings allow: {theirs}. "
                "If they work with it, --widen moves their upper bounds in the same commit"
            )
        for other, required in outside.items():
            widen(other, required, self.version)

    def changes(self) -> str:
        """Return what the edits changed, as a patch."""
        run("git", "add", "--all", "packages", cwd=self.tree)
        return run("git", "diff", "--cached", "--no-color", "--no-ext-diff", "-U1", cwd=self.tree)

    def build(self, out: Path) -> list[Path]:
        """Build sdist and wheel, and let twine look at them; return them."""
        build = [sys.executable, "-m", "build", "--no-isolation", "--outdir"]
        run(*build, out, self.package.folder, cwd=self.tree)
        files = sorted(out.iterdir())
        run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=self.tree)
        return files

    def released_wheels(self, package: Package, scratch: Path) -> dict[str, Path]:
        """Build what a package needs of ours from the tags, as its users will get it.

        Raises:
            ReleaseError: No released version is in a range that the package asks for.
        """
        found: dict[str, Path] = {}
        for name, required in package.siblings(extras=False).items():
            tags = self.released(name)
            fit = [each for each in tags if required.specifier.contains(each, prereleases=True)]
            if not fit:
                raise ReleaseError(
                    f"{package.name} needs {required}, and no such release has been made "
                    f"(tags: {', '.join(tags.values()) or 'none'}): release {name} first"
                )
            source = scratch / name
            run("git", "worktree", "add", "--detach", source, tags[max(fit)], cwd=self.root)
            try:
                sibling = Package(source / "packages" / name)
                wheels = scratch / "wheels" / name
                build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir"]
                run(*build, wheels, sibling.folder, cwd=source)
                (found[name],) = wheels.iterdir()
                found |= self.released_wheels(sibling, scratch / f"of-{name}")
            finally:
                run("git", "worktree", "remove", "--force", source, cwd=self.root)
        return found

    def try_wheel(self, files: list[Path], scratch: Path) -> None:
        """Install the wheel in a fresh environment, and import every public name there."""
        (wheel,) = (each for each in files if each.suffix == ".whl")
        siblings = self.released_wheels(self.package, scratch)
        run(sys.executable, "-m", "venv", "--without-pip", scratch / "venv", cwd=scratch)
        python = scratch / "venv" / "bin" / "python"
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python))
        run(*pip, "install", "--quiet", *siblings.values(), wheel, cwd=scratch)
        run(*pip, "check", cwd=scratch)
        code = (
            f"import {self.package.import_name} as package\n"
            "for name in package.__all__: getattr(package, name)\n"
            f"assert package.__version__ == {str(self.version)!r}, package.__version__"
        )
        run(python, "-I", "-c", code, cwd=scratch)

    def commit(self, files: list[Path]) -> None:
        """Commit and tag in the worktree, then put the files into dist and move the branch.

        All of it, or nothing.
        """
        title = f"{self.package.name} {self.version}"
        changelog = (self.package.folder / "CHANGELOG.md").read_text("utf-8")
        news = changelog.split("\n## ")[1].partition("\n")[2].strip()
        run("git", "add", "--all", "packages", cwd=self.tree)
        run("git", "commit", "--quiet", "-m", f"Release {title}", cwd=self.tree)
        made = run("git", "rev-parse", "HEAD", cwd=self.tree)
        run("git", "tag", "-a", self.tag, "--cleanup=whitespace", "-m", title, "-m", news,
            made, cwd=self.tree)  # fmt: skip
        dist = self.root / "dist"
        try:
            dist.mkdir(exist_ok=True)
            for each in files:
                shutil.copy2(each, dist)
            self.move_branch(made)
        except BaseException:
            run("git", "tag", "--delete", self.tag, cwd=self.root)
            for each in files:
                (dist / each.name).unlink(missing_ok=True)
            raise

    def move_branch(self, made: str) -> None:
        """Let the branch and the tree go on to a commit.

        Not by ``git merge``: that changes the tree before it finds that the branch is locked.
        """
        move = ("git", "update-ref", "-m", f"release: {self.tag}", f"refs/heads/{BRANCH}")
        run(*move, made, f"{made}^", cwd=self.root)
        try:
            run("git", "read-tree", "-m", "-u", f"{made}^", made, cwd=self.root)
        except BaseException:
            run(*move, f"{made}^", made, cwd=self.root)
            raise


@contextmanager
def worktree(root: Path) -> Iterator[tuple[Path, Path]]:
    """Check out HEAD beside a scratch folder; both are gone at the end."""
    with tempfile.TemporaryDirectory(prefix="ezpz-release-") as folder:
        tree, scratch = Path(folder, "tree"), Path(folder, "scratch")
        scratch.mkdir()
        run("git", "worktree", "add", "--detach", tree, "HEAD", cwd=root)
        try:
            yield tree, scratch
        finally:
            run("git", "worktree", "remove", "--force", tree, cwd=root)


def check_clone(root: Path, name: str) -> None:
    """Refuse to release what is not the branch's."""
    names = sorted(path.name for path in (root / "packages").iterdir())
    if name not in names:
        raise ReleaseError(f"no package {name!r}; expected one of: {', '.join(names)}")
    branch = run("git", "branch", "--show-current", cwd=root)
    if branch != BRANCH:
        raise ReleaseError(f"on branch {branch or '(none)'!r}: releases are made on {BRANCH}")
    if changed := run("git", "status", "--porcelain", cwd=root):
        raise ReleaseError(f"the tree is not clean; commit or remove first:\n{changed}")


def release(package: str, bump: str, *, widen: bool = False, dry_run: bool = False) -> None:
    """Release a package: version, changelog, sdist, wheel, commit and tag. Nothing is pushed.

    Args:
        package: Its folder in packages/, such as ezpz-topo.
        bump: major, minor, patch, or the version itself.
        widen: Let siblings that exclude the new version use it.
        dry_run: Only show what would change.
    """
    root = Path(run("git", "rev-parse", "--show-toplevel", cwd=Path(__file__).parent))
    try:
        check_clone(root, package)
        with worktree(root) as (tree, scratch):
            making = Release(root, tree, package)
            making.edit(str(bump), wide=widen)
            if dry_run:
                print(making.changes())
                print(f"\nwould build, try and commit this, and tag {making.tag}")
                return
            out = scratch / "dist"
            files = making.build(out)
            making.try_wheel(files, scratch)
            making.commit(files)
    except ReleaseError as error:
        sys.exit(f"release: {error}")
    names = ", ".join(f"dist/{each.name}" for each in files)
    print(f"released {package} {making.version}: {names}")
    print(f"to publish: git push --atomic origin {BRANCH} {making.tag}")


if __name__ == "__main__":
    # What is built has no use for what a user has set for another purpose.
    os.environ.pop("PYTHONPATH", None)
    # Ended like by Ctrl-C: what was begun is put away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    fire.Fire(release)
