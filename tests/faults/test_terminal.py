"""In a terminal, tmux's: colours, rank 0's bar, which nothing tears, and Ctrl-C of one line."""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.faults.launches import Place

BARS = """
import os, sys, time
from pathlib import Path
from tqdm import tqdm
import ezpz_obs
rank = os.environ["RANK"]
told = {name: os.environ.get(name) for name in ("COLUMNS", "FORCE_COLOR", "TERM", "EZPZ_TERMINAL")}
print(f"rank {rank} is told {told}", flush=True)
ezpz_obs.get_logger("train").info("only rank 0 speaks")
bar = tqdm(total=41, desc=f"bar of rank {rank}", ascii=True)
for step in range(41):
    if step % 10 == 5:
        print(f"step {step} of rank {rank}", flush=True)
    while step == 20 and not Path("seen").exists():
        time.sleep(0.1)
        bar.refresh()
    bar.update()
bar.close()
"""
# A module that is imported for long, as torch is.
SLOW = """
import os, signal, sys, time
if sys.argv[1:]:
    signal.signal(signal.SIGINT, lambda *_: print("stays", flush=True))
print("ready, colours:", os.environ.get("FORCE_COLOR"), flush=True)
time.sleep(600)
"""


@dataclass
class Window:
    """A window of tmux, of 120 columns, in which ezpz-launch starts a program on three ranks."""

    tmux: Sequence[str]
    place: Place
    folder: Path

    def start(self, program, *words, env=()):
        # COLUMNS and LINES would be taken for the window's.
        env = ["-u", "COLUMNS", "-u", "LINES", *env, f"EZPZ_STATE_DIR={self.folder}"]
        # The sandbox's hosts have names that nobody can look up, which a line would say.
        options = [*self.place.options, "--env", "MASTER_ADDR=127.0.0.1"]
        command = [sys.executable, "-m", "ezpz_launch", "--launcher", self.place.launcher, *options]
        words = [sys.executable, "-c", program, *words]
        line = shlex.join(["env", *env, f"TMPDIR={self.folder}", *command, *words])
        self.ask(
            "start-server", ";", "set", "-g", "default-terminal", "screen-256color", ";",
            "new-session", "-dx120", "-y60", f'trap : INT; {line}; printf "\nstatus $?\n"; cat',
        )  # fmt: skip

    def ask(self, *words):
        env = {**self.place.environment, "SHELL": "/bin/sh"}
        words = [*self.tmux, *words]
        return subprocess.check_output(words, cwd=self.folder, env=env, text=True)

    def until(self, *texts):
        """Return the window's lines when these are there; the tests' own limit is the bound."""
        while True:
            shown = self.ask("capture-pane", "-p")
            if all(re.search(text, shown) for text in texts):
                return [line.rstrip() for line in shown.splitlines() if line.strip()]
            assert "\nstatus " not in shown, shown
            time.sleep(0.1)


@pytest.fixture
def window(tool, place, tmp_path):
    # The name of a socket has a hundred letters at most: it lies in the current folder.
    window = Window([tool("tmux"), "-uf", "/dev/null", "-S", "socket"], place, tmp_path)
    yield window
    window.ask("kill-server")


@pytest.mark.under("hydra", "openmpi", "srun")
def test_colours_width_and_the_bar_of_rank_0(window, place, tmp_path):
    window.start(BARS)
    # Below all else, and as wide as the window. Open MPI hands whole lines on: there it comes last.
    bar = r"\nbar of rank 0:  49%\|#{30}[^\n]{30,}\| 20/41 \[[^\n]*\]\n*$"
    bars = [] if place.launcher == "openmpi" else [bar]
    window.until(*(f"step 15 of rank {rank}" for rank in range(3)), *bars)
    (tmp_path / "seen").touch()
    *lines, status = window.until(r"\nstatus \d+\n")
    assert status == "status 0", lines
    where = r"3 hosts" if place.launcher == "srun" else os.uname().nodename
    assert re.fullmatch(rf"ezpz-launch: 3 ranks on {where} by .*{place.launcher}\)?", lines[0])
    assert re.fullmatch(r"ezpz-launch: ok in 0:\d\d", lines[-1])
    told = {"COLUMNS": "120", "FORCE_COLOR": "1", "TERM": "screen-256color", "EZPZ_TERMINAL": "1"}
    steps = [f"step {step} of rank {rank}" for rank in range(3) for step in range(5, 41, 10)]
    bars = [f"bar of rank {rank}: 100%" for rank in range(3)]
    said = [f"rank {rank} is told {told}" for rank in range(3)]
    rest = r"\|#{60,}\| 41/41 \[.*\]|.*(?=only )|(?<=speaks).*"
    drawn = sorted(re.sub(rest, "", line) for line in lines[1:-1])
    assert drawn == sorted([*said, "only rank 0 speaks", *steps, *bars])
    assert re.search(r"\x1b\[\d+monly rank 0 speaks", window.ask("capture-pane", "-e", "-p"))


@pytest.mark.under("hydra", "openmpi", "srun", "spawn")
@pytest.mark.parametrize("stays", [False, True])
def test_ctrl_c_is_one_line_and_a_second_one_kills(window, tmp_path, stays):
    (tmp_path / "slow.py").write_text(SLOW)
    window.start("import slow", *["stays"] * stays, env=["NO_COLOR=1"])
    window.until("(?s)(ready, colours: None.*){3}")
    window.ask("send-keys", "C-c")
    if stays:
        window.until("Ctrl-C: ", "(?s)(stays.*){3}")
        window.ask("send-keys", "C-c")
    *lines, status = window.until(r"\nstatus \d+\n")
    assert status == "status 130"
    said = [line.removeprefix("^C") for line in lines if "ezpz-launch: " in line]
    assert said[1:] == ["ezpz-launch: Ctrl-C: the ranks have 7 s to end; a second one kills"]
    assert not [line for line in lines if "Traceback" in line or "KeyboardInterrupt" in line]
