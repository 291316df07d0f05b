"""A launch from its log folder to its last attempt; the job's end as Slurm and OpenPBS told it."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ezpz_launch import LaunchError, Request, UsageError, main
from ezpz_launch._nodes.attempts import Attempts
from ezpz_launch._nodes.job_end import UnansweredError, job_end, time_limit, when_to_signal
from ezpz_launch._nodes.retries import Retries, ends_with_import_error
from ezpz_launch._plan.context import build_context, make_plan
from ezpz_launch._run.launch import Outcome
from ezpz_launch._run.prepare import write_hostfile
from ezpz_topo import Allocation, detect, get_allocation

# What is tried again.


@pytest.mark.parametrize(("exit_status", "more", "pause", "why"), [
    (2, {}, None, "usage error"),
    (75, {}, None, "means checkpointed, to be requeued"),
    (126, {}, None, "cannot be executed"),
    (127, {}, None, "not found"),
    (143, {"told": True}, None, "told to end"),
    (1, {"told": True}, None, "told to end"),
    (1, {"import_error": True}, None, "failed import"),
    *((status, {}, 1.0, f"exit status {status}: retry 1 of 5 in 1 s")
      for status in (1, 3, 124, 134, 137, 139, 143, 255)),
])  # fmt: skip
def test_what_another_attempt_may_mend(exit_status, more, pause, why):
    waited, said = Retries(5).decide(exit_status, **more)
    assert (waited, why in said) == (pause, True), said


def test_the_pause_doubles_up_to_a_minute_and_no_more_than_allowed():
    retries = Retries(2000)
    decisions = [retries.decide(1, progress=step) for step in range(2001)]
    pauses = [pause for pause, _ in decisions]
    assert pauses[:8] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert set(pauses[8:-1]) == {60.0}
    assert decisions[-1] == (None, "all retries are used (2000)")


@pytest.mark.parametrize(("steps", "retried"), [
    ([None, None], [True, False]),
    ([0, 0, 0], [True, True, False]),
    ([10, 20, 30, 30, 30], [True, True, True, True, False]),
    ([10, 10, 20, 20, 30], [True] * 5),
    # a restart from an earlier checkpoint is no progress until it is past the highest
    ([10, 5, 7], [True, True, False]),
    ([10, 5, 11, 5, 12], [True] * 5),
    ([10, None, None], [True, True, False]),
    ([None, 10, None, None], [True, True, True, False]),
])  # fmt: skip
def test_two_attempts_in_a_row_without_progress_are_the_last(steps, retried):
    retries = Retries(100)
    highest = max((step for step in steps if step is not None), default=None)
    best = "none reported any" if highest is None else f"step {highest} is the highest"
    for step, expected in zip(steps, retried, strict=True):
        pause, why = retries.decide(1, progress=step)
        assert (pause is not None) is expected
        assert (f"2 attempts in a row without progress ({best})" in why) is not expected


@pytest.mark.parametrize(("code", "expected"), [
    ("import no_such_module_at_all", True),
    ("from os import no_such_name", True),
    ("raise ImportError('two\\n\\nlines: of it')", True),
    ("class MyImportError(Exception): pass\nraise MyImportError('x')", False),
    ("try:\n import no_such_module\nexcept ImportError:\n raise RuntimeError('x')", False),
    ("raise ValueError('ImportError: not really')", False),
    ("pass", False),
])  # fmt: skip
def test_python_that_cannot_import(code, expected):
    words = [sys.executable, "-c", code]
    stderr = subprocess.run(words, capture_output=True, check=False).stderr
    assert ends_with_import_error(stderr) is expected
    prefixed = b"".join(b"[3@nid001] " + line for line in stderr.splitlines(keepends=True))
    assert ends_with_import_error(prefixed) is expected


# Attempts.


def test_retries_until_it_succeeds(spawned, tmp_path):
    # Rank 1 fails, which ends rank 0: that has to have said its words before.
    script = (
        "echo $RANK $EZPZ_ATTEMPT $TORCHELASTIC_RESTART_COUNT $MASTER_PORT $EZPZ_LAST_FAULT; "
        f"[ $RANK = 1 ] || touch {tmp_path}/said; "
        f"until [ -e {tmp_path}/said ]; do sleep 0.05; done; "
        "[ $RANK = 0 ] || [ $EZPZ_ATTEMPT -ge 1 ] || exit 9"
    )
    leaked = {"EZPZ_LAST_FAULT": "another's"}
    done = spawned("-n", "2", "--retries", "3", "sh", "-c", script, env=leaked)
    assert done.returncode == 0, done.stderr
    seen = sorted(line.split(maxsplit=4) for line in done.stdout.splitlines())
    assert [words[:3] for words in seen] == [
        ["0", "0", "0"], ["0", "1", "1"], ["1", "0", "0"], ["1", "1", "1"],
    ]  # fmt: skip
    here, why = os.uname().nodename, "exited with status 9"
    why = f"whose fault is unknown; {here} perhaps: rank 1 on {here} {why}"
    assert [words[4:] for words in seen] == [[], [why]] * 2
    # ranks of an attempt agree; the next one has another port
    ports = [{words[3] for words in seen if words[1] == attempt} for attempt in "01"]
    assert [len(both) for both in ports] == [1, 1]
    assert ports[0] != ports[1]
    assert "exit status 9: retry 1 of 3 in 1 s" in done.stderr


@pytest.mark.parametrize("options", [(), ("--log-dir", "logs")], ids=str)
def test_a_failed_import_is_not_tried_again(spawned, tmp_path, options):
    words = (sys.executable, "-c", "import no_such_module")
    done = spawned("-n", "1", "--retries", "5", *options, *words, cwd=tmp_path)
    assert done.returncode == 1
    assert "no retry: a failed import" in done.stderr


def test_progress_is_what_keeps_it_going(spawned, history, clean_env):
    # a step forward, then none: after two more attempts it is given up
    script = 'echo 7 >"$EZPZ_PROGRESS_FILE"; echo $EZPZ_PROGRESS_FILE; exit 9'
    done = spawned("-n", "1", "--retries", "9", "sh", "-c", script)
    assert done.returncode == 9
    # one file of the whole launch, which goes with it
    (record,) = history()
    path = Path(clean_env["EZPZ_STATE_DIR"], "launches", f"{record['id']}.progress")
    assert done.stdout.splitlines() == [str(path)] * 3
    assert not path.exists()
    assert "2 attempts in a row without progress (step 7 is the highest)" in done.stderr


def test_a_signal_during_the_pause_ends_it(background, history):
    script = 'echo $EZPZ_ATTEMPT >"$EZPZ_PROGRESS_FILE"; exit 9'
    launch = background("-n", "1", "--retries", "9", "sh", "-c", script, stderr=-1)
    for line in launch.stderr:
        if b"retry 2 of 9" in line:  # a pause of 2 s
            break
    launch.terminate()
    assert launch.wait() == 143
    assert b"retry 3" not in launch.stderr.read()
    (record,) = history()
    assert (record["state"], record["exit_status"], record["attempt"]) == ("ended", 143, 1)
    how = {"host": os.uname().nodename, "status": 9, "how": "exited with status 9"}
    assert record["first_failure"].items() >= {"rank": 0, **how}.items()
    assert [each["whose"] for each in record["attempts"]] == ["unknown"] * 2


@pytest.mark.parametrize("value", ["2", "15s", "86401"])
def test_a_node_timeout_that_is_none(monkeypatch, capsys, value):
    monkeypatch.setenv("EZPZ_NODE_TIMEOUT", value)
    assert main(["--launcher", "spawn", "-n", "1", "true"]) == 2
    assert "expected whole seconds, from 3 to 86400" in capsys.readouterr().err


@pytest.fixture
def attempts(clean_env):
    """The attempts of a launch of this host, not begun."""
    request = Request(("true",), 1, launcher="spawn")
    topology = detect(clean_env)
    planned = make_plan(build_context(topology, request, clean_env), request)
    return Attempts(planned, topology, clean_env)


@pytest.mark.parametrize(
    ("more", "times"),
    [({"free_at": 3}, 3), ({}, 5), ({"told": signal.SIGTERM}, 1),
     ({"sources": {"MASTER_PORT": "--env"}}, 1)],
    ids=str,
)  # fmt: skip
def test_a_taken_port_is_replaced_but_not_for_ever(attempts, more, times):
    ports = []
    if "sources" in more:
        attempts._planned = replace(attempts._planned, sources=more["sources"])

    def run():
        ports.append(attempts._planned.environment["MASTER_PORT"])
        return Outcome(1, end_signal=more.get("told"), port_taken=len(ports) != more.get("free_at"))

    attempts._run = run
    assert attempts._attempt().port_taken != ("free_at" in more)
    assert len(ports) == len(set(ports)) == times


def test_a_hostfile_that_somebody_removes_and_nowhere_to_write_it(attempts, tmp_path, monkeypatch):
    monkeypatch.setattr("ezpz_launch._run.prepare.needs_hostfile", lambda _: True)
    monkeypatch.setattr("ezpz_launch._run.prepare.build_hostfile", lambda _: ["alpha", "beta"])
    with write_hostfile(attempts._planned, str(tmp_path)) as ready:
        path = tmp_path / os.path.basename(ready.hostfile)
        assert path.read_text() == "alpha\nbeta\n"
        path.unlink()  # what cleans /tmp finds it old
    expected = pytest.raises(LaunchError, match="set TMPDIR to one")
    with expected, write_hostfile(attempts._planned, str(tmp_path / "absent")):
        pytest.fail("not reached")


# --log-dir.


def test_a_log_folder_is_made_and_the_last_words_are_shown(spawned, tmp_path):
    script = r"echo out; seq 30 >&2; printf '\377\376 no text' >&2; [ $RANK = 0 ] || exit 7"
    done = spawned("-n", "2", "--log-dir", "a/b", "sh", "-c", script, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (7, "")
    path = tmp_path / "a" / "b" / "rank-1.err"
    assert (tmp_path / "a" / "b" / "rank-0.out").read_text() == "out\n"
    words = [*(str(number) for number in range(1, 31)), "\ufffd\ufffd no text"]
    assert path.read_text(errors="replace").splitlines() == words
    said = done.stderr.splitlines()
    start = said.index(f"ezpz-launch: the end of {path.relative_to(tmp_path)}:")
    assert said[start + 1 : start + 21] == [f"  {word}" for word in words[-20:]]


def test_old_logs_decide_nothing(spawned, tmp_path):
    (tmp_path / "rank-0.err").write_text("Traceback (most recent call last):\nImportError: old\n")
    options = ("-n", "1", "--retries", "1", "--log-dir", str(tmp_path))
    done = spawned(*options, "sh", "-c", "exit 9")
    assert "old" not in done.stderr
    assert "retry 1 of 1" in done.stderr


def test_a_log_folder_that_is_none(spawned, tmp_path):
    folder = tmp_path / "logs"
    folder.touch()
    done = spawned("-n", "1", "--log-dir", str(folder), "touch", str(tmp_path / "ran"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"--log-dir {folder}: File exists; expected a folder that can be" in done.stderr
    assert not (tmp_path / "ran").exists()
    done = spawned("-n", "1", "--log-dir", f"{tmp_path}/a\nb", "true")
    assert done.returncode == 2
    assert "holds a line break; expected a path without one" in done.stderr


def test_a_disk_that_fills_up_is_told(clean_env, small_disk, tmp_path):
    fills = "head -c 4000000 /dev/zero >x 2>/dev/null; exit 3"
    words = [*small_disk("2m", tmp_path), sys.executable, "-m", "ezpz_launch"]
    words += ["--launcher", "spawn", "-n", "1", "--log-dir", "logs", "sh", "-c", fills]
    done = subprocess.run(words, env=clean_env, capture_output=True, text=True, check=False)
    why = "--log-dir logs: No space left on device; the ranks' last words may be missing"
    assert (done.returncode, done.stderr.count(why)) == (3, 1), done.stderr


# When the job ends, and the signal before it.

END = datetime(2026, 11, 21, 2, 15, 43, tzinfo=UTC).timestamp()
NOW = END - 300

SLURM = {
    "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "nid[001-002]", "SLURM_NTASKS": "4",
    "SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURMD_NODENAME": "nid001",
}  # fmt: skip
SCONTROL = """\
JobId=12 JobName=probe
   UserId=alice(1000) GroupId=alice(1000) MCS_label=N/A
   RunTime=00:00:57 TimeLimit=00:05:00 TimeMin=N/A
   StartTime=2026-11-21T02:10:43 EndTime={end} Deadline=N/A
   NodeList=nid[001-002]
