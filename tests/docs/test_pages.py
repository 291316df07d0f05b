"""The pages on machines and layouts: examples work, keys and tables are what is there."""

import importlib
import re
import subprocess
import sys
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


def test_the_table_of_meshes_is_the_one_of_the_package():
    from ezpz_tp import layouts  # torch takes seconds of each worker

    rows = re.findall(r"^\| `(.*?)` \| (.*?) \| (.*?) \|$", LAYOUTS, re.MULTILINE)
    expected = [(name, ", ".join(mesh.axes), mesh.when) for name, mesh in layouts.MESHES.items()]
    assert rows == expected


def test_the_table_of_states_is_the_one_of_the_code():
    from ezpz_launch._run.states import TRANSITIONS, RankState, RunState

    page = (DOCS / "how-it-works.md").read_text(encoding="utf-8")
    rows, state = [], ""
    for named, event, following in re.findall(
        r"^\| (.*?) ?\| `(\w+)` \| `(\w+)` \|$", page, re.MULTILINE
    ):
        state = named.strip("`") or state
        rows.append((state, event, following))
    expected = [
        (state.name, event.name, row.state.name)
        for state, events in TRANSITIONS.items()
        for event, row in events.items()
    ]
    assert rows == expected
    assert all(f"`{state.name}`" in page for state in RankState)
    picture = (DOCS / "assets" / "states.svg").read_text(encoding="utf-8")
    assert all(f">{state.name}<" in picture for state in RunState)


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
