"""A package of this repository as its releases see it: versions, ranges, news."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

BUMPS = ("major", "minor", "patch")
_VERSION = re.compile(r'(?<=^__version__ = ")[^"]+(?="$)', re.MULTILINE)
# Not what stands before an @: a name, or a credential.
_REMOTE = re.compile(r"(?:https://(?:[^@/]*@)?|(?:ssh://)?git@)([\w.-]+)[:/]([^?#]+?)(?:\.git)?/?")


class ReleaseError(Exception):
    """The release cannot be made; the message says why and what to do."""


@dataclass(frozen=True)
class Package:
    """One folder of ``packages/``."""

    folder: Path

    @property
    def name(self) -> str:
        """The distribution's name."""
        return self.folder.name

    @property
    def version_file(self) -> Path:
        """The one file that holds the version: Hatch reads it there."""
        tool = tomllib.loads(self.pyproject.read_text("utf-8"))["tool"]
        return self.folder / str(tool["hatch"]["version"]["path"])

    @property
    def version(self) -> Version:
        """The version in the tree."""
        (found,) = _VERSION.findall(self.version_file.read_text("utf-8"))
        return Version(found)

    def write_version(self, version: Version) -> None:
        """Write another version into the tree."""
        text = self.version_file.read_text("utf-8")
        self.version_file.write_text(_VERSION.sub(str(version), text), "utf-8")

    @property
    def import_name(self) -> str:
        """What is imported."""
        return self.version_file.parent.name

    @property
    def pyproject(self) -> Path:
        """What says which siblings it needs."""
        return self.folder / "pyproject.toml"

    def write_urls(self, origin: str) -> None:
        """Name the repository in the package's metadata, if it has a public address."""
        text, found = self.pyproject.read_text("utf-8"), _REMOTE.fullmatch(origin)
        if found and "[project.urls]" not in text:
            url = f"https://{found[1]}/{found[2]}"
            changelog = f"{url}/blob/main/packages/{self.name}/CHANGELOG.md"
            text += f'\n[project.urls]\nRepository = "{url}"\nIssues = "{url}/issues"\n'
            self.pyproject.write_text(f'{text}Changelog = "{changelog}"\n', "utf-8")

    @property
    def news(self) -> list[Path]:
        """The fragments that wait for a release."""
        return sorted(path for path in self.folder.glob("news/*.md") if path.name != "README.md")

    def siblings(self, *, extras: bool) -> dict[str, Requirement]:
        """Return what it requires of ours; with ``extras``, also what only extras require."""
        project = tomllib.loads(self.pyproject.read_text("utf-8"))["project"]
        more = project.get("optional-dependencies", {}).values() if extras else ()
        found = (Requirement(each) for each in chain(project["dependencies"], *more))
        return {each.name: each for each in found if each.name.startswith("ezpz-")}


def next_version(current: Version, bump: str, released: set[Version]) -> Version:
    """Return the version to release.

    Args:
        current: The version in the tree.
        bump: ``major``, ``minor``, ``patch``, or the version itself.
        released: The versions that have a tag.

    Raises:
        ReleaseError: It is no version, is not above all that were released, or below the tree's.
    """
    if bump in BUMPS:
        place = BUMPS.index(bump)
        numbers = [*current.release[:place], current.release[place] + 1, *(0,) * (2 - place)]
        bump = ".".join(map(str, numbers))
    try:
        version = Version(bump)
    except InvalidVersion:
        version = Version("0")
    if str(version) != bump or len(version.release) != 3:
        raise ReleaseError(f"{bump!r}: expected major, minor, patch, or a version such as 0.2.0")
    if version < max(released | {current}) or version in released:
        raise ReleaseError(
            f"{version} is not above what is there (in the tree {current}; released: "
            f"{', '.join(map(str, sorted(released))) or 'nothing'})"
        )
    return version


def upper_bound(version: Version) -> str:
    """Return the first version that may break who uses this one."""
    if version.major:
        return str(version.major + 1)
    return f"0.{version.minor + 1}"


def widen(package: Package, required: Requirement, version: Version) -> None:
    """Let a package use a sibling's new version, too, and note that in its news."""
    text = package.pyproject.read_text("utf-8")
    range_of = re.compile(rf'("{required.name}(?:\[[^]"]*\])?>=[0-9.]+,<)[0-9.]+(?=[";])')
    wide, count = range_of.subn(rf"\g<1>{upper_bound(version)}", text)
    if not count:
        raise ReleaseError(
            f"{package.name} needs {required}: --widen knows ranges such as >=0.1,<0.2 only; "
            f"edit {package.pyproject.name} of {package.name} by hand"
        )
    package.pyproject.write_text(wide, "utf-8")
    fragment = package.folder / "news" / f"+{required.name}-{version}.changed.md"
    fragment.write_text(f"Works with {required.name} {version}, too.\n", "utf-8")
