import json
import math
import signal
import subprocess
import sys

import pytest

from ezpz_obs import HistoryError, read_run
from ezpz_obs._report.content import attempts, metrics, notices, pauses, ranks, tiles
from ezpz_obs._report.survey import survey


def look(folder):
    return survey(read_run(folder))


def end(message, time=1_732_000_100.0):
    return {"event": "end", "time": time, "step": 3, "message": message}


@pytest.mark.parametrize(
    ("message", "state", "words"),
    [("closed", "good", "finished"), ("exit", "good", "the script ended"),
     ("ValueError: no", "bad", "failed: ValueError: no"), (None, "open", "running")],
)  # fmt: skip
def test_cause_of_end(write_run, records, message, state, words):
    lines = records(range(4), loss=1.0) + ([end(message)] if message else [])
    found = look(write_run(*lines)).outcome
    assert found[0] == state
    assert words in found[1]


def test_a_silent_file_is_of_a_killed_run(write_run, records, monkeypatch):
    found = look(write_run(*records(range(4), loss=1.0)))
    found.age = 3600.0
    assert found.outcome == (
        "bad", "killed, or stuck: no end was written, and nothing for 1 h",
    )  # fmt: skip


def test_a_restart_supersedes(write_run, records, header):
    begun = 1_732_000_000.0
    folder = write_run(
        header(),
        *records(range(10), loss=1.0),
        {"event": "end", "time": begun + 5, "step": 9, "message": "RuntimeError: rank 3 is gone"},
        header(attempt=1, time=begun + 100, continues=9),
        *[{**line, "replay": True} for line in records(range(6, 10), start=begun + 100, loss=2.0)],
        *records(range(10, 20), start=begun + 100, loss=2.0),
        end("closed", begun + 120),
    )
    found = look(folder)
    assert found.records == 20
    assert found.series["loss"].mean == pytest.approx((6 * 1 + 14 * 2) / 20)
    rows = attempts(found).rows
    assert [row[4] for row in rows] == ["\N{EN DASH}", "4"]
    assert [row[3] for row in rows] == ["0 \N{EN DASH} 5", "6 \N{EN DASH} 19"]
    assert "rank 3 is gone" in rows[0][5]
    assert attempts(found).marked == {0}
    assert found.outcome[0] == "good"
    assert pauses(found) == []


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_records(write_run, records, count):
    found = look(write_run(*records(range(count), loss=0.5)))
    assert found.records == count
    assert found.last_step == (count - 1 if count else None)
    assert len(metrics(found).rows) == min(count, 1)
    assert bool(tiles(found)) == bool(count)


def test_nothing_but_nan(write_run, records):
    found = look(write_run(*records(range(50), loss="NaN")))
    assert math.isnan(found.series["loss"].last[1])
    assert metrics(found).marked == {0}
    assert tiles(found)[0].value == "NaN"


def test_a_torn_line_is_left_out(write_run, records):
    assert look(write_run(*records(range(5), loss=1.0), tail='{"step":5,"ti')).records == 5


def test_a_damaged_line_is_said(write_run, records):
    folder = write_run(*records(range(5), loss=1.0))
    text = (folder / "metrics.jsonl").read_text().replace('"step": 3', '"step": x3')
    (folder / "metrics.jsonl").write_text(text)
    with pytest.raises(HistoryError, match="line 5"):
        look(folder)


def test_metrics_at_different_steps(write_run, records):
    lines = []
    for record in records(range(100), loss=1.0):
        lines.append(record)
        if record["step"] % 10 == 0:
            lines.append({"step": record["step"], "time": record["time"], "eval/acc": 0.5})
    found = look(write_run(*lines))
    assert (found.series["loss"].count, found.series["eval/acc"].count) == (100, 10)
    assert found.step_times.count == 99


def test_statistics_over_ranks_are_one_metric(write_run, records):
    spread = {"loss/mean": 1.0, "loss/std": 0.1, "loss/min": 0.8, "loss/max": 1.2,
              "loss/min_rank": 0, "loss/max_rank": 3, "step_s/mean": 1.0, "step_s/std": 0.1,
              "step_s/min": 0.9, "step_s/max": 1.5, "step_s/min_rank": 1,
              "step_s/max_rank": lambda step: 2 if step % 4 else 0}  # fmt: skip
    folder = write_run(*records(range(40), loss=1.1, step_s=1.0, lr=0.1, **spread))
    found = look(folder)
    assert found.groups == {"loss": True, "step_s": True, "lr": False}
    table = ranks(found)
    assert table.rows[0][:3] == ("step_s", "rank 2 (75 %)", "rank 1 (100 %)")
    assert "rank 2" in table.note
    assert "1.5 " in table.note


