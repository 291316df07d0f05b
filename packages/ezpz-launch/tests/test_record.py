"""Records on real disks: whole, private, bounded, without secrets, and never in the way."""

import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime

import pytest

from ezpz_launch import LaunchError, Request, __version__, plan
from ezpz_launch._identify import Launcher
from ezpz_launch._record import (
    ID,
    KEPT,
    Record,
    Recorder,
    iso_time,
    new_id,
    process_start,
    read_progress,
    record_of,
    records_folder,
    to_json,
)
from ezpz_topo import get_hostname, imagine

RECORD = Record(
    id=new_id(1795227043.25),
    command=("python", "train.py", "--lr", "1e-4"),
    cwd="/home/alice/run",
    machine="perlmutter",
    scheduler="slurm",
    job_id="12",
    hosts="nid[001-004]",
    nproc=16,
    ppn=4,
    launcher="srun",
    argv=("srun", "-n", "16", "python", "train.py", "--lr", "1e-4"),
    environment={"MASTER_ADDR": "nid001", "MASTER_PORT": "29500"},
    host="nid001",
    pid=4242,
    pid_start=None,
    start=iso_time(1795227043.25),
)


@pytest.fixture
def env(tmp_path):
    return {"EZPZ_STATE_DIR": str(tmp_path / "state")}


def files(recorder):
    return sorted(os.listdir(recorder.folder))


def stored(recorder):
    with open(os.path.join(recorder.folder, f"{recorder.record.id}.json"), "rb") as file:
        return json.load(file)


def test_from_the_start_to_the_end(env, tmp_path, capsys):
    recorder = Recorder.start(RECORD, env)
    assert recorder.folder == str(tmp_path / "state" / "launches")
    assert stored(recorder) == {
        "id": RECORD.id,
        "command": ["python", "train.py", "--lr", "1e-4"],
        "cwd": "/home/alice/run",
        "machine": "perlmutter",
        "scheduler": "slurm",
        "job_id": "12",
        "hosts": "nid[001-004]",
        "nproc": 16,
        "ppn": 4,
        "launcher": "srun",
        "argv": ["srun", "-n", "16", "python", "train.py", "--lr", "1e-4"],
        "environment": {"MASTER_ADDR": "nid001", "MASTER_PORT": "29500"},
        "host": "nid001",
        "pid": 4242,
        "pid_start": None,
        "start": "2026-11-21T02:10:43.250Z",
        "end": None,
        "exit_status": None,
        "first_failure": None,
        "attempt": 0,
        "retries": 0,
        "version": __version__,
    }
    failure = {"rank": 3, "host": "nid001", "status": 137, "how": "was killed by SIGKILL"}
    recorder.finish(137, failure, 1795227100.5)
    after = stored(recorder)
    assert (after["exit_status"], after["first_failure"]) == (137, failure)
    assert after["end"] == "2026-11-21T02:11:40.500Z"
    assert after["start"] == "2026-11-21T02:10:43.250Z"
    assert files(recorder) == [f"{RECORD.id}.json"]
    assert (recorder.warning, capsys.readouterr().err) == ("", "")


def test_each_attempt_is_told(env):
    recorder = Recorder.start(RECORD._replace(retries=2), env)
    recorder.next_attempt(["srun", "again"], {"MASTER_PORT": "29501"})
    after = stored(recorder)
    assert (after["attempt"], after["retries"], after["end"]) == (1, 2, None)
    assert (after["argv"], after["environment"]) == (["srun", "again"], {"MASTER_PORT": "29501"})
    recorder.finish(0)
    after = stored(recorder)
    assert (after["attempt"], after["exit_status"]) == (1, 0)
    assert (
        abs(datetime.fromisoformat(after["end"]).timestamp() - datetime.now(UTC).timestamp()) < 60
    )


def test_nobody_else_can_read_it(env, tmp_path):
    previous = os.umask(0)
    try:
        recorder = Recorder.start(RECORD, env)
        recorder.finish(0)
    finally:
        os.umask(previous)
    for folder in (tmp_path / "state", tmp_path / "state" / "launches"):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "state/launches" / f"{RECORD.id}.json").stat().st_mode & 0o777 == 0o600


def test_no_secret_is_ever_written(env):
    secrets = RECORD._replace(
        command=("python", "train.py", "--api-key", "s3cr3t-1", "HF_TOKEN=s3cr3t-2"),
        argv=("srun", "--export=WANDB_API_KEY=s3cr3t-3", "python", "--api-key", "s3cr3t-1"),
        environment={
            "HF_TOKEN": "s3cr3t-4",
            "MYPASS": "s3cr3t-7",
            "URL": "http://u:s3cr3t-5@proxy:1",
            "LEVEL": "7",
        },
    )
    recorder = Recorder.start(secrets, env)
    recorder.next_attempt([*secrets.argv, "password=s3cr3t-6"], secrets.environment)
    recorder.finish(1, {"rank": 0, "host": "h", "status": 1, "how": "token=s3cr3t-7"})
    text = json.dumps(stored(recorder))
    assert "s3cr3t" not in text
    assert stored(recorder)["environment"]["LEVEL"] == "7"
    assert stored(recorder)["command"][:3] == ["python", "train.py", "--api-key"]
    # the launch itself still has them
    assert recorder.record.environment["HF_TOKEN"] == "s3cr3t-4"


