"""`ezpz-launch jobs`, `follow` and `kill` on a real Slurm: how each job ends, or does not start."""

import json
import os
import subprocess
import sys
import time

import pytest

ALL = ("-N", "4", "--exclusive")  # what a job in the partition high wants, too
SLEEP = "sleep 300"


class Jobs:
    """Jobs of a test, and what our commands say of them."""

    def __init__(self, slurm, command, folder):
        self.slurm, self._command, self.folder = slurm, command, folder
        self.env = {"EZPZ_STATE_DIR": str(folder / "state")}
        self._started = []

    def submit(self, text, *options):
        """Submit a job that runs a text in the test's folder; return its id."""
        script = f"#!/bin/bash\ncd {self.folder}\n{text}\n"
        path = self.folder / f"job-{len(list(self.folder.iterdir()))}"
        path.write_text(script)
        words = ["sbatch", "--parsable", "-D", str(self.folder), *options, str(path)]
        return self.slurm.run(words, env=self.env).stdout.strip()

    def ours(self, *words, **more):
        return self.slurm.run([self._command, *words], env=self.env, **more)

    def start(self, *words):
        """Start a command of ours without waiting for it."""
        environment = {**self.slurm.environment, **self.env}
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [self._command, *words], env=environment, stdin=subprocess.DEVNULL, stdout=pipe,
            stderr=pipe, text=True,
        )  # fmt: skip
        self._started.append(process)
        return process

    def until(self, job, *states, timeout=500):
        """Wait until a job is in one of the states; return what is told of it."""
        until = time.monotonic() + timeout
        while (told := json.loads(self.ours("jobs", job, "--json").stdout))["state"] not in states:
            assert time.monotonic() < until, told
            time.sleep(0.3)
        return told

    def all_until(self, wanted, timeout=500):
        """Wait until each job has been in its state; return what is told of it then."""
        until, found = time.monotonic() + timeout, {}
        while len(found) < len(wanted):
            for told in json.loads(self.ours("jobs", "--json").stdout):
                if told["state"] == wanted.get(told["id"]):
                    found.setdefault(told["id"], told)
            assert time.monotonic() < until, (found, wanted)
            time.sleep(0.3)
        return found

    def end(self):
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def jobs(slurm, tool, tmp_path):
    tmp_path.chmod(0o755)
    ours = Jobs(slurm, tool("ezpz-launch"), tmp_path)
    yield ours
    ours.end()


def control(*words):
    return lambda jobs, job: jobs.slurm.run(["scontrol", *(w.format(job) for w in words)])


def lose_the_node(jobs, job):
    control("update", "nodename=nid003", "state=down", "reason=test")(jobs, job)


def preempt(jobs, _):
    jobs.submit("true", "-p", "high", *ALL)


def cancel(jobs, job):
    jobs.slurm.run(["scancel", job])


# Limits are whole minutes, and looked at twice a minute.
reach_the_limit = control("update", "JobId={}", "EndTime=now+1")

