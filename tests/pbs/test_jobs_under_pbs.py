"""`ezpz-launch jobs`, `follow` and `kill` on a real PBS: how each job ends, or does not start."""

import json
import os
import shlex
import time

import pytest

SLEEP = "sleep 300"
ONE = ("-l", "select=1:ncpus=1")


@pytest.fixture
def ours(pbs):
    """Run a command of ours on the login node; return what it prints, its exit status last."""

    def run(*words):
        words = f"{pbs.home}/env/bin/ezpz-launch {shlex.join(words)} 2>{pbs.home}/err"
        patient = "export EZPZ_SCHEDULER_TIMEOUT=60"  # the server is this machine's, and busy
        said = pbs.on("pbs-0001", f"{patient}; {words}; echo $?")
        if said.endswith("2\n"):
            print(pbs.on("pbs-0001", f"cat {pbs.home}/err"))  # pytest shows it where a test fails
        return said

    return run


@pytest.fixture
def until(ours):
    def wait(job, *states):
        until = time.monotonic() + 240
        while True:
            told = json.loads(ours("jobs", job, "--json").rpartition("}")[0] + "}")
            if told["state"] in states:
                return told
            assert time.monotonic() < until, told
            time.sleep(0.5)

    return wait


def delete(pbs, job):
    pbs.on("pbs-0001", f"qdel {job}")


def rerun(pbs, job):
    path = pbs.on("pbs-0001", "command -v qrerun").strip()
    pbs.run("on", "pbs-0001", path, job)  # an operator's


ENDS = {
    # script, options, what is done to it once it runs; state, exit status of follow
    "completed": ("true", [], None, "completed", 0),
    "failed": ("exit 7", [], None, "failed", 7),
    "killed": ("kill -9 $$", [], None, "failed", 137),
    "qdel": (SLEEP, [], delete, "cancelled", 143),
    "walltime": (SLEEP, ["-l", "walltime=0:00:10"], None, "time limit", 143),
    "qrerun": (SLEEP, [], rerun, "requeued running", None),
    "held": ("true", ["-h"], None, "held", None),
    "never": ("true", ["-l", "select=1:ncpus=99"], None, "cannot start", None),
}


@pytest.mark.parametrize("end", ENDS)
def test_how_a_job_ends_or_waits(pbs, ours, until, end):
    text, options, act, state, status = ENDS[end]
    job = pbs.sub(f"echo started; {text}", "-N", end, *ONE, *options)
    if act:
        until(job, "running")
        pbs.writes(job, "started")
        act(pbs, job)
    told = until(job, *(state.split(" ") if act is rerun else [state]))
    if act is rerun:
        assert told["state"] == "requeued" or told["restarts"] == 1
    if status is not None:
        said = ours("follow", job)
        assert "started" in said
        assert said.splitlines()[-1] == str(status)


@pytest.mark.usefixtures("impatient")
def test_a_job_whose_node_is_lost(pbs, ours, until):
    node = ("-l", "select=1:ncpus=1:host=x1n2")
    for_good = pbs.sub(f"echo started; {SLEEP}", "-N", "good", "-r", "n", *node)
    again = pbs.sub(f"echo started; {SLEEP}", "-N", "again", "-r", "y", *node)
    for job in (for_good, again):
        pbs.writes(job, "started")
    pbs.lose("x1n2")
    assert until(for_good, "node failed")["exit_status"] is None
    assert until(again, "requeued")["id"] == again
    said = ours("follow", for_good)
    assert "started" in said
    assert said.splitlines()[-1] == "137"


@pytest.fixture
def express(pbs):
    """A queue whose jobs take the nodes of others, in the way that is chosen."""

    def choose(order):
        pbs.manage(f"set sched preempt_order={order}")

    settings = ("queue_type=execution", "priority=200", "enabled=true", "started=true")
    pbs.manage("create queue express", *(f"set queue express {each}" for each in settings))
    yield choose
    jobs = pbs.jobs
    pbs.reset()
    pbs.run("wait", *jobs)
    pbs.manage("delete queue express", "set sched preempt_order=SCR")


@pytest.mark.parametrize(
    ("order", "state"), [("S", "suspended"), ("R", "requeued"), ("D", "preempted")]
)
def test_a_job_that_has_to_make_room(pbs, until, express, order, state):
    express(order)
    every = ("-l", "select=3:ncpus=4")
    job = pbs.sub(f"echo started; {SLEEP}", "-N", "room", *every)
    pbs.writes(job, "started")
    pbs.sub(SLEEP, "-q", "express", *every)
    assert until(job, state)["id"] == job


def test_a_task_of_an_array_and_the_array(pbs, ours, until):
    array = pbs.sub("exit $PBS_ARRAY_INDEX", "-J", "0-1", *ONE)
    number = array.partition("[")[0]
    task = until(f"{number}[1]", "failed")
    assert (task["id"], task["exit_status"]) == (array.replace("[]", "[1]"), 1)
    assert until(array, "failed")["id"] == array


def test_what_lies_on_the_spool_is_printed_at_the_end(pbs, ours):
    # behind the lab's own -koed, the last counts
    job = pbs.sub("echo spooled; sleep 5; exit 3", *ONE, "-k", "n", "-N", "spooled")
    said = ours("follow", "spooled")
    assert said.splitlines()[-2:] == ["spooled", "3"]
    assert job


TRAINS = """
import os, signal, sys, time
def save(*_):
    time.sleep(2)
    os.write(1, b"saved\\n")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
os.write(1, b"ready\\n")
time.sleep(600)
"""


def test_killed_its_ranks_save_on_both_nodes_and_its_script_does_not_go_on(pbs, ours, until):
    train = pbs.write("train.py", TRAINS)
    text = f"ezpz-launch -n 2 --ppn 1 python {train}; echo went on"
    job = pbs.sub(text, "-N", "train", "-l", "select=2:ncpus=2")
    until_ready = time.monotonic() + 120
    while pbs.output(job).count("ready") < 2:
        assert time.monotonic() < until_ready, pbs.output(job)
        time.sleep(0.2)
    assert ours("kill", "train").splitlines()[-1] == "0"
    told = until(job, "cancelled")
    assert (told["nodes"], len(told["launches"])) == (2, 1)
    said = pbs.output(job)
    assert said.count("saved") == 2
    assert "went on" not in said
    assert os.path.basename(told["stdout"]) == f"train.o{job.partition('.')[0]}"
