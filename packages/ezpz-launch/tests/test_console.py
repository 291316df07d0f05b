"""The console script as a process: its exit status, and streams that are closed, full or unread."""

import subprocess
import sys

import pytest

from ezpz_launch import __version__
from ezpz_launch._cli import _is_a_node

OURS = [sys.executable, "-m", "ezpz_launch"]
SPAWN = [*OURS, "--launcher", "spawn"]


@pytest.fixture
def shell(clean_env):
    """Run a line of sh, in which "$@" is ezpz-launch with these words."""

    def run(script, *words):
        return subprocess.run(
            ["sh", "-c", script, "sh", *words],
            env=clean_env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--version"], 0),
        (["--help"], 0),
        (["--frobnicate"], 2),
        (["no-such-program"], 127),
        (["/"], 127),
        (["/etc/passwd"], 126),
        (["-n", "2", "true"], 0),
        (["-n", "2", "false"], 1),
        (["-n", "1", "sh", "-c", "exit 75"], 75),
        (["-n", "1", "sh", "-c", "exit 255"], 255),
        (["-n", "1", "sh", "-c", "kill -9 $$"], 137),
    ],
)
def test_exit_statuses(shell, words, status):
    assert shell('"$@"', *SPAWN, *words).returncode == status


def test_a_launch_loads_little(shell):
    command = [sys.executable, "-X", "importtime", "-m", "ezpz_launch", "--launcher", "spawn"]
    done = shell('"$@"', *command, "-n", "1", "true")
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0
    assert "ezpz_launch._record" in loaded
    heavy = {"tomllib", "socket", "shutil", "pathlib", "datetime", "logging"}
    # on a node of a scheduler, such as beside the tests of Slurm, it is asked for a job
    assert not loaded & (heavy - {"datetime"} if _is_a_node() else heavy)


def test_the_script_and_the_module_are_the_same(shell):
    script = shell('ezpz-launch "$@"', "--version")
    module = shell('"$@"', *OURS, "--version")
    assert (script.returncode, script.stdout, script.stderr) == (0, f"{__version__}\n", "")
    assert (module.returncode, module.stdout, module.stderr) == (0, f"{__version__}\n", "")


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["--dry-run", "-n", "2", "true"]])
def test_a_page_that_nobody_reads(shell, words):
    # the reader is gone before a word is written
    done = shell('{ sleep 0.3; "$@"; echo $? >&2; } | true', *SPAWN, *words)
    assert (done.stdout, done.stderr) == ("", "0\n")


def test_a_page_of_which_one_line_is_read(shell):
    done = shell('"$@" | head -n 1', *OURS, "--help")
    assert done.stdout.startswith("usage: ezpz-launch ")
    assert (done.stdout.count("\n"), done.stderr) == (1, "")


PAGES = [["--version"], ["--help"], ["--dry-run", "-n", "2", "true"], ["history"]]


@pytest.mark.parametrize("words", PAGES)
def test_a_page_for_a_closed_stream(shell, words):
    done = shell('"$@" >&-', *SPAWN[: 3 if words == ["history"] else None], *words)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", PAGES)
def test_a_page_that_does_not_fit_the_disk_is_one_line_of_error(shell, words):
    done = shell('"$@" >/dev/full', *SPAWN[: 3 if words == ["history"] else None], *words)
    assert done.returncode != 0
    assert done.stderr.startswith("ezpz-launch: ")
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_error_that_nobody_can_read(shell):
    for stderr in ("&-", "/dev/full"):
        done = shell(f'"$@" 2>{stderr}', *SPAWN, "--frobnicate")
        assert done.returncode == 2, stderr


def test_an_error_is_no_output(shell):
    # of a closed standard error Python's own print makes standard output
    assert shell('"$@" 2>&-', *SPAWN, "--frobnicate").stdout == ""


@pytest.mark.parametrize("status", [0, 7])
@pytest.mark.parametrize("streams", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_a_launch_with_closed_streams(shell, tmp_path, streams, status):
    script = f"echo hello; echo bad >&2; touch {tmp_path}/$RANK; exit {status}"
    done = shell(f'"$@" {streams}', *SPAWN, "-n", "2", "sh", "-c", script)
    assert done.returncode == status
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    # nothing lands where it does not belong
    assert done.stdout == ("" if ">&-" in streams.replace("2>&-", "") else "hello\n" * 2)
    assert done.stderr.count("bad\n") == (0 if "2>&-" in streams else 2)
    assert "Traceback" not in done.stderr