def test_words_that_are_no_text_are_valid_json():
    words = [
        b"\xff\xfe".decode("utf-8", "surrogateescape"),
        "\ud800",
        "a\nb\x00",
        "é",
        "\U0001f600",
    ]
    text = to_json(RECORD._replace(command=tuple(words), environment={"\udc80": "\udcff"}))
    # what is written is UTF-8, and no reader meets half a character
    told = json.loads(text.encode("utf-8"))
    assert told["command"] == ["\\xff\\xfe", "\\ud800", "a\nb\x00", "é", "\U0001f600"]
    assert told["environment"] == {"\\x80": "\\xff"}
    assert "\\ud" not in text.replace("\\\\ud800", "")


def test_the_record_of_a_real_plan(tmp_path, monkeypatch):
    topology = imagine("perlmutter", 2, {})
    planned = plan(
        topology,
        Request(("python", "train.py")),
        Launcher("/usr/bin/srun", "srun", "srun on PATH"),
        hosts=topology.allocation.hosts,
        hosts_source="made up",
        hostfile="/tmp/hosts",
        port=29500,
        user_env={},
    )
    monkeypatch.chdir(tmp_path)
    record = record_of(planned, ["srun", "sh"], topology.allocation, retries=3)
    assert (record.command, record.argv) == (("python", "train.py"), ("srun", "sh"))
    assert (record.machine, record.launcher, record.retries) == ("perlmutter", "srun", 3)
    assert (record.nproc, record.ppn) == (8, 4)
    assert record.environment["MASTER_PORT"] == "29500"
    assert (record.cwd, record.host, record.pid) == (str(tmp_path), get_hostname(), os.getpid())
    assert record.pid_start == process_start(os.getpid())
    assert json.loads(to_json(record))["hosts"] == record.hosts != ""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert record_of(planned, [], topology.allocation, launch_id="x").cwd == ""
    assert record_of(planned, [], topology.allocation, launch_id="x").id == "x"


def test_ids_sort_by_time_and_are_unique():
    moments = [1795227043.0, 1795227043.0000021, 1795227043.999999, 1795227044.0]
    ids = [new_id(moment) for moment in moments]
    assert ids == sorted(ids)
    assert len({new_id(1.0) for _ in range(100)}) == 100
    assert all(re.fullmatch(ID, f"{one}.json") for one in ids)


# Where nothing can be written.

WRITE = """
import resource, signal, sys
from ezpz_launch._record import Recorder, iso_time, new_id
sys.path.insert(0, sys.argv[1])
from test_record import RECORD
import os
recorder = Recorder.start(RECORD, dict(os.environ))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
if len(sys.argv) > 2:
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, 8))
recorder.next_attempt(["srun"], {})
recorder.finish(0)
print(recorder.warning, recorder.progress_path)
"""


def write(env, *words):
    return subprocess.run(
        [sys.executable, "-c", WRITE, os.path.dirname(__file__), *words],
        env={"PATH": os.environ["PATH"], **env},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )


def test_a_disk_that_fills_up(env, tmp_path):
    # a limit on the size of files stands for it: the write itself fails
    done = write(env, "limit")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("ezpz-launch: no job record: ")
    assert "File too large" in done.stderr
    # what was written before is whole, and nothing lies about
    (path,) = (tmp_path / "state" / "launches").iterdir()
    assert json.loads(path.read_text())["end"] is None


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    done = write({"EZPZ_STATE_DIR": str(tmp_path / "file" / "state")})
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("ezpz-launch: no job record: ")
    assert "set EZPZ_STATE_DIR to another" in done.stderr
    assert done.stdout.split() == done.stderr.removeprefix("ezpz-launch: ").split()


def test_a_place_where_no_folder_is_ever_made():
    if not os.path.isdir("/proc/self"):
        pytest.skip("no /proc here")
    done = write({"EZPZ_STATE_DIR": "/proc/no-such-thing/state"})
    assert done.stderr.count("\n") == 1
    assert "no job record" in done.stderr


def test_a_home_that_is_not_ours_to_write(tmp_path, capsys, unprivileged):
    recorder = Recorder.start(RECORD, {"HOME": "/"})
    recorder.finish(0)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "/.local" in said
    assert "cannot be written (" in said
    assert recorder.progress_path == ""


