"""Jobs as Slurm 22.05.8 (squeue, and sacct with slurmdbd) and OpenPBS 23.06 told of them."""

import pytest

from ezpz_launch import UsageError
from ezpz_launch._job.queue import SCHEDULERS, Job, _pbs_job, _slurm_job, require_one_cluster

BALANCE = "Remaining balance: 497,218 hours"

SUBMITTED = [
    # of sbatch, with --parsable and without
    ("slurm", "123\n", ("123", "")),
    ("slurm", "123;foo\n", ("123", "foo")),
    ("slurm", "Submitted batch job 123\n", ("123", "")),
    ("slurm", "Submitted batch job 123 on cluster foo\n", ("123", "foo")),
    ("slurm", f"{BALANCE}\n123;foo\n\n{BALANCE}\n", ("123", "foo")),
    ("slurm", f"\x1b[1mWelcome\x1b[0m\n  123 \r\n{BALANCE}\n", ("123", "")),
    ("slurm", "", None),
    ("slurm", f"{BALANCE}\n", None),
    ("slurm", "123\n497218\n", None),
    # of qsub
    ("pbs", "123.pbs-0001\n", ("123.pbs-0001", "")),
    ("pbs", f"{BALANCE}\n123.polaris-pbs-01.hsn.cm\n497218.50\n",
     ("123.polaris-pbs-01.hsn.cm", "")),
    ("pbs", "", None),
    ("pbs", f"497218.50\n{BALANCE}\n", None),
    ("pbs", "12.srv\n13.srv\n", None),
]  # fmt: skip


@pytest.mark.parametrize(("scheduler", "text", "found"), SUBMITTED)
def test_the_id_in_what_a_submission_printed(scheduler, text, found):
    assert SCHEDULERS[scheduler]({}).find_job_id(text) == found


SLURM = {
    # state, reason, exit code, restarts; the others are seen in tests/slurm
    ("FAILED", "JobLaunchFailure", "9", "0"): ("failed", 137),
    ("PENDING", "BeginTime", "0", "0"): ("queued", None),
    ("NODE_FAIL", "NodeDown", "0", "0"): ("node failed", None),
    ("CANCELLED", "JobHeldUser", "0", "0"): ("cancelled", None),
    ("OUT_OF_MEMORY", "OutOfMemory", "253", "0"): ("out of memory", None),
    # sacct's
    ("COMPLETED", "", "0:0", ""): ("completed", 0),
    ("FAILED", "", "7:0", ""): ("failed", 7),
    ("FAILED", "", "0:9", ""): ("failed", 137),
    ("CANCELLED by 0", "", "0:0", ""): ("cancelled", None),
    ("TIMEOUT", "", "0:0", ""): ("time limit", None),
    ("PREEMPTED", "", "0:0", ""): ("preempted", None),
    ("NODE_FAIL", "", "0:0", ""): ("node failed", None),
    ("OUT_OF_MEMORY", "", "0:125", ""): ("out of memory", None),
}


@pytest.mark.parametrize("told", SLURM)
def test_what_slurm_tells(told):
    state, why, status, restarts = told
    job = _slurm_job({
        "id": "12_3", "key": "15", "name": "a b\nc|d", "state": state, "why": why, "queue": "all",
        "nodes": "2", "submitted": "2026-11-24T15:23:14", "start": "N/A", "status": status,
        "end": "2026-11-24T15:24:17", "restarts": restarts, "hosts": "None assigned",
    })  # fmt: skip
    assert (job.state, job.exit_status) == SLURM[told]
    assert (job.id, job.key, job.name, job.nodes) == ("12_3", "15", "a b\nc|d", 2)
    assert (job.submitted, job.start, job.hosts) == (1795533794.0, None, "")
    assert job.end == (None if job.state == "queued" else 1795533857.0)
    assert ("or with status 135" in job.why) == (status == "7:0"), "it may have been more than 128"


