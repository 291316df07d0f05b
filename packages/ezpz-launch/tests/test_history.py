"""The table and the JSON of ``ezpz-launch launches``, from records on a real disk."""

import json
import os
import time

import pytest

from ezpz_launch import LaunchError, UsageError
from ezpz_launch._job.jobs import LAUNCHES_PAGE, launches
from ezpz_launch._run.processes import start_time_of
from ezpz_launch._run.record import Record, iso_time, new_id, to_json
from ezpz_topo import get_hostname

START = 1795227043.25


def record(number=0, *, took=None, **changes):
    start = START + 60 * number
    plain = Record(
        id=new_id(start), command=("python", "train.py", "--lr", "1e-4", "a b"),
        cwd="/home/alice/run", machine="m", scheduler="slurm", job_id="12", hosts="nid[001-004]",
        nproc=16, ppn=4, launcher="srun", argv=("srun",), environment={}, host=get_hostname(),
        pid=os.getpid(), pid_start=int(start_time_of(os.getpid()) or 0) or None,
        start=iso_time(start),
        end=None if took is None else iso_time(start + took),
    )  # fmt: skip
    return plain._replace(**changes)


ENDED = {"took": 7, "exit_status": 0}


@pytest.fixture
def env(tmp_path, monkeypatch):
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "UTC0")
        time.tzset()
        yield {"EZPZ_STATE_DIR": str(tmp_path)}
    time.tzset()


@pytest.fixture
def write(tmp_path):
    """Write records, or whatever else stands in their place; return the last path."""

    def write(*records):
        (tmp_path / "launches").mkdir(exist_ok=True)
        for one in records:
            path = tmp_path / "launches" / f"{getattr(one, 'id', new_id(START + 999))}.json"
            path.write_bytes(one if isinstance(one, bytes) else to_json(one).encode())
        return path

    return write


def told(env, *words):
    return json.loads(launches(["--json", *words], env))


def test_the_table(env, write):
    write(
        record(0, **ENDED),
        record(1, took=754, exit_status=137, job_id=None, machine="laptop", hosts="h" * 40),
        record(2, took=93784, exit_status=3, attempt=2, command=("a" * 100,)),
        record(3, took=-5, exit_status=0),
        record(4),
    )
    command_ = "python train.py --lr 1e-4 'a b'"
    hosts, long = "nid[001-004]            ", f"{'h' * 21}..."
    assert launches([], env).splitlines() == [
        f"when                 took      exit          ranks  {'hosts':24}  job     command",
        f"2026-11-21 02:10:43  0:07      0             16     {hosts}  m 12    {command_}",
        f"2026-11-21 02:11:43  12:34     137           16     {long}  laptop  {command_}",
        f"2026-11-21 02:12:43  26:03:04  3, attempt 3  16     {hosts}  m 12    {'a' * 57}...",
        f"2026-11-21 02:13:43  0:00      0             16     {hosts}  m 12    {command_}",
        f"2026-11-21 02:14:43            running       16     {hosts}  m 12    {command_}",
    ]


def test_the_last_column_is_broken_at_the_width_of_a_terminal(env, write, monkeypatch):
    monkeypatch.setattr(os, "isatty", lambda _: True)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((80, 24)))
    write(record(command=("python", *("--option",) * 9), **ENDED))
    title, *rows = launches([], env).splitlines()
    assert len(rows) > 1
    assert {len(row) - len(row.lstrip()) for row in rows[1:]} == {title.index("command")}


def test_the_newest_are_last_and_no_more_than_asked(env, write):
    write(*(record(number, nproc=number + 1) for number in range(25)))
    assert [one["nproc"] for one in told(env, "-n2")] == [24, 25]
    assert len(launches(["--limit", "2"], env).splitlines()) == 1 + 2
    assert len(launches([], env).splitlines()) == 1 + 20
    assert len(told(env, "-n", "100")) == 25


@pytest.mark.parametrize(
    "words",
    [["-n"], ["-n", "two"], ["-n", "0"], ["--jsn"], ["x"]],
)
def test_the_command_refuses_what_it_does_not_know_and_shows_its_page(env, words):
    with pytest.raises(UsageError, match=r"expected|did you mean --json"):
        launches(words, env)
    assert launches(["-h"], env) == launches(["--help"], env) == LAUNCHES_PAGE


