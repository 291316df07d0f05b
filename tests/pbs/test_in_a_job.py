"""A real PBS: what its profile, its node file and its signals make of our commands."""

import json

DEAF = """
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", os.environ["RANK"], flush=True)
while True:
    time.sleep(1)
"""


def history(pbs, job):
    """Return the newest launch of a job, as the login node tells of it."""
    told = json.loads(pbs.on("pbs-0001", f"{pbs.home}/env/bin/ezpz-launch launches --json"))
    return [one for one in told if one["job_id"] == job][-1]


def test_its_own_mpiexec_is_passed_over(pbs):
    # a login shell has PBS's on PATH, and not the environment's
    said = pbs.on("x1n0", f"command -v mpiexec; {pbs.home}/env/bin/ezpz-launch -n 2 printenv RANK")
    first, *ranks = said.split()
    assert first.startswith("/")
    assert not first.startswith(pbs.home)
    assert sorted(ranks) == ["0", "1"]


def test_a_shell_that_knows_nothing_of_its_nodes_job(pbs):
    job = pbs.sub("echo started; sleep 600", "-l", "select=2:ncpus=1:mpiprocs=2")
    pbs.writes(job, "started")
    plain = f". {pbs.home}/env/bin/activate; PATH={pbs.home}/env/bin:/usr/bin:/bin; "
    # what PBS's profile sets is where its configuration lies, and no more
    where = "export PBS_EXEC; "
    for node in ("x1n0", "x1n1", "x1n2"):
        asked = pbs.on(node, plain + where + "ezpz-topo --ask")
        hint = pbs.on(node, plain + where + "ezpz-launch -n 1 true 2>&1")
        on_node = node != "x1n2"
        assert (job in asked) is on_node, asked
        assert (f"this host is a node of your job {job} (x1n[0-1])" in hint) is on_node, hint
        assert (f"export PBS_JOBID={job}" in hint) is on_node


def test_the_node_file_lies_on_every_node(pbs):
    other = "pbs_tmrsh x1n1 /bin/bash -c '. /etc/profile; cat $PBS_NODEFILE; uname -n'"
    job = pbs.sub(other, "-l", "select=2:ncpus=1")
    assert pbs.ended(job).split()[-3:] == ["x1n0", "x1n1", "x1n1"]


def test_deleted_its_end_is_on_record_before_pbs_kills(pbs):
    deaf = pbs.write("deaf.py", DEAF)
    job = pbs.sub(f"ezpz-launch -n 2 python {deaf}", "-l", "select=1:ncpus=2")
    pbs.writes(job, "deaf 1")
    pbs.on("pbs-0001", f"qdel {job}")
    pbs.ended(job)
    told = history(pbs, job)
    assert (told["state"], told["exit_status"]) == ("ended", 143)


def test_killed_with_its_job_it_was_ended_by_the_scheduler(pbs):
    deaf = pbs.write("deaf.py", DEAF)
    job = pbs.sub(f"ezpz-launch -n 2 --grace 600 python {deaf}", "-l", "select=1:ncpus=2")
    pbs.writes(job, "deaf 1")
    assert history(pbs, job)["state"] == "unknown"  # it runs, on a host that is not this one
    pbs.on("pbs-0001", f"qdel {job}")
    pbs.ended(job)
    assert history(pbs, job)["state"] == "ended by the scheduler"