@pytest.fixture
def unprivileged():
    """Run the test without root's right to everything, as another user where we are root."""
    me = os.geteuid()
    if me == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(me)


def test_a_home_that_is_no_path_is_never_the_working_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match="HOME='alice'"):
        records_folder({"HOME": "alice"})
    Recorder.start(RECORD, {"HOME": "alice"}).finish(0)
    assert capsys.readouterr().err.startswith("ezpz-launch: no job record: HOME='alice'")
    assert os.listdir(tmp_path) == []


def test_the_folder_is_the_users_state_folder(tmp_path, monkeypatch):
    from platformdirs import user_state_path

    for name in ("XDG_STATE_HOME", "EZPZ_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in (("HOME", str(tmp_path)), ("XDG_STATE_HOME", str(tmp_path / "xdg"))):
        monkeypatch.setenv(name, value)
        assert records_folder(dict(os.environ)) == str(user_state_path("ezpz") / "launches")
    assert records_folder({"HOME": "/h", "XDG_STATE_HOME": "relative"}) == records_folder(
        {"HOME": "/h"}
    )
    assert os.path.isabs(records_folder({}))
    monkeypatch.chdir(tmp_path)
    given = {"EZPZ_STATE_DIR": "here", "XDG_STATE_HOME": "/x"}
    assert records_folder(given) == str(tmp_path / "here" / "launches")


# Bounded.


def test_old_records_go_once_there_are_a_tenth_too_many(env, tmp_path):
    recorder = Recorder.start(RECORD, env)
    folder = tmp_path / "state" / "launches"
    old = [new_id(1000000000 + number) for number in range(KEPT + KEPT // 10 - 1)]
    for one in old:
        (folder / f"{one}.json").write_text("{}")
    (folder / f"{old[0]}.progress").write_text("3")
    (folder / f"{old[0]}.json.new").write_text("{")
    (folder / "notes.json").write_text("mine")
    recorder.finish(0)
    # exactly a tenth: nothing yet
    assert len(files(recorder)) == KEPT + KEPT // 10 + 3
    newer = Recorder.start(RECORD._replace(id=new_id(1795227050)), env)
    newer.finish(0)
    kept = files(newer)
    assert len(kept) == KEPT + 1
    assert {"notes.json", f"{RECORD.id}.json", f"{newer.record.id}.json"} < set(kept)
    assert f"{old[-1]}.json" in kept
    assert not [name for name in kept if name.startswith(old[0])]


def test_the_progress_file_lives_as_long_as_the_launch(env):
    recorder = Recorder.start(RECORD, env)
    assert recorder.progress_path == os.path.join(recorder.folder, f"{RECORD.id}.progress")
    assert read_progress(recorder.progress_path) is None
    with open(recorder.progress_path, "w") as file:
        file.write("12\n")
    recorder.next_attempt([], {})
    assert read_progress(recorder.progress_path) == 12
    recorder.finish(0)
    assert files(recorder) == [f"{RECORD.id}.json"]


def test_many_launches_at_once_make_one_folder(tmp_path):
    env = {**os.environ, "EZPZ_STATE_DIR": str(tmp_path / "a" / "b")}
    code = (
        "import os, sys\n"
        "from dataclasses import replace\n"
        "from ezpz_launch._record import Recorder, new_id\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from test_record import RECORD\n"
        "sys.stdin.read()\n"
        "Recorder.start(RECORD._replace(id=new_id(1.0)), dict(os.environ)).finish(0)\n"
    )
    command = [sys.executable, "-c", code, os.path.dirname(__file__)]
    processes = [
        subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    try:
        for process in processes:
            process.stdin.close()
        said = [process.stderr.read() for process in processes]
        assert [process.wait(timeout=60) for process in processes] == [0] * 4
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stderr.close()
    assert said == [b""] * 4
    assert len(list((tmp_path / "a" / "b" / "launches").iterdir())) == 4


def test_a_process_that_is_gone_has_no_start():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        if not os.path.isdir("/proc/self"):
            assert process_start(process.pid) is None
            return
        assert process_start(process.pid) >= process_start(os.getpid())
    finally:
        process.kill()
        # ended, and not yet waited for
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        zombie = process_start(process.pid)
        process.wait()
        process.stdin.close()
    assert zombie is None
    assert process_start(process.pid) is None


def test_importing_it_loads_nothing_heavy():
    code = (
        "import sys, ezpz_launch._cli\n"
        "before = set(sys.modules)\n"
        "import ezpz_launch._record\n"
        "print([m for m in set(sys.modules) - before if not m.startswith('ezpz_launch')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_secret_in_words_that_carry_the_shims_escape():
    argv = ("mpiexec", "sh", "shim", "--escaped", "+run", "+:", "+--api-key", "+hunter2")
    assert "hunter2" not in to_json(RECORD._replace(argv=argv))
