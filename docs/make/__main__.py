"""Build the site: ``python docs/make build``; what it makes lies in ``.hatch``."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import fire
from links import problems_of
from stage import stage

ROOT = Path(__file__).resolve().parents[2]


def build(out: str = "") -> None:
    """Generate the pages, build the site, and check every link in it.

    Args:
        out: Folder for pages (``pages``) and site (``site``); default: ``.hatch/docs-site``.
    """
    folder = Path(out).resolve() if out else ROOT / ".hatch" / "docs-site"
    configuration = stage(ROOT, folder)
    zensical = str(Path(sys.executable).with_name("zensical"))
    words = [zensical, "build", "--strict", "--clean", "--config-file", str(configuration)]
    # Its warnings, but not click's traceback of them.
    done = subprocess.run(words, check=False, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        shutil.rmtree(folder / "site", ignore_errors=True)
        sys.exit(done.stderr.partition("Traceback")[0] + "the site was not built")
    check(str(folder / "site"))


def check(site: str) -> None:
    """Exit with 1 where a link of the built site leads nowhere, or it loads from elsewhere."""
    problems = problems_of(Path(site))
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        sys.exit(1)
    print(f"{site}: {len(list(Path(site).rglob('*.html')))} pages, every link leads somewhere")


if __name__ == "__main__":
    fire.Fire({"build": build, "check": check}, name="docs/make")
