"""The shim, run by a real sh with the variables that real launchers set."""

import subprocess

import pytest

from ezpz_launch.launchers.shim import SHIM

NAMES = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


def shim(*command, env=None, form="--", nproc=4, ppn=4, names=NAMES, family="pmi"):
    env = {"PATH": "/usr/bin:/bin", **HYDRA, **(env or {})}
    words = ["sh", SHIM, family, str(nproc), str(ppn), *names, form, *command]
    return subprocess.run(words, env=env, capture_output=True, check=False)


def variables(**extra):
    out = shim("env", "-0", env=extra).stdout.split(b"\0")
    return dict(pair.decode().split("=", 1) for pair in out if pair)


def test_torchruns_variables_and_the_stamp():
    seen = variables()
    expected = {
        "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
        "NODE_RANK": "0", "GROUP_RANK": "0",
    }  # fmt: skip
    assert seen.items() >= expected.items()
    assert (seen["EZPZ_RANK"], seen["EZPZ_WORLD_SIZE"], seen["EZPZ_LAUNCHER"]) == ("1", "4", "pmi")


def test_what_leaked_is_overridden():
    seen = variables(RANK="0", WORLD_SIZE="1", TORCHELASTIC_RUN_ID="x", EZPZ_RANK="9")
    assert (seen["RANK"], seen["WORLD_SIZE"], seen["EZPZ_RANK"]) == ("1", "4", "1")
    assert "TORCHELASTIC_RUN_ID" not in seen


def test_our_own_variables_stay_ours():
    assert not any(name.startswith("ezpz_") for name in variables(EZPZ_STATUS_FILE="/dev/null"))
    assert "EZPZ_STATUS_FILE" not in variables(EZPZ_STATUS_FILE="/dev/null")


@pytest.mark.parametrize("form", ["--", "--escaped"])
def test_words_are_untouched(form):
    words = [
        "a b",
        "",
        "$(exit 3)",
        "it's",
        '"',
        "new\nline",
        "back\\slash",
        "*",
        ":",
        "+",
        "-n",
        "é",
    ]
    sent = words if form == "--" else [f"+{word}" for word in words]
    command = ["printf", "%s\\0"] if form == "--" else ["+printf", "+%s\\0"]
    out = shim(*command, *sent, form=form).stdout
    assert out.decode().split("\0")[:-1] == words


@pytest.mark.parametrize("status", [0, 1, 7, 75, 255])
def test_the_commands_own_exit_status(status):
    assert shim("sh", "-c", f"exit {status}").returncode == status


def test_a_signal_is_128_more():
    assert shim("sh", "-c", "kill -9 $$").returncode == 137


def test_reports(tmp_path):
    path = tmp_path / "status"
    path.touch()
    shim("sh", "-c", "exit 3", env={"EZPZ_STATUS_FILE": str(path)})
    start, end = path.read_text().splitlines()
    assert start.split()[:2] == ["start", "1"]
    assert end == "end 1 3"


def test_a_report_that_cannot_be_written_harms_nobody(tmp_path):
    done = shim("true", env={"EZPZ_STATUS_FILE": str(tmp_path / "absent" / "status")})
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_launcher_that_sets_nothing():
    done = shim("true", env={"MPI_LOCALRANKID": ""})
    assert done.returncode == 2
    assert b"pmi set no MPI_LOCALRANKID" in done.stderr


@pytest.mark.parametrize(
    ("rank", "local", "node", "ranks_here"),
    [(0, 0, 0, 4), (3, 3, 0, 4), (4, 0, 1, 4), (9, 1, 2, 2)],
)
def test_several_hosts_the_last_one_smaller(rank, local, node, ranks_here):
    env = {"PMI_RANK": str(rank), "PMI_SIZE": "10", "MPI_LOCALRANKID": str(local)}
    out = shim("env", "-0", env=env, nproc=10).stdout.split(b"\0")
    seen = dict(pair.decode().split("=", 1) for pair in out if pair)
    assert (seen["NODE_RANK"], seen["GROUP_RANK"]) == (str(node), str(node))
    assert (seen["LOCAL_WORLD_SIZE"], seen["EZPZ_NUM_NODES"]) == (str(ranks_here), "3")


def test_pals_with_pmix_tells_no_size_and_the_plan_does():
    env = {"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1"}
    names = ("PALS_RANKID", "-", "PALS_LOCAL_RANKID")
    out = shim("sh", "-c", "echo $RANK $WORLD_SIZE $EZPZ_LAUNCHER", env=env, names=names,
               nproc=8, family="pals").stdout  # fmt: skip
    assert out == b"5 8 pals\n"


@pytest.mark.parametrize(
    ("env", "nproc"),
    [
        ({"PMI_SIZE": "8"}, 4),
        ({"MPI_LOCALRANKID": "0"}, 4),
        ({}, 8),
        ({"PMI_RANK": "5"}, 4),
        ({"MPI_LOCALRANKID": "x"}, 4),
        ({"PMI_RANK": "abc"}, 4),
        ({"PMI_RANK": "-1"}, 4),
    ],
)
def test_a_launcher_that_places_ranks_elsewhere_than_planned(env, nproc):
    done = shim("true", env=env, nproc=nproc)
    assert done.returncode == 2
    assert b"contradicts the plan" in done.stderr
