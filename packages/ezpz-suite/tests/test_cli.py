"""The command ``ezpz``: which command is meant, its words verbatim, and nothing else loaded."""

import contextlib
import json
import os
import subprocess
import sys

import pytest

import ezpz
from ezpz._cli import COMMANDS, HELP, main


def ezpz_process(*words, stdout=subprocess.PIPE, **options):
    return subprocess.run(
        [sys.executable, "-m", "ezpz", *words], stdout=stdout, stderr=subprocess.PIPE, text=True,
        check=False, **options,
    )  # fmt: skip


def modules_of(code):
    """Which modules are loaded once ``code`` has run."""
    script = f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stderr))


def test_help_loads_nothing_that_is_slow():
    loaded = modules_of("from ezpz._cli import main; main(['--help'])")
    ours = {name for name in loaded if name.startswith("ezpz")}
    own = {f"ezpz.{name}" for name in ("_cli", "_streams", "_version")}
    assert ours == {"ezpz", *own, "ezpz_topo", "ezpz_topo._version"}
    assert not {"torch", "numpy", "fire", "importlib.metadata", "dataclasses"} & loaded


@pytest.mark.parametrize(
    ("command", "never"),
    [
        ("test", {"fire", "ezpz_launch"}),
        ("launch", {"fire", "ezpz_obs", "ezpz_dist"}),
        ("topo", {"ezpz_launch", "ezpz_obs", "ezpz_dist"}),
        ("report", {"ezpz_launch", "ezpz_dist", "matplotlib"}),
        ("doctor", set()),
    ],
)
def test_a_command_loads_what_it_needs(command, never):
    loaded = modules_of(f"from ezpz._cli import main; main([{command!r}, '--help'])")
    assert not (never | {"torch", "numpy"}) & loaded


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_page_with_examples_that_fits_a_terminal(name, capfd):
    # Those of the packages are what their own scripts print.
    with contextlib.suppress(SystemExit):
        assert main([name, "--help"]) == 0
    page = capfd.readouterr().out
    assert name in page
    assert "usage: " in page
    assert "examples:" in page
    assert max(map(len, page.splitlines())) <= 80


def test_words_reach_the_command_to_the_last_byte_and_its_exit_status_comes_back(
    clean_env, tmp_path
):
    words = ["--x", "1e-4", "", "a b", "--", "-n", "--help", "'q'", "ü"]
    show = "import sys, json; print(json.dumps(sys.argv[1:])); sys.exit(75)"
    env = {**clean_env, "EZPZ_STATE_DIR": str(tmp_path)}
    launch = ["launch", "--launcher", "spawn", "-n", "1"]
    done = ezpz_process(*launch, sys.executable, "-c", show, *words, env=env)
    assert (json.loads(done.stdout), done.returncode) == (words, 75), done.stderr
    history = ezpz_process("launches", "--json", env=env)
    assert [launched["exit_status"] for launched in json.loads(history.stdout)] == [75]
    missing = ezpz_process("plot", str(tmp_path / "none"), env=env)
    assert missing.returncode == 1
    assert missing.stderr.startswith("ezpz-obs: ")
    assert ezpz_process("topo", "expand", "n[1-", env=env).returncode == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lanch"], "unknown command 'lanch'; did you mean 'launch'? See ezpz --help"),
        (["python", "train.py"], "a script of yours is started by ezpz launch"),
        (["--zzz"], "unknown command '--zzz'; expected one of launch, test, stage"),
    ],
)
def test_a_command_that_is_none(words, said, capfd):
    assert main(words) == 2
    out, err = capfd.readouterr()
    assert (out, err[:6]) == ("", "ezpz: ")
    assert said in err


def test_pages(capfd):
    assert main([]) == 2, "nothing was asked for, and nothing was done"
    assert capfd.readouterr().out == HELP + "\n"
    listed = {line.split()[0] for line in HELP.splitlines() if line.startswith("  ")}
    assert listed >= set(COMMANDS)
    assert main(["help", "topo"]) == 0
    first = capfd.readouterr().out
    assert main(["topo", "--help"]) == 0
    assert capfd.readouterr().out == first
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"{ezpz.__version__}\n"


@pytest.mark.parametrize("closed", ["| head -0", ">&-"])
def test_a_page_that_nobody_reads(closed):
    script = f'"$@" {closed}'
    done = subprocess.run(
        ["sh", "-c", script, "sh", sys.executable, "-m", "ezpz", "--help"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
@pytest.mark.parametrize(
    ("words", "whose", "status"),
    [(["--help"], "ezpz", 1), (["doctor", "--list"], "ezpz doctor", 2)],
)
def test_a_page_that_cannot_be_written(words, whose, status):
    with open("/dev/full", "w") as full:
        done = ezpz_process(*words, stdout=full)
    assert done.returncode == status
    assert done.stderr == f"{whose}: standard output: No space left on device\n"
