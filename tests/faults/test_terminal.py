"""On a terminal: the ranks are told, rank 0's bar is drawn and never torn, Ctrl-C is one line."""

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios

import pytest
from tests.faults.launches import take_terminal
from waiting import all_of

BARS = """
import os, sys, time
rank = os.environ["RANK"]
told = {name: os.environ.get(name) for name in ("COLUMNS", "FORCE_COLOR", "TERM", "EZPZ_TERMINAL")}
print(f"rank {rank} is told {told}", flush=True)
for step in range(41):
    sys.stderr.write(f"\\rbar of rank {rank}: {step:2} {'#' * step}")  # as tqdm does
    sys.stderr.flush()
    if step % 10 == 5:
        print(f"step {step} of rank {rank}", flush=True)
    time.sleep(0.02)
sys.stderr.write("\\n")
"""
WAITS = """
import signal, sys, time
if sys.argv[1:]:
    signal.signal(signal.SIGINT, lambda *_: print("stays", flush=True))
print("ready", flush=True)
time.sleep(600)
"""


class Terminal:
    """A pseudo-terminal of 100 columns with ezpz-launch in its foreground."""

    def __init__(self, place, folder, program, *words, env=None):
        # The sandbox's hosts have names that nobody can look up, which a line would say.
        here = ["--env", "MASTER_ADDR=127.0.0.1"]
        options = ["--launcher", place.launcher, *place.options, *here]
        command = [sys.executable, "-m", "ezpz_launch", *options, "python", "-c", program, *words]
        self._ours, its = os.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("4H", 30, 100, 0, 0))
        own = {"EZPZ_STATE_DIR": str(folder), "TMPDIR": str(folder), "TERM": "xterm-256color"}
        self._process = subprocess.Popen(
            command, env={**place.environment, **own, **(env or {})}, cwd=folder,
            stdin=its, stdout=its, stderr=its, start_new_session=True,
            preexec_fn=take_terminal,  # noqa: PLW1509
        )  # fmt: skip
        os.close(its)
        self._seen = b""

    def press_ctrl_c(self):
        os.write(self._ours, b"\x03")

    def read_until(self, *texts):
        """Read until each of these has come so often; the tests' own limit is the bound."""
        while not all(self._seen.count(text) >= count for text, count in texts):
            self._seen += os.read(self._ours, 1 << 16)

    def end(self):
        """Return the exit status and what the terminal shows in the end, as lines."""
        self._seen += all_of(self._ours)
        return self._process.wait(), drawn(self._seen.decode())


def drawn(text):
    """Return the lines that a terminal shows which is given these bytes."""
    lines, at = [""], 0
    for part in re.split(r"(\x1b\[K|[\r\n])", text):
        if part == "\n":
            lines.append("")
        elif part == "\x1b[K":
            lines[-1] = lines[-1][:at]
        elif part != "\r":
            lines[-1] = lines[-1][:at] + part + lines[-1][at + len(part) :]
            at += len(part)
        at = 0 if part in ("\r", "\n") else at
    return [line.rstrip() for line in lines if line.strip()]


def test_colours_width_and_the_bar_of_rank_0(place, tmp_path):
    status, lines = Terminal(place, tmp_path, BARS).end()
    assert status == 0, lines
    where = r"3 hosts" if place.launcher == "srun" else os.uname().nodename
    assert re.fullmatch(rf"ezpz-launch: 3 ranks on {where} by .*{place.launcher}\)?", lines[0])
    assert re.fullmatch(r"ezpz-launch: ok in 0:\d\d", lines[-1])
    told = {"COLUMNS": "100", "FORCE_COLOR": "1", "TERM": "xterm-256color", "EZPZ_TERMINAL": "1"}
    steps = [f"step {step} of rank {rank}" for rank in range(3) for step in range(5, 41, 10)]
    bars = [f"bar of rank {rank}: 40 {'#' * 40}" for rank in range(3)]
    said = [f"rank {rank} is told {told}" for rank in range(3)]
    assert sorted(lines[1:-1]) == sorted([*said, *steps, *bars])


# Nothing of it is a launcher's.
@pytest.mark.without("openmpi", "spawn", "srun")
def test_a_user_who_wants_no_colours_gets_none(place, tmp_path):
    status, lines = Terminal(place, tmp_path, BARS, env={"NO_COLOR": "1"}).end()
    assert status == 0
    assert sum("'FORCE_COLOR': None" in line for line in lines) == 3


@pytest.mark.parametrize("stays", [False, True])
def test_ctrl_c_is_one_line_and_a_second_one_kills(place, tmp_path, stays):
    terminal = Terminal(place, tmp_path, WAITS, *["stays"] * stays)
    terminal.read_until((b"ready", 3))
    terminal.press_ctrl_c()
    if stays:
        terminal.read_until((b"Ctrl-C: ", 1), (b"stays", 3))
        terminal.press_ctrl_c()
    status, lines = terminal.end()
    assert status == 130
    said = [line.removeprefix("^C") for line in lines if "ezpz-launch: " in line]
    assert said[1:] == ["ezpz-launch: Ctrl-C: the ranks have 7 s to end; a second one kills"]
    assert not [line for line in lines if "Traceback" in line or "KeyboardInterrupt" in line]
