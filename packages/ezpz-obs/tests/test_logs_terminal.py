"""Where the lines of a process go: as text or JSON, to a terminal, to a log file."""

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
from ezpz_obs._context import NOW, Place
from ezpz_obs._terminal import Event, LogFile, console_line, json_line, traceback_text

ONE, FOUR = Place(0, 1, "n0"), Place(2, 4, "n0")
BOTH = pytest.mark.parametrize("colours", [False, True])
HELLO = "from ezpz_obs import get_logger; get_logger('x').error('hello'); print('done')"


def event(text="hello", **fields):
    return Event(20, "info", "train", text, fields)


def shown(said, place=ONE, *, colours=False):
    return console_line(said, place, 0.0, colours=colours)


def read(text="hello", **fields):
    line = json_line(event(text, **fields), FOUR, 1732100000.000001)
    assert line.count(b"\n") == 1
    return json.loads(line)


class Rude:
    def __repr__(self):
        raise RuntimeError("no")


class Loud:
    def __repr__(self):
        return "x" * 10_000


CYCLE = {}
CYCLE["self"] = CYCLE


def test_the_time_is_utc_with_microseconds():
    for seconds, fraction in ((1732100000.0, ".000000"), (1732100000.25, ".250000")):
        stamp = json.loads(json_line(event(), FOUR, seconds))["time"]
        assert stamp == f"2024-11-20T10:53:20{fraction}+00:00"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity"), (2**70, str(2**70)),
        (None, None), ([1, (2, math.nan)], [1, [2, "NaN"]]), ({3}, [3]), ("\ud800", "\\ud800"),
        ({1: {"a": math.inf}}, {"1": {"a": "Infinity"}}), (np.float32(0.5), 0.5),
        (np.float64("nan"), "NaN"), (np.array(math.nan), "NaN"), (np.int64(3), 3),
        (b"raw", "b'raw'"), (int, "<class 'int'>"),
        (Rude(), "<Rude: __repr__ raised RuntimeError: no>"),
    ],
)  # fmt: skip
def test_what_json_has_no_word_for(value, said):
    assert read(value=value)["value"] == said


def test_no_field_hides_what_the_line_says_itself():
    assert "..." in json.dumps(read(value=CYCLE))
    assert len(read(value=Loud())["value"]) < 3000
    line = read(time=3, level="mine", logger="mine", timestamp=1, exception="e", rank=7, host="n3")
    assert (line["rank"], line["host"], line["level"], line["logger"]) == (2, "n0", "info", "train")
    assert (line["rank_"], line["host_"], line["level_"], line["time_"]) == (7, "n3", "mine", 3)
    assert line["exception_"] == "e"
    assert "rank_" not in read(rank=2), "the same is not said twice"


def test_the_step_of_a_summary_is_said_once(monkeypatch):
    monkeypatch.setattr(NOW, "step", 3)
    assert shown(event("step=3 loss=0.5"), FOUR).count("step=3") == 1
    assert shown(event("saved"), FOUR).count("step=3") == 1


@BOTH
def test_a_line_for_people(colours):
    alone = shown(event("saved", path="a b", loss=0.25, rank=3), colours=colours)
    assert alone.endswith("\n")
    assert ("\x1b" in alone) == colours
    if not colours:
        fields = "path='a b' loss=0.25 rank=3"
        assert alone[19:] == f" [info     ] {'saved':30} [train] {fields}\n"
        assert shown(event(a="two\nlines")).endswith(" a='two\\nlines'\n")
    assert "host" not in alone
    several = shown(event(), FOUR, colours=colours)
    assert "rank" in several
    assert "n0" in several


@BOTH
def test_what_cannot_be_shown_to_people(colours):
    line = shown(event(a=Rude(), b=[Rude()], d="", e="\ud800"), colours=colours)
    assert line.count("<Rude: __repr__ raised RuntimeError: no>") == 2
    assert line.count("\n") == 1


@BOTH
def test_tracebacks_and_further_lines_of_a_text_have_lines_of_their_own(colours):
    said = Event(40, "error", None, "failed", {}, exception="Traceback\nE: x", stack="Stack\n  f")
    line = shown(said, colours=colours)
    assert "\nStack\n  f" in line
    assert line.endswith("\nTraceback\nE: x\n")
    config = event("[config]:\n- lr=0.1\n- x=2", a=1)
    first, *rest = shown(config, FOUR, colours=colours).split("\n")
    assert "train" in first
    assert "a" in first
    assert rest == ["- lr=0.1", "- x=2", ""]


