"""Every machine's command lines, as golden files: a change of one is seen in review.

``EZPZ_UPDATE_GOLDEN=1 python -m pytest .../test_golden.py`` writes them anew.
"""

import os
import sys
from pathlib import Path

import pytest

from ezpz_launch import main
from ezpz_launch._plan import SHIM
from ezpz_topo import known_machines

GOLDEN = Path(__file__).parent / "golden"
MACHINES = known_machines({})


def cases(machine):
    """Return what is asked for, by name; a host without devices is told by its cores."""
    # Where the file tells neither, a plan takes two ranks: four is another number than that.
    devices = machine.devices_per_node or 0
    per_host = devices or (machine.cores_per_node or 8) // 2
    fewer = "fewer ranks than devices" if devices else "another number of ranks"
    return {
        "one node": ["-N", "1"],
        "many nodes": ["-N", "4"],
        fewer: ["-N", "1", "-n", str(per_host - 1 if devices else per_host // 2 + 1)],
        "uneven": ["-N", "2", "-n", str(2 * per_host - 1)],
        **{f"option {name}": ["-N", "2", "--option", name] for name in machine.options},
    }


@pytest.mark.parametrize("name", MACHINES)
def test_the_command_lines_of_a_machine(name, capsys, monkeypatch):
    monkeypatch.delenv("EZPZ_MACHINES", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    said = []
    for title, words in cases(MACHINES[name]).items():
        asked = ["--dry-run", "--machine", name, *words, "python", "train.py", "--lr", "1e-4"]
        assert main(asked) == 0
        said.append(f"==== {title}: ezpz-launch {' '.join(asked)}\n{capsys.readouterr().out}")
    text = "\n".join(said).replace(SHIM, "rank_shim.sh").replace(sys.executable, "python")
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("EZPZ_UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.iterdir()} == set(MACHINES)