"""
PBS = {"PBS_JOBID": "1.pbs-0001", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_JOBNAME": "probe"}


def qstat(stime="Sat Nov 21 02:10:43 2026", **resources):
    job = {"job_state": "R", "exec_host": "x1n0/0*2+x1n1/0*2", "stime": stime}
    told = {**job, **{f"Resource_List.{name}": value for name, value in resources.items()}}
    return "\n".join(["Job Id: 1.pbs-0001", *(f"    {name} = {told[name]}" for name in told)])


@pytest.fixture
def scheduler(program, tmp_path):
    """Make a PATH where a command prints this answer, and notes that it was asked."""

    def serve(command, answer):
        (tmp_path / "answer").write_text(answer)
        program(command, f"echo x >> '{tmp_path}/asked'; cat '{tmp_path}/answer'")
        return {"PATH": f"{tmp_path}:/usr/bin:/bin", "USER": "alice"}

    return serve


EXTENDED = SCONTROL.format(end="2026-11-21T02:15:43")


@pytest.mark.parametrize(("env", "served", "end"), [
    ({**SLURM, "SLURM_JOB_END_TIME": str(int(END))}, ("scontrol", ""), END),
    # the limit was extended after the job had started; and it has none
    ({**SLURM, "SLURM_JOB_END_TIME": str(int(END) - 3600)}, ("scontrol", EXTENDED), END),
    ({**SLURM, "SLURM_JOB_END_TIME": str(2**32 - 1)}, ("scontrol", EXTENDED), END),
    (SLURM, ("scontrol", EXTENDED), END),
    (PBS, ("qstat", qstat(walltime="00:05:00")), END),
    (PBS, ("qstat", qstat(walltime=60)), END - 240),
])  # fmt: skip
def test_the_end(tmp_path, scheduler, env, served, end):
    env = {**env, **scheduler(*served)}
    assert job_end(get_allocation(env), env, NOW) == end
    # where the variable tells, no command is started
    assert (tmp_path / "asked").exists() == bool(served[1])


@pytest.mark.parametrize(("env", "served", "said", "later"), [
    (SLURM, ("scontrol", SCONTROL.format(end="Unknown")), "job 12 has no time limit", False),
    (SLURM, ("scontrol", "slurm_load_jobs error: Invalid"), "the end of job 12", True),
    (PBS, ("qstat", qstat()), "job 1.pbs-0001 has no time limit", False),
    (PBS, ("qstat", "qstat: Unknown Job Id"), "end is not known: .* qstat -E -fw", True),
    ({}, ("squeue", ""), "no job here", False),
    ({}, ("qselect", "?"), "no job here", False),
])  # fmt: skip
def test_an_end_that_is_not_told(scheduler, env, served, said, later):
    job = Allocation("pbs" if env is PBS else "slurm" if env else "none", None, ())
    with pytest.raises(LaunchError, match=said) as caught:
        job_end(job, {**env, **scheduler(*served)}, NOW)
    # Who is in a job, and has no answer yet, asks again.
    assert isinstance(caught.value, UnansweredError) == later
    text = str(caught.value)
    assert text.startswith("--signal-before: ")
    assert "expected" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("start", "end", "limit"),
    [("1795227043", "1795227343", 300.0), ("1795227043", "4294967295", None),
     ("1795227043", "", None), ("1795227343", "1795227043", None)],
)  # fmt: skip
def test_the_limit_by_slurms_variables(start, end, limit):
    assert time_limit({"SLURM_JOB_START_TIME": start, "SLURM_JOB_END_TIME": end}) == limit
    assert time_limit({}) is None


@pytest.mark.parametrize(("left", "before", "limit", "wait", "note"), [
    (300, 60, None, 240.0, ""),
    (300, 299.5, 300, 0.5, ""),
    (300, 300, 3600, 0.0, "300 s of the job are left"),
    (300, 500, None, 0.0, "300 s of the job are left"),
    (-5, 60, None, 0.0, "its end was 5 s ago"),
])  # fmt: skip
def test_when(left, before, limit, wait, note):
    waited, said = when_to_signal(END, before, END - left, limit=limit)
    assert (waited, note in said, bool(said)) == (wait, True, bool(note))
    for longer in (300, 301):
        with pytest.raises(UsageError, match="the whole job has 300 s; expected less"):
            when_to_signal(END, longer, NOW, limit=300)


def test_a_scheduler_that_does_not_answer_is_asked_again_while_ranks_run(
    spawned, program, tmp_path
):
    down = "exec sleep 60"
    stime = time.strftime("%a %b %d %H:%M:%S %Y", time.gmtime())
    program("qstat", f"[ -e '{tmp_path}/up' ] || {down}; echo '{qstat(stime, walltime='60')}'")
    (tmp_path / "nodes").write_text(os.uname().nodename)
    env = {
        "PBS_JOBID": "1.pbs-0001", "PBS_NODEFILE": str(tmp_path / "nodes"),
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "EZPZ_SCHEDULER_TIMEOUT": "1",
    }  # fmt: skip
    # Its rank runs, and qstat answers only then.
    script = f"trap 'echo heard; exit 0' USR1; touch {tmp_path}/up; while :; do sleep 0.1; done"
    done = spawned("-n", "1", "--signal-before", "50m", "sh", "-c", script, env=env)
    assert (done.returncode, done.stdout) == (0, "heard\n"), done.stderr
    first, *rest = done.stderr.splitlines()
    assert first.startswith("ezpz-launch: --signal-before: "), done.stderr
    assert first.endswith("; the ranks start, and it is asked again until it tells")
    assert "s of the job are left" in rest[0]
