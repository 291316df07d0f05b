"""A run on the terminal: a plot of letters, and the lines of a live run."""

import io
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from waiting import until

from ezpz_obs import History, ReportError, plot, tail


def drawn(folder, *names, **options):
    out = io.StringIO()
    plot(folder, *names, file=out, **options)
    return out.getvalue()


def test_a_plot_as_wide_as_asked(write_run, records):
    folder = write_run(*records(range(300), loss=lambda n: 1 / (n + 1), lr=0.1))
    text = drawn(folder, width=72, height=20)
    assert max(map(len, text.splitlines())) <= 72
    assert "\x1b" not in text
    assert any("\u2801" <= letter <= "\u28ff" for letter in text)
    assert "loss: last 0.003333" in text
    assert "lr" not in text
    text = drawn(folder, "loss", "lr", width=80)
    assert "loss: last 0.003333" in text
    assert "lr: last 0.1" in text


@pytest.mark.parametrize(
    "values", [[1.0], [2.0] * 20, [1.0, "NaN", 3.0], [1e300, -1e300], [-1e308, 1e308], [1e-320]]
)
def test_any_values(write_run, values):
    lines = [{"step": n, "time": 1.0, "loss": value} for n, value in enumerate(values)]
    assert "loss: last" in drawn(write_run(*lines), width=60)


def scale(places, numbers):
    """Return what turns a place of the picture into a number, and how far two places are apart."""
    each = (numbers[-1] - numbers[0]) / (places[-1] - places[0])
    return lambda place: numbers[0] + each * (place - places[0]), abs(each)


def read_picture(text):
    """Return the last point that is drawn, the frame's right end, and a cell's size in numbers."""
    lines = text.splitlines()
    bottom = next(row for row, line in enumerate(lines) if "└" in line)
    left = lines[bottom].index("└")
    columns = [at for at, letter in enumerate(lines[bottom]) if letter == "┬"]
    find_x, wide = scale(columns, [float(label) for label in lines[bottom + 1].split()])
    rows = [row for row, line in enumerate(lines[:bottom]) if line[left : left + 1] == "┤"]
    find_y, high = scale(rows, [float(lines[row][:left]) for row in rows])
    last, row = max(
        (at, row)
        for row, line in enumerate(lines[:bottom])
        for at, letter in enumerate(line)
        if "\u2801" <= letter <= "\u28ff"
    )
    return (find_x(last), find_y(row)), find_x(len(lines[bottom]) - 2), (wide, high)


FALL = [5.0] * 26 + [1.3] * 4
RISE = [5.0] * 26 + [9.9] * 4


@pytest.mark.parametrize(
    ("values", "last"),
    [
        (RISE, (29, 9.9)), (FALL, (29, 1.3)), (RISE * 5, (149, 9.9)), (FALL * 5, (149, 1.3)),
        ([n / 10 for n in range(7)], (6, 0.6)), ([n / 1000 for n in range(1000)], (999, 0.999)),
        # Where the end is no number, the axis shows it all the same.
        ([*RISE, *["NaN"] * 27], (29, 9.9)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("width", [60, 100])
def test_a_run_is_drawn_to_its_end(write_run, values, last, width):
    lines = [{"step": n, "time": 1.0, "loss": value} for n, value in enumerate(values)]
    point, end, cell = read_picture(drawn(write_run(*lines), width=width))
    # Ticks and points each lie in the middle of a cell, to half a cell.
    assert point[0] == pytest.approx(last[0], abs=1.5 * cell[0])
    assert point[1] == pytest.approx(last[1], abs=1.5 * cell[1])
    assert end == pytest.approx(len(values) - 1, abs=1.5 * cell[0])


def test_names_cannot_write_to_the_terminal(write_run, records):
    folder = write_run(*records(range(9), **{"\x1b]0;title\x07loss": 1.0}), run="\x1b[31m\nred")
    text = drawn(folder, width=80)
    assert "\x1b" not in text
    assert "\x07" not in text


def test_refused(write_run, records):
    folder = write_run(*records(range(9), loss=1.0, acc=1.0))
    with pytest.raises(ReportError, match="no metric 'los'; expected one of: loss, acc"):
        drawn(folder, "los")
    with pytest.raises(ReportError, match="no records"):
        drawn(write_run())
    with pytest.raises(ReportError, match="no value is a number"):
        drawn(write_run(*records(range(9), loss="NaN")))


def said(folder, **options):
    out = io.StringIO()
    tail(folder, file=out, **options)
    return out.getvalue().splitlines()


def test_the_last_lines(write_run, records):
    folder = write_run(*records(range(100), loss=0.5))
    found = said(folder, follow=False, lines=3)
    assert [line.split(" ", 1)[1] for line in found] == [
        f"step={step} loss=0.5" for step in (97, 98, 99)
    ]
    assert said(folder, follow=False, lines=0) == []


def test_what_is_said_of_each_kind(write_run, records, header):
    spread = {"loss/mean": 0.25, "loss/std": 0.125, "loss/min": 0.0, "loss/max": 1.0,
              "loss/min_rank": 0, "loss/max_rank": 1}  # fmt: skip
    folder = write_run(
        header(attempt=1, continues=7),
        *records([8], replay=True, loss=0.5, **spread),
        {"event": "warning", "time": 1.0, "step": 8, "message": "a\n\x1b[31mb"},
        {"event": "end", "time": 1.0, "step": 8, "message": "closed"},
    )
    found = [line.split(" ", 1)[1] for line in said(folder)]
    assert found[0].endswith("attempt 1 of test-run, 4 ranks, continues after step 7")
    assert found[1] == "step=8 loss=0.25±0.12 (replayed)"
    assert found[2] == "step=8 warning: a\\n\\x1b[31mb"
    assert found[3] == "step=8 end: closed"


def test_a_live_run_is_followed_to_its_end(tmp_path):
    history = History(tmp_path / "run")
    history.record({"loss": 1.0})
    out = io.StringIO()
    thread = threading.Thread(target=tail, args=(tmp_path / "run",), kwargs={"file": out})
    thread.start()
    try:
        until(lambda: "step=0" in out.getvalue())
        for _ in range(50):
            history.record({"loss": 2.0})
            time.sleep(0.001)
        assert thread.is_alive()
    finally:
        history.close()
        thread.join(120)
    assert not thread.is_alive()
    said = [line.split(" ", 1)[1] for line in out.getvalue().splitlines()[1:]]
    expected = ["step=0 loss=1", *(f"step={step} loss=2" for step in range(1, 51))]
    assert said == [*expected, "step=50 end: closed"]


def test_interrupted(write_run, records):
    folder = write_run(*records(range(5), loss=1.0))
    code = "import sys; from ezpz_obs._cli import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", code, "tail", folder], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # In the background of a script's shell it is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - one thread
    ) as process:  # fmt: skip
        while "step=4" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130
    assert errors == ""
