"""bench:all, whole: one section really measured, and sections that fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import side_by_side
import table
from plots import draw

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "side_by_side.py"), *words],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def test_a_section_is_measured_shown_written_and_drawn(tmp_path):
    found, plots = tmp_path / "found.json", tmp_path / "plots"
    done = bench("--only=nodelists", "--runs=2", f"--json={found}", f"--plots={plots}")
    assert done.returncode == 0, done.stdout + done.stderr
    document, rows = table.read(str(found))
    assert document["runs"] == 2
    refused = next(row for row in rows if row.key == "nodelists/refuse-hostile")
    assert refused.ours is not None
    wanted = {f"nodelists/{way}/{peer}" for way in ("expand-range", "expand-plain", "fold")
              for peer in ("python-hostlist", "ClusterShell")}  # fmt: skip
    assert wanted <= {row.key for row in rows}
    for row in rows:  # measured, or with the reason why not
        assert (row.ours is not None) != bool(row.missing), row
    assert "goals hold" in done.stdout


def test_an_unknown_section():
    done = bench("--only=weather")
    assert done.returncode == 1
    assert done.stderr == f"--only=weather: expected some of {', '.join(side_by_side.SECTIONS)}\n"


def test_a_section_that_fails_is_a_row_and_the_others_go_on(monkeypatch, capsys):
    monkeypatch.setitem(side_by_side.SECTIONS, "nodelists", lambda _: ["--runs=none"])
    monkeypatch.setitem(side_by_side.SECTIONS, "topology", lambda _: ["--runs=1"])
    with pytest.raises(SystemExit) as status:
        side_by_side.main(only=["nodelists", "topology"], runs=1)
    assert status.value.code == 1
    said = capsys.readouterr().out
    assert "the whole section: not measured: exit status 1: TypeError" in said
    assert "detect()" in said


def test_a_section_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(side_by_side, "LIMIT", 0.1)
    (row,) = side_by_side.run_section("nodelists", 1)
    assert "not done after" in row.missing


def test_plots_are_svg_with_the_names_of_what_is_compared(recorded, tmp_path):
    _, rows = table.read(recorded)
    paths = draw(rows, tmp_path)
    assert {"nodelists.svg", "launch.svg", "tp.svg"} <= {path.name for path in paths}
    for path in paths:
        root = ET.parse(path).getroot()  # made a moment ago
        said = "".join(root.itertext())
        shown = [row for row in rows if row.key.startswith(f"{path.stem}/") and row.ratio]
        assert all(row.peer in said for row in shown)
    again = draw(rows, tmp_path / "again")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in paths]


def test_scripts_bench_says_what_it_takes():
    script = str(BENCHMARKS.parent / "scripts" / "bench")
    for words, said in ((["--quick"], "'--quick'; expected"), (["--compare", "a"], "1 words")):
        done = subprocess.run([script, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
    shown = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    assert "usage: scripts/bench" in shown.stdout
    assert Path(script).stat().st_mode & 0o111


def test_without_slurm_its_rows_say_so(monkeypatch):
    import launch

    monkeypatch.setattr("os.geteuid", lambda: 1)
    rows = launch.under_slurm(1)
    assert [row.key for row in rows] == [
        "launch/first-line/srun",
        "launch/ready/srun",
        "launch/true/srun",
    ]
    assert all("not root" in row.missing or "not installed" in row.missing for row in rows)
