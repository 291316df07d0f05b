"""The job's end, by variables and by scontrol and qstat, replayed at the process boundary.

The forms are those captured from Slurm 22.05.8 and OpenPBS 23.06.
"""

from datetime import UTC, datetime

import pytest

from ezpz_launch import LaunchError, UsageError
from ezpz_launch._retry import UnansweredError, job_end, time_limit, when_to_signal
from ezpz_topo import Allocation, get_allocation

END = datetime(2026, 11, 21, 2, 15, 43, tzinfo=UTC).timestamp()
NOW = END - 300

SLURM = {
    "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "nid[001-002]", "SLURM_NTASKS": "4",
    "SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURMD_NODENAME": "nid001",
}  # fmt: skip
SCONTROL = """\
JobId=12 JobName=probe
   UserId=alice(1000) GroupId=alice(1000) MCS_label=N/A
   Priority=4294901757 Nice=0 Account=(null) QOS=(null)
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:57 TimeLimit=00:05:00 TimeMin=N/A
   SubmitTime=2026-11-21T02:10:40 EligibleTime=2026-11-21T02:10:40
   AccrueTime=2026-11-21T02:10:40
   StartTime=2026-11-21T02:10:43 EndTime={end} Deadline=N/A
   Partition=debug AllocNode:Sid=login1:4242
   NodeList=nid[001-002]
   BatchHost=nid001
   NumNodes=2 NumCPUs=4 NumTasks=4 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
"""
PBS = {"PBS_JOBID": "1.pbs-0001", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_JOBNAME": "probe"}
QSTAT = """\
{{
    "timestamp":1795227100,
    "pbs_version":"23.06.06",
    "pbs_server":"pbs-0001",
    "Jobs":{{
        "1.pbs-0001":{{
            "Job_Name":"probe",
            "Job_Owner":"alice@login1",
            "job_state":"R",
            "queue":"workq",
            "exec_host":"x1n0/0*2+x1n1/0*2",
            "Resource_List":{{
                "mpiprocs":4,
                "ncpus":4,
                "nodect":2,
                "place":"scatter",
                "select":"2:ncpus=2:mpiprocs=2"{walltime}
            }},
            "stime":"Sat Nov 21 02:10:43 2026"
        }}
    }}
}}
"""


@pytest.fixture
def scheduler(tmp_path):
    """Make a PATH where a command prints this answer, and notes that it was asked."""

    def serve(command, answer):
        (tmp_path / "answer").write_text(answer)
        path = tmp_path / command
        path.write_text(f"#!/bin/sh\necho x >> '{tmp_path}/asked'\ncat '{tmp_path}/answer'\n")
        path.chmod(0o755)
        return {"PATH": f"{tmp_path}:/usr/bin:/bin", "USER": "alice"}

    return serve


def asked(tmp_path):
    return (tmp_path / "asked").exists()


def end_of(env, now=NOW):
    return job_end(get_allocation(env), env, now=now)


def test_slurms_variable_needs_no_command(tmp_path, scheduler):
    env = {**SLURM, **scheduler("scontrol", ""), "SLURM_JOB_END_TIME": str(int(END))}
    assert end_of(env) == (END, "SLURM_JOB_END_TIME")
    assert not asked(tmp_path)


def test_a_variable_that_is_past_is_asked_about(tmp_path, scheduler):
    # the limit was extended after the job had started
    answer = SCONTROL.format(end="2026-11-21T02:15:43")
    env = {**SLURM, **scheduler("scontrol", answer), "SLURM_JOB_END_TIME": str(int(END) - 3600)}
    assert end_of(env) == (END, "scontrol show job")
    assert asked(tmp_path)


@pytest.mark.parametrize("variable", [{}, {"SLURM_JOB_END_TIME": str(2**32 - 1)}])
def test_scontrol(scheduler, variable):
    answer = SCONTROL.format(end="2026-11-21T02:15:43")
    assert end_of({**SLURM, **scheduler("scontrol", answer), **variable})[0] == END


@pytest.mark.parametrize(("walltime", "seconds"), [('"00:05:00"', 300), ("300", 300), ("60", 60)])
def test_qstat(scheduler, walltime, seconds):
    answer = QSTAT.format(walltime=f',\n                "walltime":{walltime}')
    found = end_of({**PBS, **scheduler("qstat", answer)})
    # the node file is missing, so qstat told of the hosts too, and of the end with them
    assert found == (END - 300 + seconds, "qstat -f -F json")


@pytest.mark.parametrize(
    ("env", "served", "said"),
    [
        (SLURM, ("scontrol", SCONTROL.format(end="Unknown")), "job 12 has no time limit"),
        (
            SLURM,
            ("scontrol", "slurm_load_jobs error: Invalid job id"),
            "expected the end of job 12",
        ),
        (PBS, ("qstat", QSTAT.format(walltime="")), "job 1.pbs-0001 has no time limit"),
        (PBS, ("qstat", "qstat: Unknown Job Id"), "end is not known: .* qstat -f -F json"),
        ({}, ("squeue", ""), "no job here"),
        ({}, ("qselect", "?"), "end is not known: PBS job id"),
    ],
)
def test_an_end_that_nobody_tells(tmp_path, scheduler, env, served, said):
    given = {**env, **scheduler(*served)}
    job = Allocation("pbs" if env is PBS else "slurm" if env else "none", None, ())
    with pytest.raises(LaunchError, match=said) as caught:
        job_end(job, given, now=NOW)
    assert asked(tmp_path)
    # Who is in a job, and has no answer yet, asks again.
    later = "has no time limit" not in said and bool(env)
    assert isinstance(caught.value, UnansweredError) == later
    text = str(caught.value)
    assert text.startswith("--signal-before: ")
    assert "expected" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("start", "end", "limit"),
    [
        ("1795227043", "1795227343", 300.0),
        ("1795227043", "4294967295", None),
        ("1795227043", "", None),
        ("", "1795227343", None),
        ("1795227343", "1795227043", None),
        ("soon", "1795227343", None),
    ],
)
def test_the_limit_by_slurms_variables(start, end, limit):
    assert time_limit({"SLURM_JOB_START_TIME": start, "SLURM_JOB_END_TIME": end}) == limit
    assert time_limit({}) is None


@pytest.mark.parametrize(
    ("before", "limit", "wait", "note"),
    [
        (60, None, 240.0, ""),
        (299.5, 300, 0.5, ""),
        (300, 3600, 0.0, "300 s of the job are left"),
        (500, 3600, 0.0, "300 s of the job are left"),
        (500, None, 0.0, "300 s of the job are left"),
    ],
)
def test_when(before, limit, wait, note):
    found = when_to_signal(END, before, NOW, limit=limit)
    assert found[0] == wait
    assert bool(found[1]) == bool(note)
    assert note in found[1]


def test_an_end_that_is_past():
    assert "its end was 5 s ago" in when_to_signal(END, 60, END + 5)[1]


@pytest.mark.parametrize("before", [0, -1, float("nan"), float("inf")])
def test_no_time_to_wait(before):
    with pytest.raises(UsageError, match="expected a number of seconds above 0"):
        when_to_signal(END, before, NOW)


@pytest.mark.parametrize("before", [300, 301])
def test_longer_than_the_whole_job(before):
    with pytest.raises(UsageError, match="the whole job has 300 s; expected less"):
        when_to_signal(END, before, NOW, limit=300)
