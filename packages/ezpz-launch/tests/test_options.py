"""The options, as the command takes them."""

import json
import sys

import pytest


def test_the_explanation_for_programs(launch):
    done = launch("--dry-run", "--json", "-n", "3", "--env", "A=b c", "echo", "x")
    said = json.loads(done.stdout)
    assert (said["nproc"], said["ranks_per_host"]) == (3, [3])
    assert said["environment"]["A"] == "b c"
    assert said["sources"]["A"] == "--env"
    assert said["argv"][-2:] == ["echo", "x"]
    assert said["hostfile"] is None


def test_another_machine_from_here(launch):
    done = launch(
        "--dry-run", "--json", "--machine", "frontier", "-N", "3", "-n", "17", "--ppn", "8", "true"
    )
    said = json.loads(done.stdout)
    assert (said["machine"], said["launcher"]["kind"]) == ("frontier", "srun")
    assert said["ranks_per_host"] == [8, 8, 1]
    assert said["hostfile"]["lines"].count("node0002") == 8


def test_a_variable_for_every_rank(launch):
    done = launch("-n", "2", "--env", "A=b c", "--env", "B=$(exit 3)", "sh", "-c", 'echo "$A|$B"')
    assert done.stdout == "b c|$(exit 3)\n" * 2


def test_a_module_and_code(launch):
    assert launch("-n", "1", "-c", "print('x')", "-n", "5").stdout == "x\n"
    done = launch("-n", "1", "-m", "this_module_is_not_there")
    assert done.returncode == 1
    assert "No module named this_module_is_not_there" in done.stderr
    assert sys.executable in launch("--dry-run", "-n", "1", "-m", "train").stdout


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--ppn", "1", "-n", "3", "true"], "-n 3 with --ppn 1 on 1 hosts"),
        (["--ppn", "two", "true"], "--ppn two: expected a whole number"),
        (["-N", "2", "true"], "-N 2: there are 1 hosts"),
        (["--include", "nid[1-", "true"], "not closed"),
        (["--exclude", "nowhere", "true"], "--exclude nowhere: none of the hosts"),
        (["--hostfile", "/nonexistent", "true"], "/nonexistent"),
        (["--launcher", "slurm", "true"], "--launcher slurm: expected one of auto"),
        (["--machine", "atlantis", "true"], "EZPZ_MACHINE='atlantis'; expected one of aurora"),
        (["--env", "1A=b", "true"], "--env '1A=b': expected NAME=VALUE"),
        (["--cpu-bind", "near", "true"], "--cpu-bind near: expected none"),
        (["--json", "true"], "--json: expected --dry-run beside it"),
        (["--launcher-args", "--x 'y", "true"], "--launcher-args"),
    ],
)
def test_what_makes_no_sense_is_one_line(launch, words, what):
    done = launch(*words)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert what in line


def test_a_launcher_that_is_not_here(launch, tmp_path):
    done = launch("--launcher", "srun", sys.executable, env={"PATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (127, "")
    assert "no srun on PATH" in done.stderr


def test_words_for_the_launcher_itself(launch):
    done = launch("--dry-run", "--json", "--launcher-args", "-l --pmi-port 'a b'", "true")
    argv = json.loads(done.stdout)["argv"]
    assert argv[argv.index("-l") :][:3] == ["-l", "--pmi-port", "a b"]


def test_hosts_elsewhere_are_refused_not_forgotten(launch, tmp_path):
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    done = launch("--hostfile", str(tmp_path / "hosts"), "true")
    assert done.returncode == 2
    assert "2 hosts (argument) by hydra" in done.stderr
    planned = launch("--dry-run", "--json", "--hostfile", str(tmp_path / "hosts"), "true")
    assert json.loads(planned.stdout)["ranks_per_host"] == [2, 2]