def test_json_has_the_whole_record(env, write):
    failure = {"rank": 1, "host": "nid001", "status": 7, "how": "exited with status 7"}
    path = write(record(took=7, exit_status=7, first_failure=failure))
    (found,) = told(env)
    assert found == {**json.loads(path.read_text()), "state": "ended"}
    assert (found["exit_status"], found["first_failure"]) == (7, failure)


def test_a_command_does_not_move_the_cursor(env, write):
    write(record(**ENDED, command=("\x1b[2J", "a\nb", "\u202eevil", "é")))
    table = launches([], env)
    assert len(table.splitlines()) == 2
    assert all(letter.isprintable() for line in table.splitlines() for letter in line)
    assert "é" in table


# Whether it runs.


def test_one_that_runs_and_is_killed(env, write, process):
    child = process("sleep", "600")
    one = record(pid=child.pid, pid_start=int(start_time_of(child.pid) or 0) or None)
    write(one)
    assert told(env)[0]["state"] == "running"
    child.kill()
    # not yet waited for, it is in the table of processes still
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert told(env)[0]["state"] == ("never ended" if one.pid_start else "running")
    child.wait()
    assert told(env)[0]["state"] == "never ended"
    assert "never ended" in launches([], env)


@pytest.mark.parametrize(("changes", "state"), [
    ({"pid_start": 1}, "never ended"),  # another process with its number
    ({"pid_start": None}, "running"),  # macOS, which does not tell
    ({"pid_start": None, "pid": 0}, "never ended"),
    ({"host": "some-other-host"}, "unknown"),
])  # fmt: skip
def test_whether_it_runs(env, write, changes, state):
    write(record(**changes))
    assert told(env)[0]["state"] == state


QSTAT = "echo 'Job Id: 12'; echo '    job_state = {}'"


@pytest.mark.parametrize(("scheduler", "programs", "state"), [
    ("pbs", {"qselect": "echo 12", "qstat": QSTAT.format("Q")}, "ended by the scheduler"),
    ("pbs", {"qselect": "echo 12", "qstat": QSTAT.format("R")}, "unknown"),
    ("pbs", {"qselect": "echo cannot connect to server pbs-0001 >&2; exit 111"}, "unknown"),
    ("slurm", {"squeue": "", "sacct": ""}, "ended by the scheduler"),
])  # fmt: skip
def test_another_host_whose_job_is_over(
    *, env, write, program, tmp_path, scheduler, programs, state
):
    write(record(host="some-other-host", scheduler=scheduler))
    for name, text in programs.items():
        program(name, text)
    env |= {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert told(env)[0]["state"] == state
    assert state in launches([], env)


# Damage.


@pytest.mark.parametrize("damage", [
    *(b"", b"{", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000),
    *({"command": [1]}, {"start": "soon"}, {"end": "soon"}, {"nproc": "16"}, {"pid": None}),
], ids=lambda damage: repr(damage)[:30])  # fmt: skip
def test_a_damaged_file_is_left_out_and_counted(env, write, tmp_path, damage):
    good = record(**ENDED)
    if isinstance(damage, dict):
        damage = json.dumps({**json.loads(to_json(good)), **damage}).encode()
    write(good, damage)
    lines = launches([], env).splitlines()
    assert len(lines) == 3
    assert lines[-1] == f"left out, no record that can be read: 1 file in {tmp_path}/launches"
    assert [one["id"] for one in told(env)] == [good.id]


def test_no_launches_and_files_that_are_no_records(env, write, tmp_path):
    no_launches = f"no launches so far; they are recorded in {tmp_path}/launches"
    assert launches([], env) == no_launches
    assert told(env) == []
    assert os.listdir(tmp_path) == []
    folder = write(b"?").parent
    os.mkfifo(folder / f"{new_id(START + 1)}.json")
    (folder / "notes.json").touch()  # not ours
    first, last = launches([], env).splitlines()
    assert first.startswith("no launches so far")
    assert last.startswith("left out, no record that can be read: 2 files in ")


def test_a_folder_that_cannot_be_read(env, tmp_path):
    (tmp_path / "launches").write_text("a file")
    with pytest.raises(LaunchError, match=r"cannot be read .* set EZPZ_STATE_DIR"):
        launches([], env)
