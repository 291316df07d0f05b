"""The pages on machines and layouts: examples work, keys, tables and pictures are what is there."""

import importlib
import re
import subprocess
import sys
import warnings
from dataclasses import fields
from pathlib import Path

import pytest

from ezpz_topo import Machine, get_machine_info, known_machines

DOCS = Path(__file__).parents[2] / "docs"
MACHINES = (DOCS / "machines.md").read_text(encoding="utf-8")
LAYOUTS = (DOCS / "layouts.md").read_text(encoding="utf-8")


def test_the_example_is_a_machine(tmp_path):
    (example,) = re.findall(r"```toml\n(.*?)```", MACHINES, re.DOTALL)[:1]
    (tmp_path / "utopia.toml").write_text(example, encoding="utf-8")
    env = {"EZPZ_MACHINES": str(tmp_path)}
    assert get_machine_info({**env, "NOWHERE_SYSTEM": "utopia"}, hostname="x").name == "utopia"
    for hostname in ("utopia7", "x.utopia.example.org"):
        assert get_machine_info(env, hostname=hostname).name == "utopia"


def test_every_key_and_machine_is_explained():
    named = set(re.findall(r"`\[?([a-z_-]+)", MACHINES))
    own = {"name", "path", "matched_by", "notes"}
    assert {field.name for field in fields(Machine)} - own <= named
    assert set(known_machines({})) <= named


def test_the_table_of_layouts_is_the_zoo_and_the_pictures_are_drawn_so():
    from ezpz_tp import RankLayout, describe, layouts  # torch takes seconds of each worker

    rows = re.findall(r"^\| `(.*?)` \| (.*?) \| (.*?) \|$", LAYOUTS, re.MULTILINE)
    assert [name for name, _, _ in rows] == list(layouts.names())
    for name, mesh, when in rows:
        axes = mesh.split(", ")
        layout = layouts.named(name, 2 ** len(axes), **dict.fromkeys(axes, 2))
        assert [axis for axis, _ in layout.mesh_axes()] == axes
        assert layout.when == when
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn = {
            "layouts-nodes.svg": describe(RankLayout(16, 2, 2), ranks_per_node=8).svg(),
            "layouts-crossing.svg": describe(RankLayout(16, 4), ranks_per_node=[6, 6, 4]).svg(),
        }
    assert set(re.findall(r"\]\((.*?\.svg)\)", LAYOUTS)) == set(drawn)
    for name, svg in drawn.items():
        assert (DOCS / name).read_text(encoding="utf-8") == svg
        assert len(svg) < 8 * 1024


@pytest.mark.parametrize("page", sorted(DOCS.glob("from-*.md")), ids=lambda page: page.stem)
def test_the_names_that_a_page_sends_its_readers_to_are_there(page):
    rows = re.findall(r"^\| `.*? \| (.*?) \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    for name in re.findall(r"\b(?<![/.-])ezpz(?:_[a-z]+)?(?:\.\w+)+", "\n".join(rows)):
        first, *rest = name.split(".")
        found = importlib.import_module(first)
        for part in rest:
            found = getattr(found, part, None) or importlib.import_module(f"{first}.{part}")
            first = f"{first}.{part}"


def test_the_pictures_of_terminal_and_report_are_what_the_commands_show():
    words = [sys.executable, DOCS.parent / "scripts" / "lib" / "picture.py", "--check"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
