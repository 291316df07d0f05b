"""Jobs where no scheduler answers: records, files that are followed, launches that are ended."""

import json
import os
import re
import subprocess
import sys

import pytest

from ezpz_launch import main
from ezpz_launch._job.jobs import Tail
from ezpz_launch._run.record import last_record

HOST = os.uname().nodename
SAYS_UNKNOWN = "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1"

SAVES = (
    "import os, signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(75)))\n"
    "print('ready', flush=True)\n"
    "while True: time.sleep(600)\n"
)
DEAF = SAVES.replace("(print('saved', flush=True), sys.exit(75))", "None")

TRAINS = (
    "import json, os, sys, time\n"
    "here = os.path.abspath('metrics.jsonl')\n"
    "while os.environ['RANK'] == '1':\n"
    "    if os.path.exists(os.environ['EZPZ_RUN_FILE']): sys.exit(3)\n"
    "    time.sleep(0.02)\n"
    "with open(here, 'w') as file:\n"
    "    file.write(json.dumps({'ezpz_obs': 1}, separators=(',', ':')) + '\\n')\n"
    "    for step in range(3):\n"
    "        record = {'step': step, 'time': 1.5, 'lr': 0.1, 'train/loss': 2.0 / (step + 1)}\n"
    "        file.write(json.dumps(record, separators=(',', ':')) + '\\n')\n"
    '    file.write(\'{"step":3,"ti\')\n'
    "said = os.environ['EZPZ_RUN_FILE']\n"
    "with open(said + '.new', 'w') as file: file.write(here + '\\n')\n"
    "os.rename(said + '.new', said)\n"
)


# What is recorded.


@pytest.fixture
def in_job(spawned, tmp_path):
    """Launch two ranks as if in a job of Slurm's that is over; return what `jobs` says then."""
    env = {"SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": HOST, "SLURM_NTASKS": "2"}

    def run(*words):
        return spawned("-n", "2", *words, env=env, cwd=tmp_path)

    return run


def test_a_job_that_no_scheduler_knows_is_told_from_its_launches(in_job, launch, tmp_path):
    assert in_job(sys.executable, "-c", TRAINS).returncode == 3
    (told,) = json.loads(launch("jobs", "--json").stdout)
    assert (told["id"], told["state"], told["exit_status"]) == ("4242", "failed", 3)
    assert (told["first_failure"]["rank"], told["first_failure"]["status"]) == (1, 3)
    run = str(tmp_path / "metrics.jsonl")
    assert told["progress"] == {"step": 2, "loss": 2 / 3, "time": 1.5, "run": run}
    table = launch("jobs").stdout
    assert "failed with status 3" in table
    assert "rank 1 on " in table
    whole = launch("jobs", "4242").stdout
    line = rf"^launch +{told['launches'][0]} on {re.escape(HOST)}: ended$"
    assert re.search(line, whole, re.MULTILINE)
    assert json.loads(launch("jobs", "4242", "--json").stdout) == told
    none = launch("jobs", "nothing")
    assert none.returncode == 2
    assert "no job 'nothing'; expected a name or an id of yours, such as " in none.stderr


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ('{"step":1,"time":2.5,"loss":0.5}\n{"step":2,"ti', {"step": 1, "loss": 0.5, "time": 2.5}),
        ('{"step":7,"time":1,"loss":"NaN","crc":"0"}\n{"event":"end"}\n',
         {"step": 7, "loss": "NaN", "time": 1}),
        ('{"step":7,"time":1,"val_loss":3,"lr":1}\n', {"step": 7, "loss": 3, "time": 1}),
        ('{"step":7,"time":1,"lossless":3}\n', {"step": 7, "time": 1}),
        # A damaged line: the record before it is the last one.
        ('{"step":1,"time":1}\n{"step":2,"lo\n', {"step": 1, "time": 1}),
        ('{"step":1,"time":1}\n{"step":2}\n', {"step": 1, "time": 1}),
        ('{"step":1,"time":1}\n{"step":2,"a\udcff":1,"time":1}\n\0\0\n', {"step": 1, "time": 1}),
        ('{"ezpz_obs":1}\n', {}),
    ],
)  # fmt: skip
def test_the_last_record_of_a_run(tmp_path, lines, found):
    path = tmp_path / "metrics.jsonl"
    path.write_text("x" * 100_000 + "\n" + lines, errors="surrogateescape")
    assert last_record(str(path)) == (found and {**found, "run": str(path)})


# A scheduler that is down.


def test_a_scheduler_that_hangs_is_an_error_that_names_the_command(launch, program, clean_env):
    folder = os.path.dirname(program("bin/squeue", "exec sleep 600"))
    env = {"PATH": f"{folder}:{clean_env['PATH']}", "EZPZ_SCHEDULER_TIMEOUT": "0.5"}
    env |= {"EZPZ_SHARED_FOLDERS": sys.prefix, "EZPZ_MACHINE": "generic-slurm"}
    done = launch("jobs", env=env)
    assert (done.returncode, done.stdout) == (2, "")
    assert "'squeue --noheader" in done.stderr
    assert "gave no answer in 0.5 s (1 attempt)" in done.stderr