def test_a_user_may_call_a_metric_mean(write_run, records):
    found = look(write_run(*records(range(4), **{"val/mean": 1.0, "val/max": 2.0})))
    assert found.groups == {"val/mean": False, "val/max": False}


def test_with_one_rank_there_is_no_spread(write_run, records):
    spread = {f"loss/{part}": 1.0 for part in ("mean", "std", "min", "max")}
    folder = write_run(*records(range(4), loss=1.0, **spread), world_size=1)
    found = look(folder)
    assert found.groups == {"loss": False}
    assert ranks(found) is None


def test_warnings_of_events_and_logs(write_run, records):
    folder = write_run(
        *records(range(4), loss=1.0),
        {"event": "alarm", "time": 1_732_000_001.0, "step": 2, "message": "loss spike"},
        {
            "event": "checkpoint",
            "time": 1_732_000_002.0,
            "step": 3,
            "message": "saved",
            "path": "/x",
        },
    )
    (folder / "logs").mkdir()
    slow = {"time": "2024-11-19T07:06:41.5+00:00", "level": "warning", "event": "slow", "rank": 1}
    crash = {"time": "2024-11-19T07:06:50+00:00", "level": "error", "event": "uncaught", "rank": 2,
             "exception": "Traceback (most recent call last):\n  ...\nValueError: no"}  # fmt: skip
    (folder / "logs" / "rank-00001.jsonl").write_bytes(
        b'{"level":"info","event":"hello"}\n' + (json.dumps(slow) + "\n").encode() * 5
        + b"not json\n" + json.dumps({**slow, "rank": 3}).encode() + b"\n[1]\n"
    )  # fmt: skip
    (folder / "logs" / "rank-00002.jsonl").write_text(json.dumps(crash) + "\n" + '{"level":"err')
    found = look(folder)
    table = notices(found.notices)
    said = [(row[2], row[3], row[4], row[5]) for row in table.rows]
    nothing = "\N{EN DASH}"
    assert said == [
        (nothing, "alarm", "loss spike", ""),
        ("1, 3", "warning", "slow", "6 \N{MULTIPLICATION SIGN}"),
        (nothing, "checkpoint", "saved path=/x", ""),
        ("2", "error", "uncaught: ValueError: no", ""),
    ]
    assert found.notices.unreadable == 2
    assert "2 lines" in table.note


def test_many_different_warnings_are_bounded(write_run, records):
    warnings = [
        {"event": "warning", "time": 1_732_000_000.0 + n, "step": n, "message": f"n {n}"}
        for n in range(1000)
    ]
    found = look(write_run(*records(range(4), loss=1.0), *warnings)).notices
    assert (len(found.shown), found.left_out) == (400, 600)
    assert (found.shown[0].text, found.shown[-1].text) == ("n 0", "n 999")


def test_a_run_that_was_killed(tmp_path):
    code = (
        "from ezpz_obs import History\n"
        f"h = History({str(tmp_path / 'run')!r})\n"
        "for n in range(10**9):\n"
        "    h.record({'loss': 1 / (n + 1)})\n"
        "    n == 2000 and print('go', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    found = look(tmp_path / "run")
    assert found.records > 2000
    assert found.last_step == found.records - 1
    assert found.outcome[0] == "open"


def test_a_header_that_lacks_most(write_run, records):
    found = look(write_run({"ezpz_obs": 1, "time": "soon"}, *records(range(3), loss=1.0)))
    assert found.attempts[0].begun is None
    assert attempts(found).rows


def test_a_file_without_a_header(write_run, records, tmp_path):
    folder = write_run(*records(range(3), loss=1.0))
    path = folder / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    found = look(folder)
    assert found.records == 3
    assert attempts(found).rows


def test_ten_thousand_metrics(write_run):
    """Of which each once took a walk over all: minutes."""
    names = [f"layer{number}/norm" for number in range(10_000)]
    lines = [{"step": step, "time": 0.0, **dict.fromkeys(names, 0.5)} for step in range(150)]
    found = look(write_run(*lines))
    assert found.groups is found.groups
    assert (len(found.groups), found.records) == (10_000, 150)
    assert len(metrics(found).rows) == 10_000
    assert max(len(block.steps) for block in found.run.blocks()) < 150, "a part of 1.5e6 numbers"
