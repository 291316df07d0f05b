"""bench:all, whole: one section really measured, and sections that fail."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import side_by_side
import table
from waiting import is_left

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_a_section_is_measured_shown_written_and_drawn(tmp_path):
    found, plots = tmp_path / "found.json", tmp_path / "plots"
    words = ["--only=nodelists", "--runs=2", f"--json={found}", f"--plots={plots}"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "side_by_side.py"), *words],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
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
    for row in rows if any(row.ratio for row in rows) else ():
        assert row.peer in "".join(ET.parse(plots / "nodelists.svg").getroot().itertext())


def test_a_section_that_fails_is_a_row_and_the_others_go_on(monkeypatch, capsys):
    monkeypatch.setitem(side_by_side.SECTIONS, "nodelists", lambda _: ["--runs=none"])
    monkeypatch.setitem(side_by_side.SECTIONS, "topology", lambda _: ["--runs=1"])
    with pytest.raises(SystemExit) as status:
        side_by_side.main(only=["nodelists", "topology"], runs=1)
    assert status.value.code == 1
    said = capsys.readouterr().out
    assert "the whole section: not measured: exit status 1: TypeError" in said
    assert "detect()" in said


HANGS = """
import subprocess, time
other = subprocess.Popen(["sleep", "300"])
open({pid!r}, "w").write(str(other.pid))
time.sleep(300)
"""


def test_a_section_that_hangs_is_ended_with_what_it_started(tmp_path, monkeypatch):
    pid = tmp_path / "pid"
    (tmp_path / "hangs.py").write_text(HANGS.format(pid=str(pid)))
    monkeypatch.setattr(side_by_side, "HERE", tmp_path)
    monkeypatch.setitem(side_by_side.SECTIONS, "hangs", lambda _: [])
    monkeypatch.setattr(side_by_side, "LIMIT", 3)
    (row,) = side_by_side.run_section("hangs", 1)
    assert "not done after" in row.missing
    assert not is_left(int(pid.read_text()))


def test_a_section_without_a_goals_row_or_a_result_is_a_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(side_by_side, "HERE", tmp_path)
    (tmp_path / "nodelists.py").write_text(
        f"import sys; sys.path.append({str(BENCHMARKS)!r})\n"
        "import table; table.write(sys.argv[-1].removeprefix('--json='), [])\n"
    )
    with pytest.raises(SystemExit) as status:
        side_by_side.main(only="nodelists", runs=1)
    assert status.value.code == 1
    assert "no benchmark gave this row" in capsys.readouterr().out
    (tmp_path / "nodelists.py").write_text("")
    (row,) = side_by_side.run_section("nodelists", 1)
    assert (row.key, "not a result" in row.missing) == ("nodelists/section", True)
