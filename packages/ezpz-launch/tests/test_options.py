"""The options, as the command takes them."""

import json
import subprocess
import sys

import pytest

from ezpz_launch import LaunchError, Request, _options
from ezpz_launch._options import split


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
        (["--tee", "true"], "--tee: expected --log-dir DIR beside it"),
        (["--grace", "-5", "true"], "--grace '-5': expected a time of 0 or more"),
        (["--option", "fast", "true"], "--option fast: workstation has no such option"),
        (["-n", "2", "--only-ranks", "0,2", "true"], "--only-ranks 2: there are 2 ranks (-n)"),
        (["-np", "2", "true"], "unknown option '-np'; did you mean -n?"),
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


def test_slots_of_a_hostfile_are_planned(launch, tmp_path):
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    planned = launch("--dry-run", "--json", "--hostfile", str(tmp_path / "hosts"), "true")
    assert json.loads(planned.stdout)["ranks_per_host"] == [2, 2]


def test_what_is_asked_of_a_running_launch_is_explained(launch):
    asked = ["--log-dir", "/logs", "--tee", "--only-ranks", "0,2-3", "--grace", "1m", "--retries=2"]
    done = launch("--dry-run", "-n", "4", *asked, "true")
    assert done.returncode == 0
    for row in (
        "output /logs, there and here (--log-dir, --tee)",
        "output shown of ranks 0,2-3 (--only-ranks)",
        "SIGTERM to SIGKILL 60 s (--grace)",
        "retries up to 2 (--retries)",
    ):
        assert row in " ".join(done.stdout.split())
    plain = launch("--dry-run", "-n", "4", "true").stdout
    assert not any(word in plain for word in ("--log-dir", "--grace", "--retries", "--nested"))
    told = json.loads(launch("--dry-run", "--json", *asked, "-n", "4", "true").stdout)
    assert told["settings"]["SIGTERM to SIGKILL"] == "60 s"


ALL = [
    "-n", "4", "--ppn=2", "-N2", "--hostfile", "h", "--include", "a[1-2]", "--exclude", "0007",
    "--launcher", "spawn", "--machine", "polaris", "--option", "depth", "--option", "nccl-ofi",
    "--cpu-bind", "0-3", "--env", "A=1", "--env", "B=[1]", "--one-device", "--log-dir", "1e3",
    "--tee", "--only-ranks", "2,0-1", "--prefix", "--idle-timeout", "10m", "--grace", "2.5",
    "--signal-before", "1h", "--retries", "3", "--nested", "--launcher-args", "-a 'b c'",
    "--dry-run", "--json", "true",
]  # fmt: skip


def test_every_option_reaches_the_request():
    assert _options.request_of(*split(ALL)) == Request(
        command=("true",),
        nproc=4,
        ppn=2,
        nodes=2,
        hostfile="h",
        include="a[1-2]",
        exclude="0007",
        launcher="spawn",
        machine="polaris",
        options=("depth", "nccl-ofi"),
        cpu_bind="0-3",
        env=("A=1", "B=[1]"),
        one_device=True,
        log_dir="1e3",
        tee=True,
        only_ranks=(0, 1, 2),
        prefix=True,
        idle_timeout=600.0,
        grace=2.5,
        signal_before=3600.0,
        retries=3,
        nested=True,
        launcher_args=("-a", "b c"),
        dry_run=True,
        json=True,
    )


@pytest.mark.parametrize(
    "words",
    [
        ["true"],
        ["-n", "3", "true"],
        ["-n", "007", "true"],
        ["-n", "1_0", "true"],
        ["-n", "two", "true"],
        ["--retries", "0", "true"],
        ["--retries=-1", "true"],
        ["-n", "3", "--tee", "true"],
        ["--grace", "soon", "true"],
        ["--only-ranks", "3-1", "true"],
        ALL,
    ],
)
def test_fire_makes_the_same_request_of_every_option(words):
    def outcome(build):
        try:
            return build(*split(words))
        except LaunchError as error:
            return str(error)

    assert outcome(_options.request_of) == outcome(_options._request_by_fire)


def test_common_options_do_without_fire():
    code = (
        "import sys; from ezpz_launch import _argv, _options;"
        f"_options.request_of(*_argv.split({ALL!r}));"
        "print({'fire', 'asyncio'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("90", 90), ("1.5", 1.5), ("90s", 90), ("10m", 600), ("2h", 7200), (".5m", 30)],
)
def test_times(text, seconds):
    assert _options.request_of({"idle-timeout": text}, ("true",)).idle_timeout == seconds


@pytest.mark.parametrize(
    "text", ["", "s", ".", "-1", "1e3", "nan", "inf", "1_0", "10 m", "1d", "٣"]
)
def test_what_is_no_time(text):
    with pytest.raises(LaunchError, match=r"--grace .*expected a time of 0 or more"):
        _options.request_of({"grace": text}, ("true",))
