"""One launch by ezpz-launch: its ranks, its end, and what it left."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.conftest import load
from waiting import PATIENCE

PROGRAMS = Path(__file__).resolve().parent / "programs"

SLACK = 60.0
"""Seconds beyond what is promised, on machines that are small and busy; what would end a launch
later, such as a grace that is not cut short, takes minutes."""

MARK = "EZPZ_FAULTS_LAUNCH"
"""A variable in the environment of each launch: what has it belongs to the launch."""


@dataclass(frozen=True)
class Place:
    """Where a launch is started, and by which launcher."""

    launcher: str  # the word after --launcher
    environment: Mapping[str, str]  # of the launch, complete
    hosts: Sequence[str]  # of each rank
    options: Sequence[str] = ()  # more of ezpz-launch
    enter: Sequence[str] = ()  # words before ezpz-launch, which they must become by exec
    leftovers: Callable[[], str] = lambda: ""  # what beside processes is left


@dataclass
class Launch:
    """A running launch; at the end of the ``with`` nothing of it is left."""

    place: Place
    folder: Path  # for all of its files
    options: Sequence[str]  # of ezpz-launch
    command: Sequence[str]  # of every rank
    environment: Mapping[str, str] = field(default_factory=dict)  # to add
    bare: Sequence[str] = ()  # what starts the command in ezpz-launch's stead

    def __enter__(self):
        self.said = self.folder / "said"
        self.temporary = self.folder / "tmp"
        for folder in (self.said, self.temporary):
            folder.mkdir()
        # The folder is this test's alone.
        self.mark = f"{MARK}={self.folder}"
        words = [sys.executable, "-m", "ezpz_launch"]
        words += ["--launcher", self.place.launcher, *self.place.options, *self.options]
        words = [*self.place.enter, *(self.bare or words)]
        with (self.folder / "out").open("wb") as out, (self.folder / "err").open("wb") as err:
            state = str(self.folder / "state")
            own = {MARK: str(self.folder), "TMPDIR": str(self.temporary), "EZPZ_STATE_DIR": state}
            self.process = subprocess.Popen(
                [*words, *self.command],
                env={**self.place.environment, **own, **self.environment},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                # Files: a pipe would be held open by what is left, and would hide it.
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        end = time.monotonic() + 120
        # Slurm sees the end of a step a moment later; until then the next finds no room.
        while (left := self.left()) or self.place.leftovers():
            assert time.monotonic() < end, f"{left} survive SIGKILL; {self.place.leftovers()}"
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)

    @property
    def stdout(self):
        return (self.folder / "out").read_bytes()

    @property
    def stderr(self):
        return (self.folder / "err").read_text(encoding="utf-8", errors="replace")

    def ranks(self):
        """Wait until every rank has started, and return what they say of themselves."""
        count = len(self.place.hosts)
        files = [self.said / f"{rank}.started" for rank in range(count)]

        def are_there():
            # Asked first: who has ended has written nothing since.
            ended = self.process.poll() is not None
            found = all(file.exists() for file in files)
            assert found or not ended, f"it ended before {count} ranks had started\n{self._state()}"
            return found

        self.until(are_there, f"{count} ranks start")
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]

    def heard(self, rank):
        """Return the names of the signals that a rank has heard, in their order."""
        file = self.said / f"{rank}.signals"
        return file.read_text(encoding="ascii").split() if file.exists() else []

    def all_hear(self, *names):
        """Wait until every rank has heard as many signals; it has to be these, each once."""
        every = range(len(self.place.hosts))
        are_there = lambda: all(len(self.heard(rank)) >= len(names) for rank in every)  # noqa: E731
        self.until(are_there, f"every rank hears {names}")
        assert [self.heard(rank) for rank in every] == [list(names)] * len(every)

    def done(self):
        """Return the ranks that came to the end of their work."""
        return sorted(int(file.stem) for file in self.said.glob("*.done"))

    def ends(self, within):
        """Wait for the end of ezpz-launch, so long beside the slack; return its exit status."""
        try:
            return self.process.wait(within + SLACK)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {within} + {SLACK} s\n{self._state()}") from None

    def ends_with(self, status, *, within, done=None, files=False):
        """Assert how ezpz-launch ends, and by whom of the ranks work was done; nothing is left."""
        assert self.ends(within) == status, self.stderr[-4000:]
        assert done is None or self.done() == list(done), self.stderr
        self.leaves_nothing(files=files)

    def until(self, is_so, what, seconds=PATIENCE, *, every=0.03):
        end = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < end, f"waited {seconds} s until {what}\n{self._state()}"
            time.sleep(every)

    def left(self):
        """Return the processes of this launch that are there."""
        return load("slurm.sandbox").processes_with(self.mark)

    def leaves_nothing(self, within=2.0, *, files=False):
        """Assert that no process is left, on no host, nor (but for ``files``) a file in TMPDIR."""
        # Every process of the machine is looked at, and Slurm is asked: not fifty times a second.
        self.until(lambda: not self.left(), "no process is left", within + SLACK, every=0.1)
        leftovers = self.place.leftovers
        self.until(lambda: not leftovers(), "nothing is left", within + SLACK, every=0.3)
        if not files:
            empty = lambda: not list(self.temporary.iterdir())  # noqa: E731
            self.until(empty, "no file is left", within + SLACK)

    def find(self, word):
        """Return the processes of this launch that have a word that ends so."""
        return [pid for pid in self.left() if any(each.endswith(word) for each in words_of(pid))]

    def rank_main(self, rank):
        """Return the process that runs a rank's command: the nearest rank_main.py above it."""
        found, pid = self.find("rank_main.py"), int(self.ranks()[rank]["pid"])
        while pid not in found:
            pid = parent_of(pid)
            assert pid > 1, f"rank {rank} has no rank_main.py above it\n{self._state()}"
        return pid

    def launcher(self):
        """Return the process that ezpz-launch started to start the ranks."""
        children = [pid for pid in self.left() if parent_of(pid) == self.process.pid]
        # A child that is still ezpz-launch itself is not the one.
        (pid,) = (pid for pid in children if words_of(pid)[1:3] != ["-m", "ezpz_launch"])
        return pid

    def _state(self):
        lines = [f"status {self.process.poll()}", f"--- stderr\n{self.stderr[-4000:]}"]
        lines += [f"--- processes of the launch {self.place.leftovers()}"]
        lines += [f"{pid} of {parent_of(pid)}: {shlex.join(words_of(pid))}" for pid in self.left()]
        return "\n".join(lines)