RUN = "Job run at Tue Nov 24 at 15:35 on (x1n0:ncpus=1)"
PBS = {
    "running": ({"job_state": "R", "comment": RUN}, None),
    "suspended": ({"job_state": "S", "comment": RUN}, None),
    "queued": ({"job_state": "Q", "comment": "Not Running: Insufficient amount of resource"}, None),
    "queued, depends": ({"job_state": "H", "Hold_Types": "s", "depend": "afterany:1.s@s"}, None),
    "held": ({"job_state": "H", "Hold_Types": "u"}, None),
    "cannot start": ({"job_state": "Q", "comment": "Can Never Run: Insufficient amount"}, None),
    "requeued": ({"job_state": "Q", "run_count": "1", "Exit_status": "-20"}, None),
    "completed": ({"job_state": "F", "Exit_status": "0", "comment": f"{RUN} and finished"}, 0),
    "failed": ({"job_state": "F", "Exit_status": "5", "comment": f"{RUN} and failed"}, 5),
    "failed, SIGKILL": ({"job_state": "F", "Exit_status": "265", "comment": RUN}, 137),
    "cancelled": ({"job_state": "F", "Exit_status": "271", "substate": "91"}, 143),
    "cancelled, waiting": ({"job_state": "F", "substate": "91"}, None),
    "preempted": ({"job_state": "F", "Exit_status": "271", "substate": "91",
                   "comment": f"{RUN} and terminated by Scheduler@pbs-0001"}, 143),
    "time limit": ({"job_state": "F", "Exit_status": "-29",
                    "comment": f"{RUN} and exceeded resource walltime"}, None),
    "node failed": ({"job_state": "F", "Exit_status": "-20", "comment": RUN}, None),
    "out of memory": ({"job_state": "F", "Exit_status": "-27",
                       "comment": f"{RUN} and exceeded resource mem"}, None),
}  # fmt: skip


@pytest.mark.parametrize("state", PBS)
def test_what_pbs_tells(state):
    told, status = PBS[state]
    job = _pbs_job("7.pbs-0001", {
        "Job_Name": "e-spool", "queue": "workq", "exec_host": "x1n0/0*2+x1n1/0*2", "stime": 1000.0,
        "Resource_List": {"nodect": "2", "walltime": 300.0}, "obittime": 1100.0,
        "Output_Path": "pbs-0001:/home/alice/e-spool.o7", "Join_Path": "oe", **told,
    })  # fmt: skip
    assert (job.state, job.exit_status) == (state.partition(",")[0], status)
    assert (job.nodes, job.hosts) == (2, "x1n[0-1]")
    assert (job.stdout, job.stderr) == ("/home/alice/e-spool.o7",) * 2
    ends = {"R": 1300.0, "S": 1300.0, "F": 1100.0}
    assert job.end == ends.get(told["job_state"])


@pytest.mark.parametrize(
    ("job_id", "attributes", "path", "keeper"),
    [
        ("7.s", {"Keep_Files": "n"}, "/d/n.o7", "x1n0"),
        ("7.s", {"Keep_Files": "doe"}, "/d/n.o7", ""),
        ("7.s", {"Keep_Files": "oe"}, "~/n.o7", ""),
        ("7[3].s", {"Output_Path": "h:/d/n.o7.^array_index^"}, "/d/n.o7.3", "x1n0"),
        ("7.s", {"Output_Path": "h:/d/"}, "/d/7.s.OU", "x1n0"),
    ],
)
def test_where_pbs_puts_the_output(monkeypatch, job_id, attributes, path, keeper):
    monkeypatch.setenv("HOME", "~")
    told = {"job_state": "R", "Job_Name": "n", "exec_host": "x1n0/0", "Output_Path": "h:/d/n.o7"}
    job = _pbs_job(job_id, {**told, **attributes})
    assert (job.stdout, job.keeper) == (path, keeper)


def test_an_id_that_several_clusters_have_is_refused():
    jobs = [Job("slurm", "12", "12", "train", "running", cluster=cluster) for cluster in ("b", "a")]
    with pytest.raises(UsageError, match=r"job 12 is on clusters a, b; .* export SLURM_CLUSTERS=a"):
        require_one_cluster("12", jobs)
    require_one_cluster("12", jobs[:1])