def test_a_followed_job_that_slurm_forgets_is_of_unknown_state(
    launch, program, clean_env, tmp_path
):
    when = ["2026-11-28T10:00:00"] * 3
    row = ["12", "12", "RUNNING", "None", "all", "1", *when, "0", "0", "c1", "n1", "train"]
    # Whoever picks it asks once, and the follower at first.
    forgets = (
        f"echo >>{tmp_path}/asked; [ $(wc -l <{tmp_path}/asked) -lt 3 ] || {{ {SAYS_UNKNOWN}; }}"
    )
    of_one = f"*--jobs=*) {forgets}; printf '%s\036' '{chr(31).join(row)}' ;;"
    path = program("bin/squeue", f'case "$*" in {of_one} esac')
    program("bin/scontrol", "exit 1")
    program("bin/sacct", "echo Slurm accounting storage is disabled >&2; exit 1")
    env = {"PATH": f"{os.path.dirname(path)}:{clean_env['PATH']}"}
    done = launch("follow", "12", env=env)
    assert done.returncode == 1
    assert "job 12 (train): running on n1" in done.stderr
    assert "job 12 (train): unknown (its scheduler tells no more of it)" in done.stderr


@pytest.mark.parametrize(
    ("command", "word"),
    [("jobs", "99999"), ("follow", "99999.srv"), ("kill", "99999[]"), ("kill", "99999_3")],
)
def test_an_id_that_pbs_does_not_know_is_no_job(
    *, program, clean_env, monkeypatch, capsys, command, word
):
    program("bin/qselect", "")
    path = program("bin/qstat", 'echo "qstat: Unknown Job Id $5" >&2; exit 153')
    env = {**clean_env, "PATH": f"{os.path.dirname(path)}:{clean_env['PATH']}"}
    monkeypatch.setattr(os, "environ", env)
    assert main([command, word]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"no job '{word}'; expected a name or an id of yours" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["jobs", "--al"], "jobs: '--al' is not known here; expected usage: ezpz jobs"),
        (["kill", "a", "b"], "kill: 'b'; expected one name or id at most"),
        (["follow"], "0 jobs wait or run; expected one"),
        (["kill", "20261124T150102123456Z-42-a1b2c3"], "does not run; expected one that does"),
    ],
)
def test_what_is_not_there_is_refused(clean_env, monkeypatch, capsys, words, said):
    monkeypatch.setattr(os, "environ", clean_env)
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["jobs", "follow", "kill", "launches"])
def test_each_has_a_page_with_examples(capsys, name):
    assert main([name, "--help"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("usage: ezpz")
    assert "examples:" in page


# A file that is followed.


@pytest.fixture
def tail(tmp_path):
    """A tail of ``out``, and what it has copied since it was last asked."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    followed = Tail(str(tmp_path / "out"), write)

    def copied():
        followed.copy()
        try:
            return os.read(read, 1 << 20).decode()
        except BlockingIOError:
            return ""

    yield copied
    os.close(read)
    os.close(write)


def test_a_file_is_copied_as_it_grows_and_is_begun_again(tail, tmp_path):
    path = tmp_path / "out"
    assert tail() == ""  # it is not there yet
    with path.open("a") as file:
        for text in ("first\nhal", "f\nlast\n"):
            file.write(text)
            file.flush()
            assert tail() == text
        assert tail() == ""
    for text in ("shorter\n", "as long\n", "begun again\n"):  # as a requeued job does
        path.write_text(text)
        assert tail() == text
    path.unlink()
    assert tail() == ""


def test_of_a_long_file_the_end_is_copied(tail, tmp_path, capfd):
    (tmp_path / "out").write_text("x" * (1 << 20) + "end\n")
    text = tail()
    assert text.endswith("xend\n")
    assert len(text) == 1 << 16
    assert f"of which {(1 << 20) + 4 - (1 << 16)} bytes stand before this" in capfd.readouterr().err


# A launch that is ended.


@pytest.fixture
def started(background):
    """Start launches of two ranks; return their processes once all ranks are ready."""

    def start(*programs):
        pipe = subprocess.PIPE
        launches = [
            background("-n", "2", sys.executable, "-c", text, stdout=pipe, text=True)
            for text in programs
        ]
        for one in launches:
            assert [one.stdout.readline(), one.stdout.readline()] == ["ready\n"] * 2
        return launches

    return start


def of(process, history):
    """Return the record of a launch."""
    return next(one for one in history() if one["pid"] == process.pid)


def test_one_launch_is_ended_by_its_id_and_no_other(started, launch, history):
    first, second = started(SAVES, SAVES)
    # Inside a job its only launch is meant, and neither is one of this job.
    done = launch("kill", env={"SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": HOST})
    assert done.returncode == 2
    assert "launches that run in job 4242: none; expected one" in done.stderr
    assert first.poll() is None
    done = launch("kill", of(first, history)["id"])
    assert done.returncode == 0
    assert "has ended, exit status 75" in done.stderr
    assert (first.wait(), first.stdout.read()) == (75, "saved\nsaved\n")
    assert second.poll() is None
    assert of(second, history)["state"] == "running"


@pytest.mark.parametrize("way", ["here", "elsewhere"])
def test_without_grace(started, launch, history, clean_env, way):
    (deaf,) = started(DEAF)
    found = of(deaf, history)["id"]
    if way == "here":
        assert launch("kill", "--now", found).returncode == 0
    else:  # as from another host
        with open(f"{clean_env['EZPZ_STATE_DIR']}/launches/{found}.end", "w") as file:
            file.write("now\n")
    assert deaf.wait() == 143
    assert not os.path.exists(f"{clean_env['EZPZ_STATE_DIR']}/launches/{found}.end")
    assert of(deaf, history)["exit_status"] == 143