@pytest.fixture
def launch(place, tmp_path):
    """Start ezpz-launch with these options and words; at the end nothing is left of it."""
    with contextlib.ExitStack() as stack:

        def start(options, command, **more):
            return stack.enter_context(Launch(place, tmp_path, options, command, **more))

        yield start


@pytest.fixture
def running(launch):
    """As launch, when every rank has started."""

    def start(options, command, **more):
        started = launch(options, command, **more)
        started.ranks()
        return started

    return start


MEET_HERE = ["--env", "MASTER_ADDR=127.0.0.1"]
"""The names of Slurm's nodes are no host's here, and a line says so."""


def rank_program(behaviour, *arguments):
    """Return the words of a rank that does this; it writes to ``said`` in its folder."""
    return [sys.executable, str(PROGRAMS / "rank.py"), "said", behaviour, *arguments]


def words_of(pid):
    """Return the command line of a process; nothing where it is gone."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/cmdline").read_bytes()
        return text.decode(errors="replace").split("\0")[:-1]
    return []


def parent_of(pid):
    """Return the process that started another, 0 where that is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return 0


@contextlib.contextmanager
def allocation(slurm, folder, *options):
    """A job as the shell of salloc sees it: its environment."""
    draft, told = folder / "draft", folder / "environment"
    script = f"env -0 >{draft} && mv {draft} {told} && exec cat"
    with subprocess.Popen(
        ["salloc", "-Q", *options, "sh", "-c", script],
        env=slurm.environment, cwd=folder, stdin=subprocess.PIPE, start_new_session=True,
    ) as job:  # fmt: skip
        # Slurm answers in a second; where it does not, the job's shell never starts.
        while not told.exists():
            assert job.poll() is None, "salloc has ended"
            time.sleep(0.05)
        pairs = (pair.partition("=") for pair in told.read_text().split("\0") if pair)
        yield {name: value for name, _, value in pairs}
