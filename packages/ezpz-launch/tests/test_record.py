"""Records on real disks: whole, private, bounded, without secrets, and never in the way."""

import json
import os
import re
import resource
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ezpz_launch import Request, __version__, plan
from ezpz_launch._plan.kind import Launcher
from ezpz_launch._run.record import (
    KEPT,
    NAMES,
    Keeper,
    new_id,
    read_progress,
    record_of,
    records_folder,
    to_json,
    type_of,
)
from ezpz_topo import get_hostname, imagine

TOPOLOGY = imagine("perlmutter", 2, {})
JOB = TOPOLOGY.allocation
PLAN = plan(
    TOPOLOGY, Request(("python", "train.py"), retries=2),
    Launcher("/usr/bin/srun", "srun", "srun on PATH"), hosts=JOB.hosts, hosts_source="made up",
    hostfile="/tmp/hosts", port=29500, user_env={},
)  # fmt: skip
RECORD = record_of("id", PLAN, ["srun", "sh"], JOB)


@pytest.fixture
def env(tmp_path):
    return {"EZPZ_STATE_DIR": str(tmp_path / "state")}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "state" / "launches"


def test_from_the_start_to_the_end(env, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    keeper = Keeper(env)
    keeper.start(PLAN, ["srun", "sh"], JOB)
    path = folder / f"{keeper.launch_id}.json"
    begun = json.loads(path.read_bytes())
    assert begun == {
        "id": keeper.launch_id, "command": ["python", "train.py"], "cwd": str(tmp_path),
        "machine": "perlmutter", "scheduler": JOB.scheduler, "job_id": JOB.job_id,
        "hosts": begun["hosts"], "nproc": 8, "ppn": 4, "launcher": "srun",
        "argv": ["srun", "sh"], "environment": dict(PLAN.environment), "host": get_hostname(),
        "pid": os.getpid(), "pid_start": begun["pid_start"], "start": begun["start"], "end": None,
        "exit_status": None, "first_failure": None, "attempt": 0, "retries": 2,
        "attempts": [], "version": __version__,
    }  # fmt: skip
    assert begun["hosts"]
    assert isinstance(begun["pid_start"], int) == os.path.isdir("/proc/self")
    keeper.start(PLAN, ["srun", "again"], JOB)
    again = {**begun, "attempt": 1, "argv": ["srun", "again"]}
    assert json.loads(path.read_bytes()) == again
    keeper.finish(137, (3, "nid001", 137))
    after = json.loads(path.read_bytes())
    how = "was killed by SIGKILL (exit status 137)"
    failure = {"rank": 3, "host": "nid001", "status": 137, "how": how}
    ended = {"end": after["end"], "exit_status": 137, "first_failure": failure}
    assert after == {**again, **ended}
    for moment in (after["start"], after["end"]):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", moment)
        assert abs((datetime.fromisoformat(moment) - datetime.now(UTC)).total_seconds()) < 600
    assert (os.listdir(folder), capsys.readouterr().err) == ([path.name], "")


def test_only_this_user_can_read_it_also_where_the_directory_is_gone(env, folder, monkeypatch):
    (gone := folder.parents[1] / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    previous = os.umask(0)
    try:
        Keeper(env).start(PLAN, [], JOB)
    finally:
        os.umask(previous)
    (path,) = folder.iterdir()
    modes = [one.stat().st_mode & 0o777 for one in (folder.parent, folder, path)]
    assert (modes, json.loads(path.read_bytes())["cwd"]) == ([0o700, 0o700, 0o600], "")


def test_no_secret_is_ever_written():
    secrets = RECORD._replace(
        command=("python", "train.py", "--api-key", "s3cr3t-1", "HF_TOKEN=s3cr3t-2"),
        argv=(
            *("srun", "--export=WANDB_API_KEY=s3cr3t-3", "sh", "shim", "--escaped"),
            *("+python", "+--api-key", "+s3cr3t-1", "+password=s3cr3t-6"),
        ),
        environment={"HF_TOKEN": "s3cr3t-4", "URL": "http://u:s3cr3t-5@proxy:1", "LEVEL": "7"},
        first_failure={"rank": 0, "host": "h", "status": 1, "how": "token=s3cr3t-7"},
    )
    text = to_json(secrets)
    assert "s3cr3t" not in text
    written = json.loads(text)
    assert written["environment"]["LEVEL"] == "7"
    assert written["command"][:3] == ["python", "train.py", "--api-key"]
    assert written["argv"][4:7] == ["--escaped", "+python", "+--api-key"]


def test_words_that_are_no_text_are_valid_json():
    bad = b"\xff\xfe".decode("utf-8", "surrogateescape")
    words = (bad, "\ud800", "a\nb\x00", "é", "\U0001f600", f"\\{bad}\\")
    text = to_json(RECORD._replace(command=words, environment={"\udc80": "\udcff"}))
    # what is written is UTF-8, and no reader meets half a character
    told = json.loads(text.encode("utf-8"))
    assert told["command"] == [
        *("\\xff\\xfe", "\\ud800", "a\nb\x00", "é", "\U0001f600", "\\\\xff\\xfe\\")
    ]
    assert told["environment"] == {"\\x80": "\\xff"}


def test_ids_sort_by_time_and_are_unique():
    ids = [new_id(when) for when in (0, 0.5, 0.999999, 1, 1e9, 1e9 + 3e-6, 1795227043.999999)]
    assert ids == sorted(ids)
    assert ids[0].startswith("19700101T000000000000Z-")
    assert len({new_id(1) for _ in range(100)}) == 100
    assert all(re.fullmatch(NAMES, f"{one}.json") for one in ids)


# Where nothing can be written.


@pytest.mark.parametrize(("env", "why"), [
    ({"EZPZ_STATE_DIR": "{tmp}/file"}, "{tmp}/file/launches cannot be written ("),
    ({"EZPZ_STATE_DIR": "", "XDG_STATE_HOME": "", "HOME": "alice"}, "HOME='alice'; expected"),
])  # fmt: skip
def test_nowhere_to_write_is_one_warning(spawned, tmp_path, env, why):
    (tmp_path / "file").touch()
    env = {name: value.format(tmp=tmp_path) for name, value in env.items()}
    script = 'echo "[${EZPZ_PROGRESS_FILE-unset}]"'
    before = sorted(os.listdir(tmp_path))
    done = spawned("-n", "1", "--retries", "1", "sh", "-c", script, env=env, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[unset]\n")
    assert done.stderr.startswith(f"ezpz-launch: no job record: {why.format(tmp=tmp_path)}")
    assert "set EZPZ_STATE_DIR to another" in done.stderr or "or EZPZ_STATE_DIR to" in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == before


def test_a_disk_that_fills_up(env, folder, capsys):
    keeper = Keeper(env)
    keeper.start(PLAN, [], JOB)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # a limit on the size of files stands for it: the write itself fails
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))
    try:
        keeper.start(PLAN, [], JOB)
        keeper.finish(0, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "no job record: " in said
    assert "File too large" in said
    # what was written before is whole, and nothing lies about
    (path,) = folder.iterdir()
    assert json.loads(path.read_text())["attempt"] == 0


def test_the_folder_is_the_users_state_folder(tmp_path, monkeypatch):
    from platformdirs import user_state_path

    for name in ("XDG_STATE_HOME", "EZPZ_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("HOME", str(tmp_path)), ("XDG_STATE_HOME", str(tmp_path / "xdg"))):
        monkeypatch.setenv(name, value)
        assert records_folder(dict(os.environ)) == str(user_state_path("ezpz") / "launches")
    home = {"HOME": "/h"}
    assert records_folder({**home, "XDG_STATE_HOME": "relative"}) == records_folder(home)
    assert os.path.isabs(records_folder({}))
    monkeypatch.chdir(tmp_path)
    given = {"EZPZ_STATE_DIR": "here", "XDG_STATE_HOME": "/x"}
    assert records_folder(given) == str(tmp_path / "here" / "launches")


# Bounded.


def test_old_records_go_once_there_are_a_tenth_too_many(env, folder):
    keeper = Keeper(env)
    keeper.start(PLAN, [], JOB)
    old = [new_id(1000000000 + number) for number in range(KEPT + KEPT // 10 - 1)]
    for one in old:
        (folder / f"{one}.json").write_text("{}")
    others = [f"{old[0]}.progress", f"{old[0]}.json.new", "notes.json"]
    for name in others:
        (folder / name).touch()
    keeper.finish(0, None)
    # exactly a tenth: nothing yet
    assert len(os.listdir(folder)) == KEPT + KEPT // 10 + len(others)
    newer = Keeper(env)
    newer.start(PLAN, [], JOB)
    newer.finish(0, None)
    ids = [*old, keeper.launch_id, newer.launch_id][-KEPT:]
    assert sorted(os.listdir(folder)) == sorted(["notes.json", *(f"{one}.json" for one in ids)])


# What a script reports of its progress.


@pytest.mark.parametrize(("text", "step"), [
    (b"0", 0),
    (b" 7 \r\n", 7),
    (b"9" * 18, 10**18 - 1),
    (b"9" * 19, None),
    (b"", None),
    (b"-1", None),
    (b"1.5", None),
    (b"12\n13\n", None),
    (b"\xff\xfe1\x00", None),
    ("١٢".encode(), None),
])  # fmt: skip
def test_what_counts_as_a_step(tmp_path, text, step):
    path = tmp_path / "progress"
    path.write_bytes(text)
    assert read_progress(str(path)) == step
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "absent", tmp_path, tmp_path / "fifo", ""):
        assert read_progress(str(path)) is None


def test_the_lines_of_the_readme_report_progress(tmp_path):
    path = tmp_path / "a b.progress"
    readme = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?EZPZ_PROGRESS_FILE.*?)```", readme, re.DOTALL)
    env = {**os.environ, "EZPZ_PROGRESS_FILE": str(path)}
    words = [sys.executable, "-c", f"{code}\nreport(1300)"]
    subprocess.run(words, env=env, check=True)
    assert read_progress(str(path)) == 1300
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/", "ext4"), ("/home/me", "nfs4"), ("/homes", "ext4"), ("/lus/a b/env", "lustre"),
     ("/lus/a b", "lustre"), ("/lus", "overlay")],
)  # fmt: skip
def test_the_type_of_a_file_system(tmp_path, path, kind):
    lines = (
        r"27 1 254:0 / / rw,relatime - ext4 /dev/vda rw",
        r"28 27 0:40 / /home rw shared:7 master:1 - nfs4 filer:/home rw,vers=4.2",
        r"29 27 0:41 / /lus rw - tmpfs none rw",
        r"30 27 0:42 / /lus rw - overlay none rw",
        r"31 27 0:43 / /lus/a\040b rw - lustre 10.0.0.1@o2ib:/lus rw,flock",
    )
    (tmp_path / "mountinfo").write_text("\n".join(lines) + "\n")
    assert type_of(path, str(tmp_path / "mountinfo")) == kind
    assert type_of(path, str(tmp_path / "absent")) == ""