def test_tracebacks_of_all_that_exc_info_may_be():
    class OddError(Exception):
        def __str__(self):
            raise RuntimeError("no")

    error = ValueError("boom")
    assert traceback_text(error) == "ValueError: boom"
    assert traceback_text((ValueError, error, None)) == "ValueError: boom"
    assert [traceback_text(none) for none in (True, None, (None, None, None))] == [None] * 3
    assert "OddError" in traceback_text(OddError())


def test_a_standard_error_that_is_gone_full_or_closed_changes_no_exit_status(python):
    reader, writer = os.pipe()
    os.close(reader)
    twice = HELLO.replace("get_logger('x').", "x = get_logger('x'); x.info(1); x.")
    assert python(twice, stderr=writer).stdout == "done\n"
    os.close(writer)
    with open("/dev/full", "w") as full:
        assert python(HELLO, stderr=full).stdout == "done\n"
    assert python(HELLO, shell="2>&-").stdout == "done\n"


def test_a_full_pipe_that_does_not_wait():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with open(writer, "w") as stream, open(reader) as end:
        logger = get_logger(env={}, file=stream)
        for _ in range(200):
            logger.info("x" * 5000)  # what is longer than 4096 a pipe takes in parts
        os.set_blocking(reader, False)
        first = end.read()
        assert 0 < first.count("\n") < 200
        assert not first.endswith("\n")
        logger.info("there is room")
        rest = end.read()
    torn, line = rest.splitlines()  # what was torn is ended first
    assert torn == ""
    assert "there is room" in line


def test_streams_that_are_closed_raise_or_are_patched(tmp_path):
    class Broken(io.StringIO):
        def write(self, text):
            raise RuntimeError("no")

    get_logger(env={}, file=Broken()).error("hello")
    seen = []
    with open(tmp_path / "log", "w") as stream:
        logger = get_logger(env={}, file=stream)
        stream.write("before\n")
        logger.info("what the script printed comes first")
        stream.write("after\n")
        stream.write = seen.append
        get_logger(env={}, file=stream).info("who patches write sees it")
    logger.error("closed")
    lines = (tmp_path / "log").read_text().splitlines()
    assert (lines[0], lines[2], len(lines)) == ("before", "after", 3)
    assert "who patches write sees it" in seen[0]


@pytest.mark.parametrize("form", ["console", "json"])
def test_letters_that_the_stream_does_not_have(tmp_path, form):
    with open(tmp_path / "log", "w", encoding="ascii") as stream:
        get_logger(env={"EZPZ_LOG_FORMAT": form}, file=stream).info("5 µs")
    raw = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    get_logger(env={}, file=raw).info("5 µs")
    assert b"5 \\xb5s" in raw.buffer.getvalue()
    assert b" \\xb5s" in (tmp_path / "log").read_bytes() or form == "json"


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


@pytest.fixture
def make(tmp_path):
    files = []

    def make(path=tmp_path / "logs" / "rank-00000.jsonl"):
        said = []
        files.append(LogFile(path, level=20, complain=said.append))
        files[-1].said = said
        return files[-1]

    yield make
    for file in files:
        file.close()


def test_a_restarted_run_goes_on_and_a_half_written_line_is_ended(make):
    file = make()
    file.write(b'{"a":1}\n', 1.0)
    assert file.path.read_bytes() == b'{"a":1}\n', "at once"
    assert not os.get_inheritable(file._descriptor)
    again = make()
    again.write(b'{"a":2}\n', 1.0)
    assert file.path.read_bytes() == b'{"a":1}\n{"a":2}\n'
    file.path.write_bytes(b'{"a":1}\n{"a"')
    make().write(b'{"a":2}\n', 1.0)
    assert file.path.read_bytes().splitlines() == [b'{"a":1}', b'{"a"', b'{"a":2}']
    assert again.said == []


@pytest.mark.parametrize(("before", "after"), [(1.0, 3.0), (1e9, 1.0)], ids=["later", "clock back"])
def test_a_removed_folder(make, before, after):
    file = make()
    file.write(b"{}\n", before)
    file.path.unlink()
    file.path.parent.rmdir()
    file.write(b'{"a":2}\n', after)
    assert file.path.read_bytes() == b'{"a":2}\n'
    assert len(file.said) == 1
    assert "was removed" in file.said[0]


def test_no_folder_can_be_made(make, tmp_path):
    (tmp_path / "in-the-way").write_text("")
    file = make(tmp_path / "in-the-way" / "rank-00000.jsonl")
    file.open(1.0)
    for second in range(3):
        file.write(b"{}\n", 1.0 + second)
    assert len(file.said) == 1
    assert "in-the-way" in file.said[0]
    assert "the run goes on" in file.said[0]
    (tmp_path / "in-the-way").unlink()
    file.write(b"{}\n", 9.0)
    assert file.path.read_bytes() == b"{}\n"


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