CASES = {
    # script, options, what is done to it once it runs; state, exit status of follow or why it waits
    "one beside the other": {
        "completed": ("exit 0", [], None, "completed", 0),
        "failed": ("exit 7", [], None, "failed", 7),
        "killed": ("kill -9 $$", [], None, "failed", 137),
        "cancelled": (SLEEP, [], cancel, "cancelled", 143),
        "limited": (SLEEP, ["-t", "1"], reach_the_limit, "time limit", 143),
        "held": (SLEEP, ["--hold"], None, "held", "JobHeldUser"),
        "never": (SLEEP, ["-d", "afterok:{failed}"], None, "cannot start",
                  "DependencyNeverSatisfied"),
        "requeued": (SLEEP, [], control("requeue", "{}"), "requeued", ""),
        "requeued-held": (SLEEP, [], control("requeuehold", "{}"), "held", ""),
        "suspended": (SLEEP, [], control("suspend", "{}"), "suspended", ""),
    },
    "a lost node": {
        "lost": (SLEEP, ["-w", "nid003", "--no-requeue"], None, "node failed", 137),
        "lost-requeued": (SLEEP, ["-w", "nid003", "--requeue"], lose_the_node, "requeued", ""),
    },
    "preempted": {"gone": (SLEEP, ["-p", "cancelled", *ALL], preempt, "preempted", 143)},
    "preempted and requeued": {"back": (SLEEP, ["-p", "requeued", *ALL], preempt, "requeued", "")},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_how_jobs_end_and_why_they_do_not_run(jobs, case):
    ids, followed, of_case = {}, {}, CASES[case]
    for name, (text, options, *_) in of_case.items():
        words = (word.format(**ids) for word in options)
        ids[name] = jobs.submit(f"echo started; {text}", "-J", name, *words)
        if name not in ("held", "never"):
            followed[name] = jobs.start("follow", ids[name])
    for process in followed.values():
        assert process.stdout.readline() == "started\n"
    for name, (_, _, act, _, _) in of_case.items():
        if act:
            act(jobs, ids[name])
    told = jobs.all_until({ids[name]: state for name, (*_, state, _) in of_case.items()})
    table = jobs.ours("jobs").stdout.splitlines()
    for name, (*_, state, status) in of_case.items():
        one = told[ids[name]]
        assert one["name"] == name
        if not isinstance(status, int):
            assert (one["exit_status"], status in one["why"]) == (None, True), one
            continue
        _, err = followed[name].communicate()
        assert followed[name].returncode == status, err
        words = {"failed": f"failed with status {status}", "time limit": "ended by its time limit"}
        assert f"job {ids[name]} ({name}): {words.get(state, state)}" in err
        assert words.get(state, state) in next(row for row in table if row.startswith(ids[name]))


def test_a_task_of_an_array(jobs):
    array = jobs.submit('echo "task $SLURM_ARRAY_TASK_ID"; exit $SLURM_ARRAY_TASK_ID', "-a", "0-2")
    told = jobs.until(f"{array}_2", "failed")
    assert (told["id"], told["exit_status"]) == (f"{array}_2", 2)
    followed = jobs.ours("follow", f"{array}_2", expect=2)
    assert followed.stdout == "task 2\n"
    # Its last task has the array's own number.
    assert f"no job '{array}'; expected" in jobs.ours("kill", array, expect=2).stderr


def test_a_job_is_followed_from_the_queue_across_a_requeue_to_its_end(jobs):
    text = 'echo "run ${SLURM_RESTART_COUNT:-0}"; [ "${SLURM_RESTART_COUNT:-0}" = 1 ] || sleep 300'
    job = jobs.submit(text, "--hold", "-J", "twice")
    followed = jobs.start("follow", "twice")
    line = followed.stderr.readline()
    assert f"job {job} (twice): held (JobHeldUser)" in line
    jobs.slurm.run(["scontrol", "release", job])
    assert followed.stdout.readline() == "run 0\n"
    jobs.slurm.run(["scontrol", "requeue", job])
    jobs.slurm.start_again(job)
    out, err = followed.communicate()
    assert "run 1" in out.splitlines(), err  # beside what Slurm says of the requeue
    assert followed.returncode == 0
    assert f"job {job} (twice): completed" in err


def test_an_id_that_slurm_does_not_know_is_no_job(jobs):
    held = jobs.submit("true", "--hold")
    # Never given, long forgotten, a task that is none, too large, and in the form of PBS.
    for unknown in ("99999", "99999_3", f"{held}_3", "9999999999999", "12.srv"):
        done = jobs.ours("kill", unknown, expect=2)
        assert f"no job '{unknown}'; expected a name or an id of yours" in done.stderr
        assert done.stdout == ""
    assert jobs.until(held, "held")["id"] == held


def test_lines_of_a_site_beside_jobs(jobs, talkative):
    jobs.env |= talkative
    held = jobs.submit("true", "--hold", "-J", "a\x1fb")
    array = jobs.submit("sleep 300", "-a", "0-1", "-J", "tasks")
    assert jobs.until(f"{array}_1", "running")["id"] == f"{array}_1"
    listed = {each["id"]: each for each in json.loads(jobs.ours("jobs", "--json").stdout)}
    assert (listed[held]["name"], listed[held]["state"]) == ("a\x1fb", "held")
    tasks = [f"{array}_0", f"{array}_1"]
    assert [listed[task]["name"] for task in tasks] == ["tasks", "tasks"]
    for job in (held, *tasks):
        jobs.ours("kill", job)
    assert "no job '99999'; expected" in jobs.ours("kill", "99999", expect=2).stderr
    done = jobs.submit("echo done")
    assert jobs.ours("follow", done).stdout == "done\n"


def test_ctrl_c_leaves_the_job_alone(jobs):
    job = jobs.submit(f"echo started; {SLEEP}")
    followed = jobs.start("follow")
    assert followed.stdout.readline() == "started\n"
    followed.send_signal(2)
    _, err = followed.communicate()
    assert followed.returncode == 130
    assert f"job {job} goes on without us; ezpz kill {job} ends it" in err
    assert jobs.until(job, "running")["id"] == job


TRAINS = """
import os, signal, sys, time
from ezpz_obs import History
history = History("run") if os.environ["RANK"] == "0" else None
def save(*_):
    time.sleep(2)
    os.write(1, b"saved\\n")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
for step in range(3):
    if history:
        history.update({"loss": 1.0 / (step + 1)})
os.write(1, b"ready\\n")
time.sleep(600)
"""


def test_killed_its_ranks_save_and_its_script_does_not_go_on(jobs, tool):
    (jobs.folder / "train.py").write_text(TRAINS)
    words = f"{tool('ezpz-launch')} --env MASTER_ADDR=127.0.0.1 {sys.executable} train.py"
    job = jobs.submit(f"{words}; echo went on", "-N", "2", "-n", "2", "-J", "train")
    followed = jobs.start("follow", "train")
    assert [followed.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    told = jobs.until(job, "running")
    progress = told["progress"]
    assert (progress["step"], progress["loss"]) == (2, 1 / 3)
    assert progress["run"] == os.path.realpath(jobs.folder / "run" / "metrics.jsonl")
    row = next(row for row in jobs.ours("jobs").stdout.splitlines() if job in row).split()
    assert row[:4] == [job, "train", "running", "2"]
    assert row[5:7] == ["2", "0.3333"]
    jobs.ours("kill", "train")
    out, _ = followed.communicate()
    assert out.count("saved") == 2
    assert "went on" not in out
    assert followed.returncode == 143
    assert jobs.until(job, "cancelled")["launches"]


def test_a_launch_inside_an_allocation_is_ended_and_no_other(jobs, tool):
    words = "--env MASTER_ADDR=127.0.0.1 sh -c 'echo up $1; exec sleep 300' -"
    launch = f"{tool('ezpz-launch')} -n 2 {words}"
    job = jobs.submit(f"{launch} a & {launch} b & wait -n; echo one is over; wait", "-N2", "-n4")
    followed = jobs.start("follow", job)
    assert sorted(followed.stdout.readline() for _ in range(4)) == ["up a\n"] * 2 + ["up b\n"] * 2
    found = {one["command"][-1]: one for one in json.loads(jobs.ours("launches", "--json").stdout)}
    done = jobs.ours("kill", found["a"]["id"])
    assert "has ended, exit status 143" in done.stderr
    while (line := followed.stdout.readline()) != "one is over\n":
        assert line
    left = {one["command"][-1]: one for one in json.loads(jobs.ours("launches", "--json").stdout)}
    assert (left["a"]["exit_status"], left["b"]["end"]) == (143, None)
    assert jobs.until(job, "running")
