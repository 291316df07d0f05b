"""The page on machines: its example works, and it explains every key."""

import re
from dataclasses import fields
from pathlib import Path

from ezpz_topo import Machine, get_machine_info, known_machines

PAGE = (Path(__file__).parents[2] / "docs" / "machines.md").read_text(encoding="utf-8")


def test_the_example_is_a_machine(tmp_path):
    example = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert example
    (tmp_path / "utopia.toml").write_text(example[1], encoding="utf-8")
    env = {"EZPZ_MACHINES": str(tmp_path)}
    for more, hostname in (
        ({"NOWHERE_SYSTEM": "utopia"}, "x"),
        ({}, "utopia7"),
        ({}, "x.utopia.example.org"),
    ):
        assert get_machine_info({**env, **more}, hostname=hostname).name == "utopia"


def test_every_key_and_machine_is_explained():
    named = set(re.findall(r"`\[?([a-z_-]+)", PAGE))
    own = {"name", "path", "matched_by", "notes"}
    assert {field.name for field in fields(Machine)} - own <= named
    assert set(known_machines({})) <= named
