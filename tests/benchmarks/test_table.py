"""A table that fits, says what was missed without colour too, and JSON that can be read back."""

import json
import math

import pytest
import table
from goals import Goal
from paired import Spread, absent, alone, beside

GOALS = [
    Goal("slow", "x", "s/slow/p", "ratio", "<= 0.5"),
    Goal("quick", "x", "s/quick/p", "inverse", ">= 2"),
    Goal("also", "x", "s/quick/p", "over", "<= 60"),
    Goal("gone", "x", "s/gone/p", "ratio", "<= 1"),
]
ROWS = [
    beside("s/slow/p", "slow", "ms", ([9.0, 9.0, 9.0], [10.0, 10.0, 12.0]), "p 1.0"),
    beside("s/quick/p", "quick", "ms", ([1.0, 1.0], [4.0, 4.0]), "p 1.0"),
    absent("s/gone/p", "gone", "p", "not installable: no network"),
    alone("t/alone", "a thing", "us", [12_345.0]),
]


def test_the_table_says_what_holds_and_what_does_not():
    lines = list(table.lines(ROWS, GOALS))
    slow, quick, also = lines[1:4]
    told = "slow / p 1.0 9.00 ms 10.0 ms 0.900 0.825 0.900 MISSED <= 0.5"
    assert " ".join(slow.split()) == told
    assert "MISSED" not in quick + also
    assert quick.endswith("1/r >= 2")
    assert also.strip() == "+-3.00 <= 60"
    assert "gone / p: not measured: not installable: no network" in lines[4]
    assert "12.3 ms" in lines[-2]
    # What is missed is red where there is colour.
    missed = [line for line in table.lines(ROWS, GOALS, colour=True) if "MISSED" in line]
    assert [line.count("\033[31mMISSED <= 0.5\033[0m") for line in missed] == [1]
    numbers = {0: "0", 0.12345: "0.123", 9.876: "9.88", 98.76: "98.8", 987.6: "988"}
    assert list(map(table._short, numbers)) == list(numbers.values())


def test_result_and_rows_survive_a_file_and_what_json_cannot_say_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        table.write(str(tmp_path / "r.json"), [alone("s/w", "w", "ms", [math.inf])])
    path = str(tmp_path / "r.json")
    table.write(path, ROWS, date="2026-01-01")
    document, rows = table.read(path)
    assert rows == ROWS
    assert (document["schema"], document["date"]) == (table.SCHEMA, "2026-01-01")
    facts = {"processor", "cores", "system", "python", "torch", "commit"}
    assert set(document["machine"]) == facts


def test_the_verdicts_are_counted_and_in_the_json(capsys, monkeypatch):
    monkeypatch.setattr(table.goals_module, "load", lambda: GOALS)
    table.show(ROWS)
    said = capsys.readouterr().out
    assert "2 of 4 goals hold, 1 MISSED, 1 not measured" in said
    assert "MISSED  slow: 0.9 (goal <= 0.5)" in said
    assert "not measured  gone" in said
    assert "\033" not in said
    rows = json.loads(json.dumps(table.document(ROWS)))["rows"]
    assert [row["holds"] for row in rows] == [False, True, None, None]
    assert Spread(**rows[0]["ratio"]).median == 0.9
