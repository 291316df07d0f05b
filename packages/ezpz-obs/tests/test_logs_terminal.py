"""Where lines go: as text or JSON, to a terminal, to a log file."""

import io
import json
import math
import os
import pty
import sys
import termios
import textwrap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from waiting import all_of

from ezpz_obs import configure_logs, get_logger
from ezpz_obs._context import NOW

from .test_logs import Rude

HELLO = "from ezpz_obs import get_logger; get_logger('x').error('hello'); print('done')"


class Loud:
    def __repr__(self):
        return "x" * 10_000


CYCLE = {}
CYCLE["self"] = CYCLE


def written(event, form="json", **fields):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EZPZ_LOG_FORMAT", form)
        patch.setattr(sys, "stderr", io.StringIO())
        get_logger("train").info(event, **fields)
        return sys.stderr.getvalue()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity"), (2**70, str(2**70)),
        (None, None), ([1, (2, math.nan)], [1, [2, "NaN"]]), ({3}, [3]), ("\ud800", "\\ud800"),
        ({1: {"a": math.inf}}, {"1": {"a": "Infinity"}}), (np.float32(0.5), 0.5),
        (np.float64("nan"), "NaN"), (np.array(math.nan), "NaN"), (np.int64(3), 3),
        (b"raw", "b'raw'"), (int, "<class 'int'>"),
        (Rude(), "<Rude: __str__ raised RuntimeError: no>"),
    ],
)  # fmt: skip
def test_what_json_has_no_word_for(value, said):
    assert json.loads(written("hello", value=value))["value"] == said
    assert "..." in written("hello", value=CYCLE)
    assert len(written("hello", value=Loud())) < 3000


def test_the_step_of_a_summary_is_said_once(monkeypatch):
    monkeypatch.setattr(NOW, "step", 3)
    assert written("step=3 loss=0.5", "console").count("step=3") == 1
    assert written("saved", "console").count("step=3") == 1


def test_a_line_for_people():
    line = written("saved", "console", path="a b", loss=0.25)
    assert line[19:] == f" [info     ] {'saved':30} [train] path='a b' loss=0.25\n"
    first, *rest = written("[config]:\n- lr=0.1\n- x=2", "console", a=1).split("\n")
    assert first.endswith("[train] a=1")
    assert rest == ["- lr=0.1", "- x=2", ""]


def test_a_standard_error_that_is_gone_full_or_closed_changes_no_exit_status(python):
    reader, writer = os.pipe()
    os.close(reader)
    twice = HELLO.replace("get_logger('x').", "x = get_logger('x'); x.info(1); x.")
    assert python(twice, stderr=writer).stdout == "done\n"
    os.close(writer)
    with open("/dev/full", "w") as full:
        assert python(HELLO, stderr=full).stdout == "done\n"
    assert python(HELLO, shell="2>&-").stdout == "done\n"


def on_a_terminal(code, env=None, columns=100):
    """Run a program on a pseudo-terminal, and return what is seen there."""
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            termios.tcsetwinsize(2, (24, columns))
            words = [sys.executable, "-c", textwrap.dedent(code)]
            os.execve(sys.executable, words, {**os.environ, "TERM": "xterm", **(env or {})})
        finally:
            os._exit(127)
    seen = all_of(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return seen.decode()


def test_colours_on_a_terminal():
    assert "\x1b[" in on_a_terminal(HELLO)
    assert "\x1b" not in on_a_terminal(HELLO, {"NO_COLOR": "1"})
    assert "\x1b" not in on_a_terminal(HELLO, {"TERM": "dumb"})


@pytest.mark.parametrize("columns", [0, 100])  # some terminals do not know theirs
def test_lines_leave_a_bar_whole(columns):
    seen = on_a_terminal(
        """
        from ezpz_obs import get_logger, progress
        logger = get_logger("x")
        for step in progress(range(3), desc="train"):
            logger.info("step %d", step)
        """,
        {"NO_COLOR": "1"},
        columns,
    )
    for step in range(3):
        (line,) = [line for line in seen.split("\n") if f"step {step}" in line]
        # The bar is wiped before the line, which begins at the left.
        assert line.rsplit("\r", 2)[-2].startswith("20"), line
    assert "train: 100%" in seen
    assert "3/3" in seen


@pytest.mark.parametrize("gone", ["file", "folder"])
def test_a_removed_log(tmp_path, capsys, gone):
    with configure_logs(directory=tmp_path / "logs") as logs:
        logger = get_logger("x")
        logger.info("before")
        logs.path.unlink()
        if gone == "folder":
            logs.path.parent.rmdir()
        for _ in range(3):
            logger.info("after")
    assert capsys.readouterr().err.count("cannot be written") == (gone == "folder")
    assert gone == "folder" or len(logs.path.read_text().splitlines()) == 3


def test_no_folder_can_be_made(tmp_path, capsys):
    (tmp_path / "in-the-way").write_text("")
    with configure_logs(directory=tmp_path / "in-the-way"):
        get_logger("x").info("hello")
    err = capsys.readouterr().err
    assert err.count("in-the-way") == 1
    assert "the run goes on" in err
    assert "hello" in err


def test_a_restarted_run_goes_on(tmp_path):
    for number in range(2):
        with configure_logs(directory=tmp_path) as logs:
            get_logger("x").info("hello", number=number)
    assert [json.loads(line)["number"] for line in logs.path.read_text().splitlines()] == [0, 1]


def test_a_full_disk_warns_once_and_the_run_goes_on(python, tmp_path):
    # A limit that the process sets itself fails as a full disk does: in the middle of a line.
    done = python(
        """
        import resource
        from ezpz_obs import configure_logs, get_logger
        configure_logs(directory="logs")
        logger = get_logger("train")
        logger.info("before")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
        for step in range(20):
            logger.info("step", number=step, padding="x" * 50)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        logger.info("there is room again")
        print("done")
        """
    )
    assert done.stdout == "done\n"
    (warning,) = [line for line in done.stderr.splitlines() if "[warning" in line]
    assert "cannot be written (File too large)" in warning
    found, torn = [], 0
    for line in (tmp_path / "logs" / "rank-00000.jsonl").read_bytes().splitlines():
        try:
            found.append(json.loads(line)["event"])
        except ValueError:
            torn += 1
    assert torn <= 1
    assert found[0] == "before"
    assert found[-1] == "there is room again"


def test_it_is_never_standard_error(python, tmp_path):
    python(
        """
        import os
        from ezpz_obs import configure_logs, get_logger
        configure_logs(directory=".")
        get_logger("x").info("hello")
        for descriptor in (1, 2):
            try: os.write(descriptor, b"what native code prints")
            except OSError: pass
        """,
        shell="0<&- 1>&- 2>&-",
    )
    (line,) = (tmp_path / "rank-00000.jsonl").read_text().splitlines()
    assert json.loads(line)["event"] == "hello"


def test_threads_do_not_mix_their_lines(tmp_path):
    with configure_logs(directory=tmp_path, level="ERROR") as logs:
        logger = get_logger("train")
        with ThreadPoolExecutor(4) as pool:
            for number in range(400):
                pool.submit(logger.info, "x" * 5000, number=number)
        lines = logs.path.read_text().splitlines()
    assert sorted(json.loads(line)["number"] for line in lines) == list(range(400))


def test_a_stand_in_for_standard_error_gets_what_its_encoding_has(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(written, encoding="ascii"))
    get_logger("x").info("caf\xe9")
    assert b"caf\\xe9" in written.getvalue()
