import io
import os
import pty
import subprocess
import sys
import termios
import textwrap

import pytest

from ezpz_obs import get_logger


def run(code, **given):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        check=False, timeout=60, text=True, **{"capture_output": True, **given},
    )  # fmt: skip


def test_a_reader_that_has_gone_changes_no_exit_status():
    code = """
        import sys
        from ezpz_obs import get_logger
        logger = get_logger("x")
        for _ in range(3):
            logger.warning("hello")
        print("done")
    """
    reader, writer = os.pipe()
    os.close(reader)
    done = run(code, capture_output=False, stdout=subprocess.PIPE, stderr=writer)
    os.close(writer)
    assert (done.returncode, done.stdout) == (0, "done\n")


def test_a_full_disk_behind_standard_error():
    with open("/dev/full", "w") as full:
        done = run(
            "from ezpz_obs import get_logger; get_logger('x').error('hello'); print('done')",
            capture_output=False, stdout=subprocess.PIPE, stderr=full,
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "done\n")


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
    torn, line, told = rest.splitlines()  # what was torn is ended first
    assert torn == ""
    assert "there is room" in line
    assert "log lines before this one were lost: Resource temporarily unavailable" in told


def test_a_closed_stream(tmp_path):
    with open(tmp_path / "log", "w") as stream:
        logger = get_logger(env={}, file=stream)
    logger.error("hello")


def test_a_stream_that_raises():
    class Broken(io.StringIO):
        def write(self, text):
            raise RuntimeError("no")

    get_logger(env={}, file=Broken()).error("hello")


def test_what_the_script_prints_comes_first(tmp_path):
    with open(tmp_path / "log", "w") as stream:
        stream.write("before\n")
        get_logger(env={}, file=stream).info("between")
        stream.write("after\n")
    lines = (tmp_path / "log").read_text().splitlines()
    assert (lines[0], lines[2]) == ("before", "after")


@pytest.mark.parametrize("form", ["console", "json"])
def test_letters_that_the_stream_does_not_have(tmp_path, form):
    with open(tmp_path / "log", "w", encoding="ascii") as stream:
        get_logger(env={"EZPZ_LOG_FORMAT": form}, file=stream).info("5 µs")
    raw = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    get_logger(env={}, file=raw).info("5 µs")
    assert b"5 \\xb5s" in raw.buffer.getvalue()
    assert b" \\xb5s" in (tmp_path / "log").read_bytes() or form == "json"


def test_who_patches_write_sees_the_lines(tmp_path):
    seen = []
    with open(tmp_path / "log", "w") as stream:
        stream.write = seen.append
        get_logger(env={}, file=stream).info("hello")
    assert "hello" in seen[0]


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
    seen = b""
    try:
        while block := os.read(terminal, 4096):
            seen += block
    except OSError:  # the other end is closed
        pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return seen.decode()


HELLO = "from ezpz_obs import get_logger; get_logger('x').info('hello')"


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
