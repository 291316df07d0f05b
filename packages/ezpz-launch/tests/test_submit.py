"""What `ezpz submit` writes and asks, and how jobs of a chain see it through.

Schedulers stand here as programs that answer what real ones were seen to (tests/slurm and tests/pbs
have these). EZPZ_UPDATE_GOLDEN=1 writes the scripts of the machines again; lint looks at them.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ezpz_launch import main
from ezpz_launch._errors import StageError
from ezpz_launch._job.chain import path_of, read_chains, see_through
from ezpz_topo import get_hostname, known_machines

GOLDEN = Path(__file__).parent / "scripts"
MACHINES = [name for name, each in known_machines({}).items() if each.scheduler != "none"]
ODD = ["a b", "", "it's", '"', "$(touch x)", "`x`", "\\", "-n", "a\nb\n#PBS -q x", "\r\n", "*", "ü",
       "\udcff", "!", "$HOME", "--"]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to submit from, with a script; what this shell has of ezpz is out of the way."""
    for name in [name for name in os.environ if name.startswith(("EZPZ_M", "SBATCH_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    monkeypatch.setenv("EZPZ_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("EZPZ_SHARED_FOLDERS", sys.prefix)  # a clone may lie below /tmp
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path


@pytest.fixture
def said(capsys):
    def run(*words, status=0):
        assert main(["submit", *words]) == status
        out, err = capsys.readouterr()
        return out or err

    return run


# The script.


@pytest.mark.parametrize("name", MACHINES)
def test_the_script_of_a_machine(name, folder, said):
    assert {path.stem for path in GOLDEN.iterdir()} <= set(MACHINES), "none is left over"
    words = ["--time", "2h", "-A", "project", "--queue", "prod", "-N", "4", "--until-done"]
    words += ["--signal-before", "5m", "python", "train.py", "--lr", "1e-4"]
    told = json.loads(said("--dry-run", "--json", "--machine", name, *words))
    text = told["script"].replace(sys.prefix, "/env").replace(str(folder), "/project")
    golden = GOLDEN / f"{name}.sh"
    if os.environ.get("EZPZ_UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_words_arrive_byte_for_byte(folder, said, program):
    program("bin/ezpz-launch", "printf '%s\\0' \"$@\"")
    setup = folder / "set up.sh"
    setup.write_text(f"PATH={folder}/bin:$PATH\n")
    words = ["--dry-run", "--json", "--machine", "generic-slurm", "--env-setup", str(setup)]
    script = json.loads(said(*words, "--env", "A=b c", "--stage", "--", "python", *ODD))["script"]
    # as sbatch and bash read it
    assert b"\r\n" not in os.fsencode(script)
    ran = subprocess.run(
        ["bash", "-s"], input=os.fsencode(script), capture_output=True, check=True, cwd="/"
    )
    given = ran.stdout.decode(errors="surrogateescape").split("\0")[:-1]
    ours = ["--machine", "generic-slurm", "--env", "A=b c", "--stage=python"]
    assert given == [*ours, "python", *ODD]
    assert not (folder / "x").exists()


@pytest.mark.parametrize(("words", "lines"), [
    (["--submit-args", "--qos=x --exclusive=user"], ["#SBATCH --qos=x --exclusive=user"]),
    (["--time", "1d2h"], ["#SBATCH --time=26:00:00"]),
    (["--time", "1-00:30:00"], ["#SBATCH --time=24:30:00"]),
    (["--after", "12"], ["#SBATCH --dependency=afterok:12"]),
    (["--partition", "gpu"], ["#SBATCH --partition=gpu"]),
    (["--chain", "3"], ["#SBATCH --requeue --open-mode=append"]),
    (["--name", "x"], ["#SBATCH --job-name=x", "#SBATCH --output=x.o%j"]),
])  # fmt: skip
def test_options_become_directives(folder, said, words, lines):
    told = said("--dry-run", "--machine", "generic-slurm", *words, "python", "train.py")
    for line in lines:
        assert f"  {line}\n" in told
    asked = [line for line in told.splitlines() if "#SBATCH --exclusive" in line]
    assert len(asked) == (words[0] != "--submit-args"), "what --submit-args asks for is asked once"
    assert "EZPZ_CHAIN=" in told


@pytest.mark.parametrize(("env", "lines"), [
    ({}, ["module use /soft/modulefiles", "module load conda", "conda activate base"]),
    ({"EZPZ_MODULES": "a b"}, ["module load a b"]),
    ({"EZPZ_MODULES": ""}, []),
])  # fmt: skip
def test_modules_are_the_machines_unless_the_user_has_others(folder, said, monkeypatch, env, lines):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    told = said("--dry-run", "--machine", "polaris", "-A", "x", "--time", "1h", "python", "t.py")
    assert all(f"  {line}\n" in told for line in lines)
    assert ("module load" in told) is bool(lines)


# Refused before it is queued.

PBS = {
    "qstat": "exit 35",
    "qselect": "",
    "pbsnodes": """echo '{"nodes":{"a":{"resources_available":{"ncpus":4}},
    "b":{"resources_available":{"ncpus":4}}}}'""",
    "qsub": """
[ ! -e refuse ] || { cat refuse >&2; exit 188; }
number=$(($(cat number 2>/dev/null || echo 11) + 1))
echo $number >number
echo "qsub $*" >>log
echo $number.srv""",
    "qdel": 'echo "qdel $*" >>log',
}
"""A PBS that queues and runs nothing; by its answers as OpenPBS 23.06 gives them."""


@pytest.fixture
def pbs(folder, program, monkeypatch):
    """A fake PBS, whose jobs the test runs."""
    for name, text in PBS.items():
        path = program(f"bin/{name}", f"cd {shlex.quote(str(folder))} || exit", *text.splitlines())
    monkeypatch.setenv("PATH", f"{os.path.dirname(path)}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("EZPZ_MACHINE", "generic-pbs")
    return folder


@pytest.mark.parametrize(("words", "message"), [
    (["python", "no.py"], "no.py: no such file in "),
    (["no-such-program"], "'no-such-program': not found on PATH"),
    (["bash", "-s"], "'bash -s': bash without a program; expected one"),
    (["-N", "9", "true"], "-N 9: there are 2 nodes here"),
    (["--time", "90", "true"], "--time '90': expected such as 30m, 2h"),
    (["--time", "1m", "--signal-before", "60s", "true"], "--signal-before 60: all of the job"),
    (["--submit-args", "-J 0-9", "true"], "--submit-args: a job of ezpz submit has one task"),
    (["--until-done", "--chain", "2", "true"], "expected one of them"),
    (["--env-setup", "none.sh", "true"], "--env-setup none.sh: no such file"),
    (["--machine", "aurora", "--time", "1h", "true"], "--account is missing; aurora refuses"),
    (["--machine", "workstation", "true"], "workstation has no scheduler"),
])  # fmt: skip
def test_what_cannot_run_is_not_queued(pbs, said, words, message):
    assert message in said(*words, status=127 if words == ["no-such-program"] else 2)
    assert not (pbs / "log").exists()


def test_lines_of_a_site_beside_what_pbsnodes_tells(pbs, said, program):
    program("bin/pbsnodes", "echo Remaining balance: 497,218 hours", PBS["pbsnodes"])
    said("true")
    (script,) = (pbs / "state" / "jobs").glob("*.sh")
    assert "select=1:ncpus=4\n" in script.read_text()


def test_a_pbsnodes_of_other_lines_alone(pbs, said, program):
    program("bin/pbsnodes", "echo Welcome")
    told = said("true", status=2)
    assert "pbsnodes -a -F json printed 'Welcome\\n'; expected JSON with 'nodes'" in told


def test_an_environment_that_the_nodes_do_not_see(pbs, said, monkeypatch):
    monkeypatch.setattr(sys, "prefix", "/dev/shm/env")
    assert "/dev/shm/env is on a disk of this host alone (below /dev/shm)" in said("true", status=2)
    (pbs / "setup.sh").touch()
    assert said("--env-setup", "setup.sh", "true").startswith("12.srv\n")


# Into the queue, and through it.


@pytest.fixture
def chain(pbs, said, monkeypatch):
    """A chain that was submitted, and its jobs, which are run one after the other."""

    class Submitted:
        def __init__(self, *words):
            body = 'echo "$EZPZ_ATTEMPT" >>attempts; . ./next'
            launch = ("--launcher", "spawn", "-n", "1", "sh", "-c", body)
            self.printed = said("-N", "2", *words, *launch)

        @property
        def record(self):
            (found,) = read_chains(os.environ, 9)
            return found

        def run(self, text, number):
            """Run a job, whose rank does what the text says; return status and output."""
            (pbs / "next").write_text(text)
            (pbs / "nodes").write_text(f"{get_hostname()}\n")
            job = self.record.jobs[number]["id"]
            env = {**os.environ, "PBS_JOBID": job, "PBS_NODEFILE": str(pbs / "nodes")}
            ran = subprocess.run(
                ["bash", self.record.script], env=env, capture_output=True, text=True, check=False
            )
            return ran.returncode, ran.stderr

        def log(self):
            """Return what the scheduler was told, without the script's path."""
            return (pbs / "log").read_text().replace(self.record.script, "S").splitlines()

        def attempts(self):
            return (pbs / "attempts").read_text().split()

    return Submitted


SAVED = 'echo {} >"$EZPZ_PROGRESS_FILE"; exit 75'
KILLED = (
    'echo {} >"$EZPZ_PROGRESS_FILE"; echo $EZPZ_LAUNCH_ID | cut -d- -f2 | xargs kill -9; sleep 9'
)
SUBMITTED = "qsub -f S"


def after(job):
    return f"qsub -f -W depend=afterany:{job}.srv S"


@pytest.mark.parametrize(("words", "jobs", "outcome", "log"), [
    # each job queues the next; the last one's is taken away
    (["--until-done"], [SAVED.format(1), SAVED.format(2), "exit 0"], "done",
     [SUBMITTED, after(12), after(13), after(14), "qdel 15.srv"]),
    (["--until-done", "2"], [SAVED.format(1), SAVED.format(2)], "stopped", [SUBMITTED, after(12)]),
    (["--until-done"], ["exit 75", "exit 75"], "stopped",
     [SUBMITTED, after(12), after(13), "qdel 14.srv"]),
    (["--until-done"], ["exit 3"], "failed", [SUBMITTED, after(12), "qdel 13.srv"]),
    # killed, nothing could be written; the next job goes on
    (["--until-done", "3"], [KILLED.format(1), "exit 0"], "done",
     [SUBMITTED, after(12), after(13), "qdel 14.srv"]),
    (["--chain", "3"], [SAVED.format(1), "exit 0"], "done",
     [SUBMITTED, after(12), after(13), "qdel 14.srv"]),
    ([], ["exit 0"], "done", [SUBMITTED]),
    ([], ["exit 75"], "stopped", [SUBMITTED]),
])  # fmt: skip
def test_a_chain_is_seen_through(chain, words, jobs, outcome, log):
    submitted = chain(*words)
    for number, text in enumerate(jobs):
        assert submitted.record.outcome is None
        submitted.run(text, number)
    record = submitted.record
    if record.jobs[len(jobs) :]:  # surplus ends at once
        status, said = submitted.run("exit 9", len(jobs))
        assert (status, f"has nothing to do: {outcome}: {record.why}" in said) == (0, True), said
    assert (record.outcome, record.attempts) == (outcome, len(jobs)), record.why
    assert submitted.log() == log
    assert submitted.attempts() == [str(number) for number in range(len(jobs))]
    assert submitted.printed.startswith("12.srv")


@pytest.mark.parametrize(("bad", "status", "outcome"), [(1, 75, None), (9, 1, "failed")])
def test_a_job_whose_hosts_cannot_be_staged_to_is_followed_by_the_next(chain, bad, status, outcome):
    submitted = chain("--until-done")

    class Failing:
        launch_id, count = "launch", 1

        def run(self):
            raise StageError(dict.fromkeys(map(str, range(bad)), "no space is left"), 9)

    job = submitted.record.jobs[0]["id"]
    env = {**os.environ, "EZPZ_CHAIN": path_of(submitted.record), "PBS_JOBID": job}
    with pytest.raises(StageError) as caught:
        see_through(env, lambda *_: Failing())
    assert (caught.value.exit_status, submitted.record.outcome) == (status, outcome)


def test_a_requeued_job_is_one_more_attempt_of_the_same_job(chain):
    submitted = chain("--until-done", "4")
    submitted.run(KILLED.format(1), 0)
    submitted.run(SAVED.format(2), 0)
    record = submitted.record
    assert [job["id"] for job in record.jobs] == ["12.srv", "13.srv"]
    assert (record.attempts, record.best, record.outcome) == (2, 2, None)


def test_what_the_scheduler_refuses_is_said_in_its_words_and_leaves_nothing(pbs, said):
    (pbs / "refuse").write_text("qsub: Unauthorized Request\n")
    told = said("-A", "none", "--time", "1h", "true", status=2)
    assert "was refused: qsub: Unauthorized Request; asked for nodes 1, time 3600, " in told
    assert "account none" in told
    assert list((pbs / "state" / "jobs").iterdir()) == []


ENVIRONMENT = {
    # what users tell Slurm's commands
    "SLURM_CLUSTERS": True, "SLURM_CONF": True, "SLURM_JWT": True, "SLURM_TIME_FORMAT": True,
    "SBATCH_CLUSTERS": True, "SBATCH_QOS": True, "SALLOC_QOS": True, "SQUEUE_FORMAT": True,
    "SBATCH_ACCOUNT": True,
    # what is asked for in other words; that sbatch shall wait for the job's end
    "SBATCH_TIMELIMIT": False, "SBATCH_JOB_NAME": False, "SBATCH_WAIT": False,
    # what describes the job from which another is submitted
    "SLURM_JOB_ID": False, "SLURM_NTASKS": False, "SLURM_CLUSTER_NAME": False, "PBS_JOBID": False,
}  # fmt: skip


def test_what_sbatch_is_told_is_the_users_and_not_this_jobs(folder, said, program, monkeypatch):
    path = program("bin/sbatch", f"env >{folder}/env", "echo '12;here'")
    monkeypatch.setenv("PATH", f"{os.path.dirname(path)}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("EZPZ_MACHINE", "generic-slurm")
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("PBS_JOBID")  # it is one job or the other
    assert said("--time", "1h", "true").startswith("12\n")
    names = {line.partition("=")[0] for line in (folder / "env").read_text().splitlines()}
    assert {name: name in names for name in ENVIRONMENT} == ENVIRONMENT


def test_an_id_that_is_not_printed_is_an_error_and_the_jobs_before_go(pbs, said, program):
    first = "[ -e number ] || { echo 12.srv | tee number; exit 0; }"
    program("bin/qsub", f"cd {shlex.quote(str(pbs))} || exit", first, "echo submitted >&2")
    told = said("--chain", "3", "true", status=2)
    assert "ended well and printed 'submitted'; expected one line that is a job's id" in told
    assert "a job may be queued all the same: ezpz jobs shows it, and ezpz kill ends it" in told
    assert (pbs / "log").read_text() == "qdel 12.srv\n"


def test_a_successor_that_is_refused_stops_the_chain(chain, pbs):
    submitted = chain("--until-done")
    (pbs / "refuse").write_text("qsub: would exceed queue generic's per-user limit\n")
    status, said = submitted.run(SAVED.format(1), 0)
    assert (status, submitted.record.outcome) == (75, "stopped")
    assert said.count("would exceed queue generic's per-user limit") >= 2


def test_a_state_folder_that_cannot_be_written(pbs, said, monkeypatch):
    monkeypatch.setenv("EZPZ_STATE_DIR", "/proc/self")
    told = said("true", status=2)
    assert "/proc/self/jobs cannot be written" in told
    assert "set EZPZ_STATE_DIR to another" in told


def test_a_script_that_is_written_is_the_users_to_submit(pbs, said):
    told = said("--script", "job.sh", "--until-done", "3", "true")
    assert told.startswith("job.sh is written; to submit it: qsub -f ")
    assert not (pbs / "log").exists()
    (record,) = read_chains(os.environ, 9)
    assert (record.script, record.jobs) == (str(pbs / "job.sh"), ())
